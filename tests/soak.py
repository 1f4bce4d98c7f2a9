"""Random traffic through one engine for minutes: nothing lost, nothing changed, nothing leaked. ``make soak``

A tiny model in fp32 with too few KV pages, so that preemption is common. Requests of random lengths, priorities and
sampling arrive at random, some are aborted, and policy and selector are switched between steps. In rounds: after each
the engine is drained and checked.

* every submitted request ends once: finished, aborted or rejected
* every finished output equals autoregressive decoding of that request alone
* free pages are back where they were
* a probe prompt has the acceptance that it had in the first round
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from aspire import EngineConfig, LLMEngine, SamplingParams
from aspire.errors import AspireError
from aspire.evidence import write_evidence

POLICIES = ("autoregressive", "fixed:g=3", "fixed:g=7", "staggered:g=4", "aspire:cost_ratio=0.3", "fsm")
SELECTORS = ("window", "verify", "verify-per-layer", "refresh")
VOCAB = 128
SMALL_BUDGET = {"budget_ratio": 0.3, "min_pages": 3, "sinks": 1, "recent": 2}


class Soak:
    """The engine under load, its reference, and the counts."""

    def __init__(self, seed: int, model: str) -> None:
        self.dice = random.Random(seed)
        self.engine = LLMEngine(_config(model, max_num_seqs=8, num_pages=40))
        self.reference = LLMEngine(_config(model, max_num_seqs=8, num_pages=400))
        self.pages = self.engine.scheduler.pages.num_free
        self.counts: Counter[str] = Counter()
        self.live: dict[str, tuple[list[int], SamplingParams]] = {}
        self.finished: dict[str, tuple[list[int], SamplingParams, list[int]]] = {}
        self.problems: list[str] = []
        self.probe: tuple[int, int] | None = None

    def round(self, seconds: float) -> None:
        """Traffic for ``seconds``, then drain and check."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(self.live) < 24 and self.dice.random() < 0.35:
                self.submit()
            if self.live and self.dice.random() < 0.01:
                self.abort()
            if self.dice.random() < 0.02:
                self.switch()
            self.step()
        while self.engine.has_unfinished_requests:
            self.step()
        self.check()

    def submit(self) -> None:
        """A random request; one in fifty is too long and must be refused."""
        name = f"r{self.counts['submitted']}"
        length = 600 if self.dice.random() < 0.02 else self.dice.choice((1, 15, 16, 17, 33, 64, 130, 250))
        prompt = [self.dice.randrange(3, VOCAB) for _ in range(length)]
        params = SamplingParams(
            temperature=self.dice.choice((0.0, 0.7, 1.0)),
            top_k=self.dice.choice((0, 50)),
            top_p=self.dice.choice((1.0, 0.9)),
            seed=self.dice.randrange(1 << 30),
            max_tokens=self.dice.choice((1, 2, 7, 30, 80)),
            ignore_eos=self.dice.random() < 0.5,
            repetition_penalty=self.dice.choice((1.0, 1.0, 1.2)),
            detokenize=False,
        )
        self.counts["submitted"] += 1
        try:
            self.engine.add_request(name, prompt, params, priority=self.dice.randrange(3))
        except AspireError:
            self.counts["rejected"] += 1
            return
        self.live[name] = (prompt, params)

    def abort(self) -> None:
        """End a random live request."""
        name = self.dice.choice(sorted(self.live))
        if self.engine.abort(name):
            self.counts["aborted"] += 1
            del self.live[name]

    def switch(self) -> None:
        """Another policy and selector, between two steps."""
        self.engine.set_policy(_policy(self.dice.choice(POLICIES), self.dice.choice(SELECTORS)))
        self.counts["switches"] += 1

    def step(self) -> None:
        """One step; finished requests are kept for the comparison."""
        for output in self.engine.step():
            if not output.finished:
                continue
            if output.request_id not in self.live:
                self.problems.append(f"{output.request_id} ended twice, or was never there")
                continue
            prompt, params = self.live.pop(output.request_id)
            self.counts["finished"] += 1
            self.counts["preemptions"] += output.metrics.preemptions
            self.finished[output.request_id] = (prompt, params, list(output.outputs[0].token_ids))
        self.counts["steps"] += 1

    def check(self) -> None:
        """The engine is idle: compare outputs, pages and the probe."""
        if self.live:
            self.problems.append(f"{len(self.live)} requests lost, e.g. {sorted(self.live)[0]}")
            self.live.clear()
        if self.engine.scheduler.pages.num_free != self.pages:
            self.problems.append(f"{self.engine.scheduler.pages.num_free} pages free, {self.pages} at the start")
        for name, (prompt, params, _) in self.finished.items():
            self.reference.add_request(name, prompt, params)
        while self.reference.has_unfinished_requests:
            for output in self.reference.step():
                if output.finished and output.outputs[0].token_ids != self.finished[output.request_id][2]:
                    self.problems.append(f"{output.request_id} differs from autoregressive decoding")
                self.counts["compared"] += output.finished
        self.finished.clear()
        probe = self.measure_probe()
        if self.probe is None:
            self.probe = probe
        elif probe != self.probe:
            self.problems.append(f"the probe had {self.probe} (drafted, accepted), now {probe}")
        self.counts["rounds"] += 1

    def measure_probe(self) -> tuple[int, int]:
        """(drafted, accepted) of a fixed prompt under a fixed policy, on the idle engine."""
        self.engine.set_policy(_policy("fixed:g=4", "verify"))
        self.engine.begin_record()
        prompt = [3 + (7 * place) % (VOCAB - 3) for place in range(200)]
        self.engine.add_request(
            "probe", prompt, SamplingParams(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True)
        )
        while self.engine.has_unfinished_requests:
            self.engine.step()
        _, steps, _ = self.engine.record()
        verified = steps.column("mode") == 3
        return int(steps.column("drafted")[verified].sum()), int(steps.column("accepted")[verified].sum())


def _config(model: str, *, max_num_seqs: int, num_pages: int) -> EngineConfig:
    return EngineConfig(
        model=model,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=128,
        num_pages=num_pages,
    )


def _policy(kind: str, selector: str) -> Any:
    from dataclasses import replace

    from aspire import PolicySpec, SelectorSpec

    return replace(PolicySpec.parse(kind), selector=SelectorSpec(kind=selector, **SMALL_BUDGET))


def main() -> int:
    """Run for the given minutes; exit 1 at the first round with a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--out", type=Path, help="evidence file, e.g. reports/cpu/soak.json")
    given = parser.parse_args()
    soak = Soak(given.seed, given.model)
    start, length_s = time.monotonic(), min(20.0, given.minutes * 60)
    while time.monotonic() - start < given.minutes * 60 and not soak.problems:
        soak.round(length_s)
        print(f"{(time.monotonic() - start) / 60:.1f} min: {dict(soak.counts)}", flush=True)
    ended = soak.counts["finished"] + soak.counts["aborted"] + soak.counts["rejected"]
    if ended != soak.counts["submitted"]:
        soak.problems.append(f"{soak.counts['submitted']} requests submitted, {ended} ended")
    for problem in soak.problems[:20]:
        print(f"PROBLEM: {problem}")
    print(f"{len(soak.problems)} lost or changed of {soak.counts['submitted']} requests")
    if given.out:
        detail = {"counts": dict(soak.counts), "problems": soak.problems[:20], "minutes": given.minutes}
        row = {"id": "soak.lost_or_changed", "value": len(soak.problems), "unit": "requests"}
        write_evidence(given.out, [{**row, "n": soak.counts["submitted"], "spread": None, "detail": detail}])
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
