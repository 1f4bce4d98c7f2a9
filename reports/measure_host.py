"""Measure the host time of a decode step and of a request's begin and end, without a device.

    python reports/measure_host.py -o reports/cpu/host_steps.json

The engine runs as it does on a GPU with asynchronous scheduling, but for `ModelRunner.launch`: a stand-in fills the
step's input and returns made-up results at once; a draft is accepted with probability 0.8. Prices are those of the
analytic model of an H200 and SmolLM2-135M at contexts of 1.5k to 4k tokens; `goodput_drafting` has a price that makes
it draft. A step is planned, its input filled, its outcome applied. A figure is the lowest decile of blocks of 24 steps:
the machine may be shared, and what others take of it is not the engine's time.

A request's begin and end: as many as there are rows are added with prompts of 3,200 tokens that nobody shares, and
move in as steps have room for their prompts; each ends with its 768th token. What the steps with prompts, and those in
which some end, take longer than the median step is shared out among all; the lower quartile of several rounds. What
an ended request leaves behind is cleared up by the step after, while a device would be busy, and is not counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "kernels", "calibration", "simulator")]

from aspire import EngineConfig, LLMEngine, SamplingParams  # noqa: E402
from aspire.engine.runner import StepBounds, StepResult  # noqa: E402
from aspire.engine.step_input import Shape, StepInput, host_buffer  # noqa: E402
from aspire.evidence import write_evidence  # noqa: E402
from aspire.scheduler import MAX_DRAFT, StepPlan  # noqa: E402
from aspire_calibration import LoadedCostModel, analytic_model  # noqa: E402

POLICIES = {
    "autoregressive": "autoregressive",
    "fixed": "fixed:g=5+verify",
    "aspire": "aspire+verify",
    "goodput": "goodput+verify",
    "goodput_drafting": "goodput:cost_ratio=0.1+verify",
}
PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_STEPS = 1500, 2596, 24
ACCEPTANCE = 0.8
LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS, VOCABULARY = 3200, 768, 128


def empty_engine(policy: str, rows: int) -> LLMEngine:
    """An engine for ``rows`` requests at a time, and no device behind it."""
    config = EngineConfig(
        model="tiny-llama",
        load_format="dummy",
        device="cpu",
        max_num_seqs=rows,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        policy=policy,
        async_scheduling=True,
        max_num_batched_tokens=8192,
    )
    prices = LoadedCostModel(analytic_model("h200", "smollm2-135m"), warn=lambda _: None)
    engine = LLMEngine(config, cost_model=prices)
    runner, luck = engine.runner, np.random.default_rng(1)
    shape = Shape(rows * (MAX_DRAFT + 1), rows, rows * (MAX_DRAFT + 1), 2 * rows)
    again = StepInput(shape, host_buffer(shape.size, pinned=False)[1])

    def launch(plan: StepPlan, forced: Any = None) -> Callable[[], StepResult]:
        samples = max(1, plan.num_samples)
        accepted = np.minimum(luck.geometric(1.0 - ACCEPTANCE, plan.num_rows) - 1, plan.drafted)
        if not plan.num_prefills:
            StepBounds.for_graph(plan, config.max_model_len or 0, shape.tokens)
            runner.fill(again, plan, None)
        packed = np.zeros(3 * samples + plan.num_rows, dtype=np.int32)
        packed[samples : 2 * samples] = luck.exponential(3.0, samples).astype(np.float32).view(np.int32)
        packed[3 * samples :] = accepted * plan.verify
        return lambda: runner.unpack(packed, plan, samples)

    runner.launch = launch  # type: ignore[method-assign]
    return engine


def engine_of(policy: str, rows: int) -> LLMEngine:
    """An engine with ``rows`` requests that decode, and no device behind it."""
    engine = empty_engine(policy, rows)
    params = SamplingParams(temperature=0.7, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    for index in range(rows):
        engine.add_request(str(index), [1] * PROMPT_TOKENS, params)
    while not engine.scheduler.slots.primed.all():
        engine.step()
    return engine


def measure(name: str, rows: int, blocks: int) -> dict[str, Any]:
    """One result: microseconds of a step of ``rows`` requests under the policy ``name``."""
    engine, times = engine_of(POLICIES[name], rows), []
    for _ in range(blocks):
        begin = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            engine.step()
        times.append((time.perf_counter() - begin) / BLOCK_STEPS * 1e6)
    modes = engine.log.column("mode")
    low, middle, high = np.percentile(times[2:], (10, 50, 90)).round(1).tolist()
    return {
        "id": f"host.{name}_{rows}_us",
        "value": low,
        "unit": "us a step",
        "n": blocks - 2,
        "spread": [low, high],
        "detail": {
            "policy": POLICIES[name],
            "rows": rows,
            "median": middle,
            "drafting_share": round(float((modes == 2).mean()), 3),
        },
    }


def measure_requests(rows: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds a request takes when it is added, admitted and ended, ``rows`` at a time."""
    engine, tokens = empty_engine("autoregressive", rows), np.random.default_rng(2)
    params = SamplingParams(temperature=0.7, max_tokens=LONG_OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    times: dict[str, list[float]] = {"add": [], "admit": [], "end": []}
    for number in range(rounds):
        engine.begin_record()
        prompts = tokens.integers(0, VOCABULARY, (rows, LONG_PROMPT_TOKENS)).tolist()
        begin = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{number}/{index}", prompt, params)
        clock, ending = [begin, time.perf_counter()], []
        while engine.has_unfinished_requests:
            ending.append(bool(engine.step()))
            clock.append(time.perf_counter())
        added, *steps = np.diff(clock).tolist()
        plain = float(np.median(steps))
        prompting = -(-rows * LONG_PROMPT_TOKENS // engine.scheduler_config.max_num_batched_tokens)
        begins = sum(steps[:prompting]) - prompting * plain
        ends = sum(seconds - plain for seconds, last in zip(steps, ending, strict=True) if last)
        for name, seconds in (("add", added), ("admit", begins), ("end", ends)):
            times[name].append(seconds / rows * 1e6)
    return [
        {
            "id": f"host.{name}_request_us",
            "value": round(float(np.percentile(times[name], 25)), 1),
            "unit": "us a request",
            "n": rounds,
            "spread": np.percentile(times[name], (10, 90)).round(1).tolist(),
            "detail": {"rows": rows, "prompt_tokens": LONG_PROMPT_TOKENS, "output_tokens": LONG_OUTPUT_TOKENS},
        }
        for name in times
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-o", "--out", type=Path, help="evidence file to write")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 128])
    parser.add_argument("--rounds", type=int, default=8, help="how often all requests begin and end")
    given = parser.parse_args()
    results = []
    for rows in given.rows:
        for name in POLICIES:
            results.append(measure(name, rows, given.blocks))
            print(f"{name:18} {rows:4} rows {results[-1]['value']:7.1f} us", results[-1]["detail"], flush=True)
    for result in measure_requests(max(given.rows), given.rounds):
        results.append(result)
        print(f"{result['id']:28} {result['value']:7.1f} us", result["detail"], flush=True)
    if given.out is not None:
        write_evidence(given.out, results, command="python reports/measure_host.py " + " ".join(sys.argv[1:]))
        print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
