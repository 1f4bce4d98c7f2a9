"""Run prompts through an engine, at once or as they arrive, and keep what a run directory holds.

The loop is that of a server without a network: requests are queued at their arrival, the engine steps while it has
work, and finished requests are handed on as they finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aspire.compare import Text
from aspire.evidence import provenance
from aspire.heap import settled_heap
from aspire.rundir import Run
from aspire.runlog import VERIFY
from aspire.scheduler import FEATURES, CostModel, RequestState, StepFeatures

if TYPE_CHECKING:
    from aspire.engine.llm_engine import LLMEngine
    from aspire.outputs import RequestOutput
    from aspire.prompts import Prompt
    from aspire.sampling_params import SamplingParams

_NAP_S = 0.002  # while nothing runs and the next request has not arrived


@dataclass
class Measured:
    """Outputs in the order of the prompts (None: not finished), and the recorded run without its summary."""

    outputs: list[RequestOutput | None]
    run: Run
    margins: list[NDArray[np.float32] | None]  # [output tokens] of each prompt, where they were asked for

    def texts(self) -> list[Text | None]:
        """The outputs as `aspire.compare.compare` takes them."""
        return [
            None if output is None else Text(output.request_id, output.outputs[0].token_ids, margin)
            for output, margin in zip(self.outputs, self.margins, strict=True)
        ]


@dataclass
class StopSignal:
    """``drain``: start nothing new, finish what runs. Set from a signal handler."""

    drain: bool = False


@dataclass
class _Queue:
    """Requests that have not arrived, by arrival."""

    names: list[str]
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    arrival_s: Sequence[float]
    order: list[int] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)  # names by the engine's number of the request

    def __post_init__(self) -> None:
        self.order = sorted(range(len(self.names)), key=lambda index: self.arrival_s[index])[::-1]

    def submit(self, engine: LLMEngine) -> None:
        """Queue everything that has arrived by now."""
        now_s = engine.clock()
        while self.order and self.arrival_s[self.order[-1]] <= now_s:
            index = self.order.pop()
            prompt = self.prompts[index]
            given = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text or ""
            at_s = self.arrival_s[index] if self.arrival_s[index] > 0 else None
            engine.add_request(self.names[index], given, self.params[index], arrival_s=at_s)
            self.submitted.append(self.names[index])


class _RoundLimit:
    """Ends every request after so many rounds of drafts."""

    def __init__(self, rounds: int, names: Sequence[str]) -> None:
        self._names = names  # by the engine's number of the request; grows as they are submitted
        self._rounds = rounds
        self._had = np.zeros(0, dtype=np.int64)
        self._seen = 0  # rows of the log

    def end(self, engine: LLMEngine) -> list[RequestOutput]:
        """Abort the requests that have had their rounds; returns what they have."""
        log = engine.log
        new = slice(self._seen, log.num_rows)
        self._seen = log.num_rows
        verified = (log.column("mode")[new] == VERIFY) & (log.column("drafted")[new] > 0)
        request = log.column("request")[new][verified]
        self._had = np.append(self._had, np.zeros(len(self._names) - len(self._had), dtype=np.int64))
        self._had[request] += 1
        ended = []
        for index in request[self._had[request] == self._rounds].tolist():
            name = self._names[index]
            if name in engine.scheduler.requests:
                ended.append(engine.output_of(name))
                engine.abort(name)
        return ended


@settled_heap()
def run_requests(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    arrival_s: Sequence[float] | None = None,
    rounds: int | None = None,
    margins: bool = False,
    keep_prefixes: bool = False,
    cost_model: dict[str, Any] | None = None,
    on_finish: Callable[[RequestOutput], None] | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
    signal: StopSignal | None = None,
) -> Measured:
    """Generate for every prompt and record the run.

    ``arrival_s``: seconds from the start, by prompt; None: all at once. ``rounds``: end every request after so many
    rounds of drafts, so that all weigh the same. ``margins``: keep that of every token. ``keep_prefixes``:
    prompts that ran before need not be computed again; the run cannot be replayed then. ``cost_model``: the JSON object
    of the model that the policy used, kept in the run's config so that it can be replayed. ``on_progress``: finished
    requests, all requests, output tokens so far. Raises `InputError` for a prompt that cannot run, before any runs when
    all arrive at once.
    """
    names = [prompt.prompt_id for prompt in prompts]
    if len(set(names)) != len(names):
        names = [f"{index}:{name}" for index, name in enumerate(names)]
    queue = _Queue(names, prompts, params, arrival_s if arrival_s is not None else [0.0] * len(names))
    finished: dict[str, RequestOutput] = {}
    tokens = 0
    limit = None if rounds is None else _RoundLimit(rounds, queue.submitted)
    engine.begin_record(margins=margins, keep_prefixes=keep_prefixes)
    try:
        queue.submit(engine)
        while queue.order or engine.has_unfinished_requests:
            if signal is not None and signal.drain:
                queue.order.clear()
                _abort_waiting(engine)
            outputs = engine.step()
            if limit is not None:
                outputs += limit.end(engine)
            for output in outputs:
                tokens += len(output.new_token_ids)
                finished[output.request_id] = output
                if on_finish is not None:
                    on_finish(output)
            if on_progress is not None:
                on_progress(len(finished), len(names), tokens)
            if not outputs and not engine.has_unfinished_requests and queue.order:
                time.sleep(min(_NAP_S, max(0.0, queue.arrival_s[queue.order[-1]] - engine.clock())))
            queue.submit(engine)
    except BaseException:
        for name in names:
            engine.abort(name)
        raise
    table, steps, config = engine.record()
    if cost_model is not None:
        config["cost_model"] = cost_model
    run = Run(config, table, steps, meta=provenance())
    kept = dict(zip(queue.submitted, engine.recorder.margins() or [], strict=False))
    return Measured([finished.get(name) for name in names], run, [kept.get(name) for name in names])


def _abort_waiting(engine: LLMEngine) -> None:
    waiting = [
        name
        for name, request in engine.scheduler.requests.items()
        if request.state == RequestState.WAITING and request.preemptions == 0
    ]
    for name in waiting:
        engine.abort(name)


def predicted_and_observed(run: Run, cost_model: CostModel) -> dict[str, Any]:
    """Decode-only tok/s of the steps that ran, as ``cost_model`` prices them and as observed; {} without such steps."""
    from aspire_calibration import validate_steps

    steps = run.steps
    decode = steps.features[:, FEATURES.index("prefill_tokens")] == 0
    if not decode.any():
        return {}
    check = validate_steps(cost_model, StepFeatures.from_matrix(steps.features[decode]), steps.duration_s[decode])
    committed = np.add.reduceat(steps.column("committed"), np.concatenate([[0], steps.row_end[:-1]]))[decode].sum()
    return {
        "predicted_tok_s": float(committed / check.predicted_s),
        "observed_tok_s": float(committed / check.observed_s),
        "run_error": check.run_error,
        "signed_run_error": check.signed_run_error,
        "regimes": {name: report.to_json() for name, report in check.regimes.items()},
    }


def accepted_by_request(run: Run, drafted: int = 1) -> list[float]:
    """Mean accepted drafts of the rounds of at least ``drafted`` drafts, by request, for requests that had such."""
    steps = run.steps
    rounds = (steps.column("mode") == VERIFY) & (steps.column("drafted") >= drafted)
    request, accepted = steps.column("request")[rounds], steps.column("accepted")[rounds]
    counts = np.bincount(request, minlength=len(run.requests))
    sums = np.bincount(request, weights=accepted, minlength=len(run.requests))
    return (sums[counts > 0] / counts[counts > 0]).tolist()
