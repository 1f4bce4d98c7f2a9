"""Measure which drafts are accepted: the same prompts under one setting after another, each text compared with plain
decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aspire.compare import Comparison, compare
from aspire.measure import Measured, StopSignal, accepted_by_request, run_requests
from aspire.runlog import VERIFY
from aspire.scheduler import PolicySpec, SelectorSpec

if TYPE_CHECKING:
    from aspire.engine.llm_engine import LLMEngine
    from aspire.prompts import Prompt
    from aspire.rundir import Run
    from aspire.sampling_params import SamplingParams

Progress = Callable[[int, int, int], None]  # finished requests, all requests, output tokens


@dataclass(frozen=True)
class Acceptance:
    """What was found under one setting. Means are over the rounds of the full draft length."""

    run: Run  # with its summary
    comparison: Comparison  # with plain decoding
    draft_length: int

    def to_json(self) -> dict[str, Any]:
        """JSON object of everything but the run."""
        steps, summary = self.run.steps, self.run.summary
        whole = (steps.column("mode") == VERIFY) & (steps.column("drafted") >= self.draft_length)
        accepted = steps.column("accepted")[whole]
        return {
            "selector": self.run.config["policy"]["selector"],
            "rounds": summary.get("rounds", 0),
            "accepted_mean": float(accepted.mean()) if len(accepted) else None,
            "accepted_by_request": accepted_by_request(self.run, self.draft_length),
            "acceptance_rate": summary.get("acceptance_rate"),
            "acceptance_by_position": summary.get("acceptance_by_position", []),
            "conditional_acceptance_by_position": summary.get("conditional_acceptance_by_position", []),
            "synthetic": bool(self.run.config.get("synthetic_acceptance")),
            **self.comparison.to_json(),
        }


class AcceptanceStudy:
    """Prompts in one engine. `plain` comes first; then `measure` as many settings as wanted.

    ``rounds``: every request ends after so many rounds, so that all weigh the same; None: when its text ends. With a
    prefix cache the prompts are computed once, by `plain`, and the whole batch drafts in step from the start.
    """

    def __init__(
        self,
        engine: LLMEngine,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        draft_length: int,
        rounds: int | None = None,
        signal: StopSignal | None = None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._draft_length = draft_length
        self._rounds = rounds
        self._signal = signal
        self._plain: Measured | None = None

    def plain(self, on_progress: Progress | None = None) -> Measured:
        """Decode the prompts autoregressively: what every other text is compared with."""
        self._engine.set_policy(PolicySpec())
        self._plain = self._run(None, on_progress)
        return self._plain

    def measure(self, selector: SelectorSpec, on_progress: Progress | None = None) -> Acceptance:
        """Rounds of drafts under ``selector``: all draft, then all verify."""
        from aspire_simulator.metrics import summarize

        plain = self._plain or self.plain()
        self._engine.set_policy(PolicySpec("fixed", {"g": self._draft_length}, selector, self._draft_length))
        measured = self._run(self._rounds, on_progress)
        measured.run.summary = summarize(measured.run)
        same = compare(measured.texts(), plain.texts(), common_length=self._rounds is not None)
        return Acceptance(measured.run, same, self._draft_length)

    def _run(self, rounds: int | None, on_progress: Progress | None) -> Measured:
        return run_requests(
            self._engine,
            self._prompts,
            self._params,
            rounds=rounds,
            margins=True,
            keep_prefixes=True,
            on_progress=on_progress,
            signal=self._signal,
        )
