"""Random traffic through two engines for minutes: nothing lost, nothing changed, nothing leaked. ``make soak``

The engines share a model; one plans its steps ahead (``async_scheduling``). They have too few KV pages, so that
preemption is common. Requests of random lengths, priorities and sampling arrive at random, most of them beginning like
others before them; some are aborted, and policy and selector are switched between steps. In rounds, the engines taking
turns: after each the engine is drained and checked. Several legs may follow each other, each with a model and dtype.

* every submitted request ends once: finished, aborted or rejected
* every finished output equals autoregressive decoding of that request from a cold start. `tests.soak_judge` says what
  is a tie: in fp32 a rounding error of batches of other shapes, met once in tens of thousands of tokens (other batches
  move a gap of SmolLM2 by some 1e-5, of a tiny model by 1e-6); in half precision what such batches are measured to do.
  There nothing is filtered: a token at the edge of top-k or top-p comes and goes with rounding, whatever its margin. So
  the logic is tested strictly in fp32: ``--model tiny-llama`` (on a GPU, too), or ``smollm2-135m:float32``
* free pages are back where they were, and nobody holds any
* a probe prompt has the acceptance that it had in the first round of that engine
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aspire import EngineConfig, LLMEngine, PolicySpec, SamplingParams, SelectorSpec
from aspire.compare import Text
from aspire.errors import AspireError
from aspire.evidence import write_evidence
from tests.soak_judge import BF16_TIE, Asked, Judge, is_half

POLICIES = ("autoregressive", "fixed:g=3", "fixed:g=7", "staggered:g=4", "aspire:cost_ratio=0.3", "fsm")
POLICIES += ("goodput:cost_ratio=0.3",)
SELECTORS = ("window", "verify", "verify-per-layer", "refresh", "refresh-per-layer")
SMALL_BUDGET = {"budget_ratio": 0.3, "min_pages": 3, "sinks": 1, "recent": 2}


@dataclass(frozen=True)
class Size:
    """How large the traffic is."""

    max_model_len: int = 512
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 128
    num_pages: int = 40
    prompts: tuple[int, ...] = (1, 15, 16, 17, 33, 64, 130, 250)
    outputs: tuple[int, ...] = (1, 2, 7, 30, 80)
    waiting: int = 24
    probe_tokens: int = 200
    fp32_tie_logits: float = 1e-5


SIZES = {
    "tiny": Size(),
    "real": Size(4096, 32, 2048, 1200, (1, 16, 17, 100, 500, 1500, 3000), (1, 7, 60, 200, 400), 64, 2000, 2e-4),
}


class Soak:
    """The engines under load, their reference, and the counts."""

    def __init__(self, seed: int, model: str, dtype: str = "auto", tie_logits: float | None = None) -> None:
        self.dice = random.Random(seed)
        self.size = SIZES["tiny" if model.startswith("tiny") else "real"]
        first = LLMEngine(_config(model, dtype, self.size, async_scheduling=False))
        second = LLMEngine(_config(model, dtype, self.size, async_scheduling=True), model=first.loaded)
        self.engines = (first, second)
        roomy = self.size.max_num_seqs * self.size.max_model_len // 16 + 1
        cold = {"num_pages": roomy, "async_scheduling": False, "enable_prefix_caching": False}
        reference = LLMEngine(_config(model, dtype, self.size, **cold), model=first.loaded)
        if tie_logits is None:
            tie_logits = BF16_TIE if is_half(reference) else self.size.fp32_tie_logits
        self.judge = Judge(reference, self.dice, tie_logits)
        self.vocab = first.loaded.config.vocab_size
        self.prefixes = [self.tokens(max(self.size.prompts)) for _ in range(4)]
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.asked: list[Asked] = []  # in this round, in order
        self.live: set[str] = set()
        self.finished: dict[str, list[int]] = {}
        self.probes: dict[LLMEngine, tuple[int, int]] = {}
        self.use(first)

    @property
    def problems(self) -> list[str]:
        """What was lost, and what was changed."""
        return self.lost + self.judge.problems

    def use(self, engine: LLMEngine) -> None:
        """The traffic goes to ``engine`` from now on."""
        self.engine = engine
        self.asked.clear()
        self.finished.clear()
        engine.begin_record(margins=True)

    def round(self, seconds: float) -> None:
        """Traffic for ``seconds``, then drain and check."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(self.live) < self.size.waiting and self.dice.random() < 0.35:
                self.submit()
            if self.live and self.dice.random() < 0.01:
                self.abort()
            if self.dice.random() < 0.02:
                self.switch()
            self.step()
        while self.engine.has_unfinished_requests:
            self.step()
        self.check()
        self.use(self.engines[self.counts["rounds"] % 2])

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.dice.randrange(3, self.vocab) for _ in range(count)]

    def submit(self) -> None:
        """A random request; one in fifty is too long and must be refused."""
        name = f"r{self.counts['submitted']}"
        too_long = self.dice.random() < 0.02
        length = self.size.max_model_len + 88 if too_long else self.dice.choice(self.size.prompts)
        shared = self.dice.choice(self.prefixes)[: self.dice.randrange(length + 1)] if self.dice.random() < 0.6 else []
        exact = not self.judge.half
        params = SamplingParams(
            temperature=self.dice.choice((0.0, 0.7, 1.0)),
            top_k=self.dice.choice((0, 50)) if exact else 0,
            top_p=self.dice.choice((1.0, 0.9)) if exact else 1.0,
            seed=self.dice.randrange(1 << 30),
            max_tokens=self.dice.choice(self.size.outputs),
            ignore_eos=self.dice.random() < 0.5,
            repetition_penalty=self.dice.choice((1.0, 1.0, 1.0, 1.2)),
            detokenize=False,
        )
        prompt = shared + self.tokens(length - len(shared))
        self.counts["submitted"] += 1
        try:
            self.engine.add_request(name, prompt, params, priority=self.dice.randrange(3))
        except AspireError:
            self.counts["rejected"] += 1
            return
        self.live.add(name)
        self.asked.append(Asked(name, prompt, params))

    def abort(self) -> None:
        """End a random live request."""
        name = self.dice.choice(sorted(self.live))
        if self.engine.abort(name):
            self.counts["aborted"] += 1
            self.live.remove(name)

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
                self.lost.append(f"{output.request_id} ended twice, or was never there")
                continue
            self.live.remove(output.request_id)
            self.counts["finished"] += 1
            self.counts["preemptions"] += output.metrics.preemptions
            self.counts["prefix_hits"] += output.num_cached_tokens > 0
            self.counts["prefix_tokens"] += output.num_cached_tokens
            self.finished[output.request_id] = list(output.outputs[0].token_ids)
        self.counts["steps"] += 1

    def check(self) -> None:
        """The engine is idle: compare outputs, pages and the probe."""
        if self.live:
            self.lost.append(f"{len(self.live)} requests lost, e.g. {sorted(self.live)[0]}")
            self.live.clear()
        pages = self.engine.scheduler.pages
        if pages.num_free != pages.num_usable or pages.owners.any():
            self.lost.append(f"{pages.num_free} pages free of {pages.num_usable}, {pages.owners.sum()} holders")
        margins = zip(self.asked, self.engine.recorder.margins() or [], strict=True)
        ended = [(request, found) for request, found in margins if request.name in self.finished]
        self.judge.check([(each, Text(each.name, self.finished[each.name], found)) for each, found in ended])
        probe, first = self.measure_probe(), self.probes.get(self.engine)
        if first is None:
            self.probes[self.engine] = probe
        elif abs(probe[1] / probe[0] - first[1] / first[0]) > (0.1 if self.judge.half else 0.0):
            self.lost.append(f"the probe had {first} (drafted, accepted), now {probe}")
        self.counts["rounds"] += 1

    def measure_probe(self) -> tuple[int, int]:
        """(drafted, accepted) of a fixed prompt under a fixed policy, on the idle engine."""
        self.engine.set_policy(_policy("fixed:g=4", "verify"))
        self.engine.begin_record()
        prompt = [3 + (7 * place) % (self.vocab - 3) for place in range(self.size.probe_tokens)]
        self.engine.add_request(
            "probe", prompt, SamplingParams(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True, detokenize=False)
        )
        while self.engine.has_unfinished_requests:
            self.engine.step()
        _, steps, _ = self.engine.record()
        verified = steps.column("mode") == 3
        return int(steps.column("drafted")[verified].sum()), int(steps.column("accepted")[verified].sum())

    def run(self, minutes: float) -> None:
        """Rounds for ``minutes``, ended by the first with a problem."""
        start, length_s = time.monotonic(), min(20.0, minutes * 30)
        while time.monotonic() - start < minutes * 60 and not self.problems:
            self.round(length_s)
            doubts = f"{self.judge.ties} ties, {len(self.judge.appeals)} appeals"
            print(f"{(time.monotonic() - start) / 60:.1f} min: {dict(self.counts)}, {doubts}", flush=True)
        ended = self.counts["finished"] + self.counts["aborted"] + self.counts["rejected"]
        if ended != self.counts["submitted"]:
            self.lost.append(f"{self.counts['submitted']} requests submitted, {ended} ended")

    def to_json(self) -> dict[str, Any]:
        """JSON object of all figures."""
        probes = [f"{accepted} of {drafted}" for drafted, accepted in self.probes.values()]
        return {
            "dtype": str(self.engine.loaded.model.dtype).removeprefix("torch."),
            "lost_or_changed": len(self.problems),
            "problems": self.problems[:20],
            "counts": dict(self.counts),
            "probe_accepted": probes,
            **self.judge.to_json(),
        }


