"""The engine with steps launched ahead: the same text, a log that replays, nothing left in flight."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from aspire import SamplingParams  # noqa: E402
from aspire.engine.graphs import _Captured  # noqa: E402
from aspire.engine.llm_engine import LLMEngine  # noqa: E402
from aspire.measure import run_requests  # noqa: E402
from aspire.prompts import Prompt  # noqa: E402
from aspire.rundir import Run, read_run, write_run  # noqa: E402
from aspire.scheduler import PolicySpec  # noqa: E402
from aspire_kernels import counters  # noqa: E402
from aspire_simulator import replay  # noqa: E402
from aspire_simulator.metrics import summarize  # noqa: E402
from tests.invariants.cases import prompt_of, small  # noqa: E402
from tests.invariants.harness import Limits, LinearCost, check_drained, drive, make_engine  # noqa: E402

POLICIES = {
    "autoregressive": {},
    "fixed": {"g": 3},
    "staggered": {"g": 3},
    "fsm": {},
    "aspire": {"cost_ratio": 0.1},
    "goodput": {"cost_ratio": 0.1},
    "goodput:priced": {},
}


def _engine(policy: str, *, ahead: bool, num_pages: int | None = None) -> LLMEngine:
    limits = Limits(4, 64, 160, num_pages=num_pages, async_scheduling=ahead)
    return make_engine("llama", PolicySpec(policy.split(":")[0], POLICIES[policy], small("verify")), limits)


def _submit(engine: LLMEngine, **params: object) -> None:
    for index in range(7):
        sampling = SamplingParams(temperature=0.8, max_tokens=30, **params)  # type: ignore[arg-type]
        engine.add_request(str(index), prompt_of(11 + 9 * index), sampling, arrival_s=0.0)


@pytest.mark.parametrize("num_pages", [None, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_same_text_and_a_log_that_replays(policy: str, num_pages: int | None, tmp_path) -> None:  # noqa: ANN001
    plain, engine = _engine("autoregressive", ahead=False), _engine(policy, ahead=True, num_pages=num_pages)
    for each in (plain, engine):
        _submit(each)
    texts = [
        {name: output.outputs[0].token_ids for name, output in drive(each).outputs.items()} for each in (plain, engine)
    ]
    assert texts[0] == texts[1]
    table, log, config = engine.record()
    assert config["scheduler"]["async_scheduling"] and log.planned_ahead.mean() > 0.4
    run = read_run(write_run(tmp_path / "run", Run(config, table, log)))
    report = replay(run, LinearCost())
    assert (report.equal_share, report.difference) == (1.0, "")
    assert int(table.output_tokens.sum()) == sum(len(tokens) for tokens in texts[1].values())


def test_penalties_are_not_planned_ahead_and_others_are() -> None:
    engine = _engine("fixed", ahead=True)
    engine.add_request("penal", prompt_of(20), SamplingParams(max_tokens=12, repetition_penalty=1.2, ignore_eos=True))
    engine.add_request("plain", prompt_of(20), SamplingParams(max_tokens=40, ignore_eos=True))
    drive(engine)
    log = engine.log
    last = int(np.flatnonzero((log.column("request") == 0) & (log.column("finished") == 1))[0])
    ahead, end = log.planned_ahead, int(log.step_of_row()[last])
    # a step in flight when the request came may still be ahead
    assert not ahead[2 : end + 1].any() and ahead[end + 2 :].all()


def test_a_failing_step_gives_its_requests_back(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, engine = _engine("autoregressive", ahead=False), _engine("fixed", ahead=True)
    for each in (expected, engine):
        _submit(each, ignore_eos=True)
    outputs = {}
    for _ in range(12):
        outputs.update({output.request_id: output for output in engine.step()})
    forward = engine.runner.forward
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "forward", lambda *_a, **_k: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    assert engine.runner.forward == forward and not engine.scheduler.in_flight
    assert engine.scheduler.counts.running == 0
    outputs.update(drive(engine).outputs)
    wanted = {name: output.outputs[0].token_ids for name, output in drive(expected).outputs.items()}
    assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == wanted


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["autoregressive", "fixed", "goodput", "goodput:priced"])
def test_requests_that_arrive_between_steps_replay(policy: str, ahead: bool, tmp_path) -> None:  # noqa: ANN001
    engine = _engine(policy, ahead=ahead)
    count = 24
    prompts = [Prompt(str(index), token_ids=tuple(prompt_of(5 + 3 * index % 60))) for index in range(count)]
    params = [SamplingParams(temperature=0.8, max_tokens=20)] * count
    arrival_s = np.cumsum(np.random.default_rng(3).exponential(0.004, count)).tolist()
    run = run_requests(engine, prompts, params, arrival_s=arrival_s).run
    table = run.requests
    assert (table.queued_s > table.arrival_s).any() and (table.queued_s >= table.arrival_s).all()
    run = read_run(write_run(tmp_path / "run", run))
    report = replay(run, LinearCost())
    assert report.equal_share == 1.0, report.difference


def test_a_policy_is_switched_and_requests_aborted_with_a_step_in_flight() -> None:
    engine = _engine("fixed", ahead=True)
    _submit(engine, ignore_eos=True)
    finished = set()
    for _ in range(9):
        finished |= {output.request_id for output in engine.step()}
    engine.set_policy("autoregressive")
    assert not engine.scheduler.in_flight
    for _ in range(3):
        finished |= {output.request_id for output in engine.step()}
    for name in list(engine.scheduler.requests):
        engine.abort(name)
    while engine.has_unfinished_requests:
        finished |= {output.request_id for output in engine.step()}
    check_drained(engine)
    assert not engine.scheduler.in_flight


@pytest.mark.parametrize("ahead", [False, True])
def test_the_policy_learns_between_the_launch_of_the_next_step_and_the_outcome_of_this(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next step could not be planned, on drains, aborts and switches."""
    engine, calls = _engine("goodput:priced", ahead=ahead), []

    def watch(owner: object, name: str) -> None:
        found = getattr(owner, name)

        def noted(*given: object, **more: object) -> object:
            result = found(*given, **more)
            if name != "schedule" or result is not None:
                calls.append(name)
            if name == "launch":
                return lambda: (calls.append("wait"), result())[1]
            return result

        monkeypatch.setattr(owner, name, noted)

    for name in ("schedule", "learn", "update"):
        watch(engine.scheduler, name)
    watch(engine.runner, "launch")
    _submit(engine, ignore_eos=True)
    engine.add_request("penal", prompt_of(20), SamplingParams(max_tokens=4, repetition_penalty=1.2, ignore_eos=True))
    for step in range(40):
        if step == 20:
            engine.set_policy(PolicySpec("goodput", {}, small("verify")))
        engine.step()
    for name in list(engine.scheduler.requests)[1:]:
        engine.abort(name)
    while engine.has_unfinished_requests:
        engine.step()
    steps = calls.count("update")
    assert steps == calls.count("learn") == calls.count("wait") == calls.count("launch") > 40
    words = "".join({"schedule": "", "launch": "L", "learn": "l", "wait": "w", "update": "u"}[name] for name in calls)
    assert words.replace("lwu", "").strip("L") == "", words
    assert ("Llwu" * 10 in words) and (not ahead or "LLlwu" in words) and (ahead or "LL" not in words)


def test_a_run_tells_which_paths_its_kernels_took() -> None:
    found = {}
    for policy in ("autoregressive", "fixed"):
        engine = _engine(policy, ahead=True)
        engine.begin_record()
        _submit(engine, ignore_eos=True)
        drive(engine)
        found[policy] = summarize(Run(engine.record()[2], *engine.record()[:2]))["launches"]
    assert found["fixed"]["attention.reference.sparse"] > 0 and found["fixed"]["attention.reference.full"] > 0
    assert "attention.reference.sparse" not in found["autoregressive"]


def test_a_replayed_graph_counts_what_was_launched_into_it() -> None:
    counters.reset()
    captured = _Captured([], None, None, (None, None), {"attention.triton.sparse": 30})  # type: ignore[arg-type]
    captured.replay()
    captured.replay()
    assert counters.snapshot() == {"attention.triton.sparse": 60}
