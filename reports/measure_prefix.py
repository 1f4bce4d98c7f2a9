"""Measure what prefix caching saves: requests that share a long prefix, with caching and cold. Writes evidence.

    PYTHONPATH=.:kernels:calibration:simulator python reports/measure_prefix.py
    ... --model smollm2-135m --prefix-tokens 4096 --out reports/h200/prefix.json     (with weights, on a GPU)

``prefix.prefill_share_saved``: of the prefix tokens that requests repeat (all but the first request's), the share that
did not go through the model again. Outputs are compared with the cold run, token by token.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np

from aspire import EngineConfig, LLMEngine, SamplingParams
from aspire.evidence import write_evidence
from aspire.models import LoadedModel
from aspire.runlog import PREFILL

ROOT = Path(__file__).resolve().parents[1]


def run(
    given: argparse.Namespace, prompts: list[list[int]], caching: bool, model: LoadedModel | None
) -> tuple[LLMEngine, list[list[int]], dict[str, Any]]:
    """The engine, the outputs by prompt, and what prefill took."""
    config = EngineConfig(
        model=given.model,
        load_format="dummy" if given.model.startswith("tiny") else "auto",
        max_model_len=given.prefix_tokens + given.tail_tokens + given.output_tokens,
        max_num_seqs=given.requests,
        max_num_batched_tokens=2048,
        policy=given.policy,
        enable_prefix_caching=caching,
    )
    engine = LLMEngine(config, model=model)
    engine.begin_record()
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=given.output_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        outputs |= {one.request_id: one.outputs[0].token_ids for one in engine.step() if one.finished}
    table, steps, _ = engine.record()
    prefill = steps.column("mode") == PREFILL
    figures = {
        "prefill_tokens": int(steps.column("query_tokens")[prefill].sum()),
        "ttft_mean_s": float(np.mean(table.first_token_s - table.arrival_s)),
        "duration_s": float(np.nanmax(table.finish_s)),
    }
    return engine, [outputs[str(number)] for number in range(len(prompts))], figures


def main() -> int:
    """Run both, write the evidence; exit 1 when an output differs on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--policy", default="fixed:g=3")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix-tokens", type=int, default=4000)
    parser.add_argument("--tail-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "prefix.json")
    given = parser.parse_args()
    dice = random.Random(0)
    words = range(3, 128)  # token ids that every model has
    prefix = dice.choices(words, k=given.prefix_tokens)
    prompts = [prefix + dice.choices(words, k=given.tail_tokens) for _ in range(given.requests)]
    engine, found, warm = run(given, prompts, True, None)
    _, expected, cold = run(given, prompts, False, engine.loaded)
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    repeated = (given.requests - 1) * given.prefix_tokens
    saved = (cold["prefill_tokens"] - warm["prefill_tokens"]) / repeated
    print(f"{saved:.1%} of {repeated} repeated tokens saved; {equal} of {len(prompts)} outputs equal the cold run")
    print(f"with caching {warm}\ncold {cold}")
    detail = {"with_caching": warm, "cold": cold, "model": given.model, "policy": given.policy}
    detail |= {"prefix_tokens": given.prefix_tokens, "tail_tokens": given.tail_tokens, "repeated_tokens": repeated}
    common = {"n": given.requests, "spread": None}
    write_evidence(
        given.out,
        [
            {"id": "prefix.prefill_share_saved", "value": saved, "unit": "share", **common, "detail": detail},
            {"id": "prefix.outputs_equal", "value": equal, "unit": "requests", **common},
        ],
    )
    return int(equal < len(prompts) and engine.device.type == "cpu")


if __name__ == "__main__":
    raise SystemExit(main())
