"""What a run leaves behind: its steps, its requests as a table, margins of its tokens, and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aspire.engine.kv_pool import page_bytes
from aspire.engine.live import LiveRequest
from aspire.engine.margin_log import MarginLog
from aspire.engine.runner import StepResult
from aspire.runlog import RequestTable, StepLog, log_step, status_of, table_from_log
from aspire.scheduler import FinishReason, StepOutcome, StepPlan
from aspire.scheduler.prefix_links import shared_prefixes
from aspire_kernels import counters

if TYPE_CHECKING:
    from aspire.engine.llm_engine import LLMEngine


class Recorder:
    """Records the steps and requests of an engine from the beginning on, until `stop`; `begin` starts anew.

    A step is noted when it ends, while the GPU may have nothing to do, and written into the log by `catch_up`.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, *, margins: bool = False, rest_s: float | None = None) -> None:
        """Forget what was recorded, and record from now on; with ``margins`` those of tokens, too. ``rest_s``: how long
        the engine has been idle; None: it ran no step before."""
        self._forget(recording=True)
        self.rest_s = rest_s
        self._margins = MarginLog() if margins else None
        self._launches = counters.snapshot()

    def stop(self) -> None:
        """Record nothing more, and forget what was: for servers, which run for days."""
        self._forget(recording=False)
        self._margins = None

    def _forget(self, *, recording: bool) -> None:
        self._recording = recording
        self._log = StepLog()
        self._later: list[Callable[[], None]] = []
        self.submitted: list[LiveRequest] = []

    def note_request(self, live: LiveRequest) -> None:
        """Note a request that was queued."""
        if self._recording:
            self.submitted.append(live)

    def note_step(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        owner: NDArray[np.int64],  # [rows] number of each row's request
        start_s: float,
        finished: NDArray[np.bool_],  # [rows]
        planned_s: float,
    ) -> None:
        """Note a step that ended."""
        if self._recording:
            self._later.append(partial(log_step, self._log, plan, outcome, owner, start_s, finished, planned_s))

    def note_margins(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        owner: NDArray[np.int64],  # [rows] number of each row's request
        generated: NDArray[np.int64],  # [slots] output tokens before the step
        result: StepResult,
    ) -> None:
        """Note the margins of the tokens that a step commits, if they are kept."""
        if self._margins is not None:
            found = (outcome.committed, result.sample_start, result.margin.copy())
            self._later.append(partial(self._margins.append, owner, generated[plan.slots], *found))

    def catch_up(self) -> None:
        """Write down what was noted."""
        for work in self._later:
            work()
        self._later.clear()

    @property
    def log(self) -> StepLog:
        """The steps since `begin`."""
        self.catch_up()
        return self._log

    def table(self) -> RequestTable:
        """The requests since `begin` in the order of submission, with the times that the log tells."""
        table = table_from_log(self.log, len(self.submitted))
        for row, live in enumerate(self.submitted):
            table.request_id[row] = live.request.request_id
            table.arrival_s[row] = live.metrics.arrival_s
            table.queued_s[row] = live.metrics.queued_s
            table.prompt_tokens[row] = live.request.prompt_tokens
            table.max_tokens[row] = live.params.max_tokens
            table.priority[row] = live.request.priority
            table.cached_tokens[row] = live.request.cached_tokens
            table.preemptions[row] = live.request.preemptions
            table.status[row] = status_of(live.request)
            if live.request.finish_reason == FinishReason.ABORT and live.metrics.finish_s is not None:
                table.finish_s[row] = live.metrics.finish_s
        table.prefix_of[:], table.prefix_tokens[:] = shared_prefixes(
            [live.request.page_hashes for live in self.submitted]
        )
        return table

    def margins(self) -> list[NDArray[np.float32]] | None:
        """Margins [output tokens] of each request since `begin`, in order of submission, if they were kept."""
        self.catch_up()
        return None if self._margins is None else self._margins.by_request(len(self.submitted))

    def launches(self) -> dict[str, Any]:
        """Kernel launches since `begin`."""
        return counters.since(self._launches)


def run_config(engine: LLMEngine) -> dict[str, Any]:
    """The configuration of a run of ``engine``, as a replay needs it."""
    config, loaded, spec = engine.config, engine.loaded, engine.scheduler.policy_spec
    return {
        "source": "engine",
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "scheduler": asdict(engine.scheduler_config),
        "policy": spec.to_dict(),
        "policy_label": f"{spec.label}, lossy ({config.decode})" if config.lossy else spec.label,
        "decode": config.decode,
        "lossy": config.lossy,
        "rest_s": engine.recorder.rest_s,
        "launches": engine.recorder.launches(),
        "kv_bytes_per_token": page_bytes(loaded.config, loaded.model.dtype) // config.block_size,
        "synthetic_acceptance": engine.synthetic,
    }
