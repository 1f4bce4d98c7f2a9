"""Measure acceptance of every page selector on real prompts, and whether every text is that of plain decoding.

    python reports/make_workloads.py --gsm8k FILE --aime FILE -o runs/workloads
    python reports/measure_acceptance.py --workloads runs/workloads -o reports/h200/acceptance.json

Four workloads at T = 0 and 0.7. In each, the prompts are decoded autoregressively; then, for every selector and budget,
each request drafts and verifies ``--rounds`` rounds in step with all others, from the end of its prompt. `reasoning`
prompts are first continued by the model itself (T = 0.7) by ``--reasoning-tokens``. The engine runs eagerly: acceptance
does not depend on CUDA graphs, and capturing them for every selector would take longer than the measurement.

What does not fit in ``--seconds`` is left out and named in the file. `reports/draw_acceptance.py` draws the file.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "kernels", "calibration", "simulator", "reports")]

from acceptance_settings import settings  # noqa: E402

from aspire import EngineConfig, LLMEngine, SamplingParams  # noqa: E402
from aspire.acceptance import AcceptanceStudy  # noqa: E402
from aspire.compare import Comparison  # noqa: E402
from aspire.evidence import write_evidence  # noqa: E402
from aspire.measure import run_requests  # noqa: E402
from aspire.prompts import Prompt, read_jsonl  # noqa: E402
from aspire.scheduler import SelectorSpec  # noqa: E402

WORKLOADS = ("gsm8k", "code", "documents", "reasoning")
TEMPERATURES = (0.0, 0.7)
CONTINUED = "reasoning"


def continued(engine: LLMEngine, prompts: list[Prompt], tokens: int) -> list[Prompt]:
    """The prompts with ``tokens`` tokens that the model wrote behind them at T = 0.7."""
    params = [
        SamplingParams(temperature=0.7, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=1_000_003 + index)
        for index in range(len(prompts))
    ]
    outputs = run_requests(engine, prompts, params).outputs
    return [
        Prompt(prompt.prompt_id, token_ids=(*(prompt.token_ids or ()), *output.outputs[0].token_ids))
        for prompt, output in zip(prompts, outputs, strict=True)
        if output is not None
    ]


class Sweep:
    """All cells: a workload at a temperature under a setting."""

    def __init__(self, engine: LLMEngine, given: argparse.Namespace) -> None:
        self._engine = engine
        self._given = given
        self._end_s = time.monotonic() + given.seconds
        self._prompts: dict[str, list[Prompt]] = {}
        self.results: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.same = Comparison(0, [])
        self.places: list[str] = []  # the cell of each difference

    def run(self) -> None:
        """Measure until all is done or the time is over: one budget in all workloads first, then the others."""
        for chosen in settings(self._engine.loaded.config.num_layers):
            for workload in WORKLOADS:
                for temperature in TEMPERATURES:
                    for result in self._cells(workload, temperature, chosen):
                        self.results.append(result)
                        print(f"{result['id']}: {result['value']}, {result['detail']['seconds']:.2f} s", flush=True)

    def prompts(self, workload: str) -> list[Prompt]:
        """The prompts of a workload, read (and continued) once."""
        if workload not in self._prompts:
            prompts = read_jsonl(self._given.workloads / f"{workload}.jsonl")[: self._given.num_prompts]
            if workload == CONTINUED:
                prompts = continued(self._engine, prompts, self._given.reasoning_tokens)
            self._prompts[workload] = prompts
        return self._prompts[workload]

    def left_out(self) -> dict[str, Any]:
        """The cells for which there was no time."""
        count = len(self.skipped)
        return {
            "id": "acceptance.cells_left_out",
            "value": count,
            "unit": "cells",
            "n": count + len(self.results),
            "spread": None,
            "detail": {"cells": self.skipped},
        }

    def _cells(self, workload: str, temperature: float, chosen: dict[str, SelectorSpec]) -> Iterator[dict[str, Any]]:
        given = self._given
        study = None
        for label, selector in chosen.items():
            name = f"acceptance.{workload}.T{temperature:g}.{label}"
            if not re.search(given.only, name):
                continue
            if time.monotonic() > self._end_s:
                self.skipped.append(name)
                continue
            study = study or self._study(self.prompts(workload), temperature)
            start_s = time.monotonic()
            measured = study.measure(selector)
            self.same += measured.comparison
            self.places += [name.removeprefix("acceptance.")] * len(measured.comparison.differences)
            found = {"workload": workload, "temperature": temperature, "label": label} | rounded(measured.to_json())
            del found["differences"]  # they are all told together, by `lossless`
            found["prompt_tokens"] = int(measured.run.requests.prompt_tokens.mean())
            found["seconds"] = round(time.monotonic() - start_s, 3)
            by_request = found["accepted_by_request"]
            yield {
                "id": name,
                "value": found["accepted_mean"],
                "unit": f"drafts of {given.draft_length}",
                "n": found["rounds"],
                "spread": [min(by_request), max(by_request)] if by_request else None,
                "detail": found,
            }

    def _study(self, prompts: list[Prompt], temperature: float) -> AcceptanceStudy:
        given = self._given
        params = [
            SamplingParams(
                temperature=temperature,
                # long enough that no round is cut short
                max_tokens=given.rounds * (given.draft_length + 1) + given.draft_length + 2,
                ignore_eos=True,
                detokenize=False,
                seed=index,
            )
            for index in range(len(prompts))
        ]
        return AcceptanceStudy(self._engine, prompts, params, draft_length=given.draft_length, rounds=given.rounds)


def rounded(value: Any) -> Any:
    """The same JSON value with numbers of four decimals."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def lossless(same: Comparison, places: list[str]) -> list[dict[str, Any]]:
    """Share of all texts that equal plain decoding, and the largest gap of scores at which one parted from it.

    Every difference is told in a line: cell, request, output token, margins of plain decoding and of the other run.
    """
    found = same.to_json()
    largest_first = sorted(zip(places, same.differences, strict=True), key=lambda pair: -(pair[1].margin or 0.0))
    lines = [
        f"{place} {each.request} token {each.position}: {each.margin or 0.0:.4f} {each.other_margin or 0.0:.4f}"
        for place, each in largest_first
    ]
    ties = [each.shift for each in same.differences if each.shift is not None]
    beyond = sum(shift > found["margin_shift"]["max"] for shift in ties) if ties else 0
    detail = {**found, "beyond_margin_shift": beyond, "differences": lines}
    return [
        {
            "id": "lossless.gpu_text_equal_share",
            "value": found["text_equal_share"],
            "unit": "of texts",
            "n": found["compared_outputs"],
            "spread": None,
            "detail": detail,
        },
        {
            "id": "lossless.gpu_largest_gap",
            "value": found["largest_margin"] or 0.0,
            "unit": "score (logit / T)",
            "n": len(found["differences"]),
            "spread": None,
            "detail": {"of": "margins of plain decoding where texts part", "margin_shift": found["margin_shift"]},
        },
    ]


def main() -> None:
    """Measure all cells and write the evidence file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, required=True, help="folder of make_workloads.py")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, help="the model's if left out")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--reasoning-tokens", type=int, default=2560)
    parser.add_argument("--only", default="", help="only cells whose name this regular expression finds")
    parser.add_argument("--seconds", type=float, default=240.0, help="of measuring, loading not counted")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    engine = LLMEngine(
        EngineConfig(
            model=given.model,
            load_format=given.load_format,
            dtype=given.dtype,
            max_model_len=given.max_model_len,
            max_num_seqs=given.num_prompts,
            enforce_eager=True,
        )
    )
    sweep = Sweep(engine, given)
    sweep.run()
    write_evidence(given.out, [*lossless(sweep.same, sweep.places), sweep.left_out(), *sweep.results])
    print(f"{given.out}: {len(sweep.results)} cells measured, {len(sweep.skipped)} left out for lack of time")


if __name__ == "__main__":
    main()