def results(legs: dict[str, Soak]) -> list[dict[str, Any]]:
    """Rows of an evidence file: all legs together, each in the detail."""
    counts = sum((soak.counts for soak in legs.values()), Counter())
    problems = sum(len(soak.problems) for soak in legs.values())
    row = {"id": "soak.lost_or_changed", "value": problems, "unit": "requests", "n": counts["submitted"]}
    rows = [{**row, "spread": None, "detail": {name: soak.to_json() for name, soak in legs.items()}}]
    for name in ("submitted", "finished", "aborted", "rejected", "preemptions", "prefix_hits", "switches", "steps"):
        rows.append({"id": f"soak.{name}", "value": counts[name], "unit": "count", "n": 1, "spread": None})
    return rows


def _config(model: str, dtype: str, size: Size, **changes: Any) -> EngineConfig:
    config = EngineConfig(
        model=model,
        dtype="float32" if model.startswith("tiny") and dtype == "auto" else dtype,
        load_format="dummy" if model.startswith("tiny") else "auto",
        max_model_len=size.max_model_len,
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
        num_pages=size.num_pages,
    )
    return replace(config, **changes)


def _policy(kind: str, selector: str) -> PolicySpec:
    return replace(PolicySpec.parse(kind), selector=SelectorSpec(kind=selector, **SMALL_BUDGET))


def main() -> int:
    """Run every leg for its share of the minutes; exit 1 at the first round with a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all legs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["tiny-llama"],
        help="legs MODEL[:DTYPE]: tiny-llama, or a model with weights, e.g. smollm2-135m:float32",
    )
    parser.add_argument("--tie-logits", type=float, help="default: by model and dtype, see tests/soak_judge.py")
    parser.add_argument("--out", type=Path, help="evidence file, e.g. reports/cpu/soak.json")
    given = parser.parse_args()
    legs: dict[str, Soak] = {}
    for leg in given.model:
        model, _, dtype = leg.partition(":")
        print(f"{leg}:", flush=True)
        legs[leg] = soak = Soak(given.seed, model, dtype or "auto", given.tie_logits)
        soak.run(given.minutes / len(given.model))
        for problem in soak.problems[:20]:
            print(f"PROBLEM: {problem}")
        print(f"{len(soak.problems)} lost or changed of {soak.counts['submitted']} requests", flush=True)
        if given.out:  # what was found so far is on disk
            write_evidence(given.out, results(legs))
    return int(any(soak.problems for soak in legs.values()))


if __name__ == "__main__":
    sys.exit(main())
