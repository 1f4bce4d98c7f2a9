"""The Python API: what goes in, what comes out, and one clear line for what cannot be done."""

from __future__ import annotations

import time

import pytest

from aspire import LLM, EngineConfig, SamplingParams
from aspire.errors import AspireError, InputError, UsageError
from aspire.outputs import RequestOutput
from tests.invariants.cases import prompt_of

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True)


def _llm(**settings: object) -> LLM:
    defaults: dict[str, object] = {"load_format": "dummy", "device": "cpu", "max_model_len": 128, "max_num_seqs": 3}
    return LLM("tiny-llama", **{**defaults, "max_num_batched_tokens": 64, **settings})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return _llm(policy="fixed:g=3+window")


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [prompt_of(length) for length in (60, 3, 30, 1)]
    outputs = llm.generate(prompts, PARAMS)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and len(output.outputs[0].token_ids) == 6 for output in outputs)
    assert all(output.synthetic and not output.lossy for output in outputs), "random weights must be declared"
    metrics = outputs[0].metrics
    assert metrics.first_scheduled_s is not None and metrics.first_token_s is not None and metrics.finish_s is not None
    assert metrics.arrival_s <= metrics.first_scheduled_s < metrics.first_token_s <= metrics.finish_s


def test_one_prompt_many_parameters_and_ids(llm: LLM) -> None:
    (single,) = llm.generate(prompt_of(9), PARAMS)
    assert len(single.outputs[0].token_ids) == 6
    many = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 4)]
    outputs = llm.generate([prompt_of(9), prompt_of(9)], many, request_ids=["a", "b"])
    assert [(output.request_id, len(output.outputs[0].token_ids)) for output in outputs] == [("a", 1), ("b", 4)]
    again = llm.generate([prompt_of(9), prompt_of(9)], many, request_ids=["a", "b"])
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]


def test_the_policy_of_an_llm_changes_speed_not_output(llm: LLM) -> None:
    prompts, ids = [prompt_of(length) for length in (60, 20)], ["x", "y"]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS, request_ids=ids)]
    for policy in ("autoregressive", "fsm+verify", "aspire:cost_ratio=0.2+refresh", "staggered:g=2+verify-per-layer"):
        outputs = _llm(policy=policy).generate(prompts, PARAMS, request_ids=ids)
        assert [o.outputs[0].token_ids for o in outputs] == expected, policy


def test_on_step_sees_what_ended(llm: LLM) -> None:
    seen: list[RequestOutput] = []
    llm.generate([prompt_of(9)] * 2, PARAMS, request_ids=["a", "b"], on_step=seen.extend)
    assert sorted(output.request_id for output in seen if output.finished) == ["a", "b"]


@pytest.mark.parametrize("prompts", [[[]], [[1, 2], [128]], [prompt_of(128)], [[1], "text without a tokenizer"]])
def test_a_bad_prompt_among_good_ones_runs_nothing(llm: LLM, prompts: list[object]) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate([prompt_of(5), *prompts], PARAMS)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished_requests
    pages = llm.engine.scheduler.pages
    assert pages.num_free == pages.num_usable
    assert len(llm.generate([prompt_of(5)], PARAMS)) == 1


def test_chat_uses_the_template_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Templated:
        @staticmethod
        def apply_chat_template(messages: list[dict[str, str]], *, tokenize: bool) -> list[int]:
            assert tokenize
            return [1, *(len(message["content"]) for message in messages), 2]

    chatty = _llm()
    monkeypatch.setattr(chatty.engine, "_tokenizer", Templated())
    question, answer = {"role": "user", "content": "four"}, {"role": "assistant", "content": "eleven long"}
    (single,) = chatty.chat([question, answer, question], PARAMS)
    assert single.prompt_token_ids == [1, 4, 11, 4, 2] and len(single.outputs[0].token_ids) == 6
    many = chatty.chat([[question], [question, answer]], [PARAMS, PARAMS])
    assert [output.prompt_token_ids for output in many] == [[1, 4, 2], [1, 4, 11, 2]]
    with pytest.raises(InputError, match="no messages"):
        chatty.chat([])
    with pytest.raises(InputError, match="no tokenizer"):
        _llm().chat([question])


def test_lists_of_unequal_length_are_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 sampling parameters for 1 prompts"):
        llm.generate([[1]], [PARAMS, PARAMS])
    with pytest.raises(UsageError, match="1 request ids for 2 prompts"):
        llm.generate([[1], [2]], PARAMS, request_ids=["a"])


def test_an_interrupted_run_leaves_the_engine_clean(llm: LLM) -> None:
    def interrupt(_outputs: list[RequestOutput]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt_of(50)] * 5, PARAMS, on_step=interrupt)
    assert not llm.engine.has_unfinished_requests
    pages = llm.engine.scheduler.pages
    assert pages.num_free == pages.num_usable


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_sequences": 4}, "did you mean 'max_num_seqs'"),
        ({"policy": "fixd"}, "did you mean 'fixed'"),
        ({"policy": "missing/policy.json"}, "policy"),
        ({"device": "tpu9"}, "device"),
        ({"load_format": "auto"}, "load format dummy"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"num_pages": 1}, "pages"),
        ({"policy": "aspire"}, "cost_ratio"),
        ({"config": EngineConfig()}, "either config or settings"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_clear_line(settings: dict[str, object], words: str) -> None:
    with pytest.raises(AspireError) as caught:
        _llm(**settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_record_of_a_run_adds_up(llm: LLM) -> None:
    llm.engine.begin_record()
    outputs = llm.generate([prompt_of(length) for length in (20, 50, 9, 9)], PARAMS)
    table, log, config = llm.engine.record()
    assert config["policy"]["kind"] == "fixed" and len(table.request_id) == 4
    committed = [int(log.column("committed")[log.column("request") == row].sum()) for row in range(4)]
    assert committed == [len(output.outputs[0].token_ids) for output in outputs]
    assert log.column("finished").sum() == 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_record_tells_how_long_the_engine_had_been_idle_when_it_began(ahead: bool) -> None:
    engine = _llm(policy="autoregressive", async_scheduling=ahead).engine

    def run() -> tuple[float, float]:
        """Generate once; when it began and when it had ended, by the machine's clock."""
        began = time.perf_counter()
        engine.add_request("one", prompt_of(20), PARAMS)
        while engine.has_unfinished_requests:
            engine.step()
        return began, time.perf_counter()

    began, ended = run()
    assert engine.record()[2]["rest_s"] is None, "nothing ran before the recording of a new engine"
    for _ in range(2):  # nothing runs between them: the rest goes on
        time.sleep(0.02)
        begun = time.perf_counter()
        engine.begin_record()
        rest_s = engine.record()[2]["rest_s"]
        assert 0.02 <= begun - ended <= rest_s <= time.perf_counter() - began
    again, _ = run()
    assert engine.record()[2]["rest_s"] == rest_s >= 0.04, "of the beginning, whatever ran since"
    engine.begin_record()
    assert 0 < engine.record()[2]["rest_s"] <= time.perf_counter() - again
