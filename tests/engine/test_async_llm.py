"""The async engine: many readers, one thread, and every end of a request reaches its reader."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from aspire import LLM, AsyncLLM, SamplingParams
from aspire.errors import AspireError, EngineError, InputError, UsageError
from aspire.outputs import RequestOutput
from tests.invariants.cases import prompt_of

PARAMS = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=3)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
SETTINGS = {"load_format": "dummy", "device": "cpu", "max_model_len": 512, "max_num_seqs": 4}
SETTINGS |= {"max_num_batched_tokens": 64, "policy": "fixed:g=3+window"}


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(bounded())


def engine(**settings: Any) -> AsyncLLM:
    return AsyncLLM("tiny-llama", **{**SETTINGS, **settings})


async def read(outputs: AsyncIterator[RequestOutput]) -> tuple[RequestOutput, list[int]]:
    """The last output, and all new tokens as they came."""
    tokens: list[int] = []
    async for output in outputs:
        tokens += output.new_token_ids
        last = output
    return last, tokens


def clean(llm: AsyncLLM) -> bool:
    pages = llm.engine.scheduler.pages
    return not llm.engine.has_unfinished_requests and pages.num_free == pages.num_usable


@pytest.mark.parametrize("ahead", [False, True])
def test_concurrent_readers_get_what_generate_gives(ahead: bool) -> None:
    prompts = [prompt_of(length) for length in (1, 40, 100, 16, 33, 7, 70)]
    expected = [output.outputs[0].token_ids for output in LLM("tiny-llama", **SETTINGS).generate(prompts, PARAMS)]

    async def work() -> None:
        async with engine(async_scheduling=ahead) as llm:
            ends = await asyncio.gather(*(read(llm.generate(prompt, PARAMS)) for prompt in prompts))
            assert clean(llm)
        for (last, streamed), tokens, prompt in zip(ends, expected, prompts, strict=True):
            assert last.finished and last.outputs[0].token_ids == tokens == streamed
            assert last.outputs[0].finish_reason == "length" and last.prompt_token_ids == prompt

    run(work())


def test_nothing_is_kept_of_requests_that_ended() -> None:
    async def work() -> None:
        async with engine() as llm:
            await asyncio.gather(*(read(llm.generate(prompt_of(9), PARAMS)) for _ in range(9)))
            assert (
                len(llm.engine.log) == 0
                and not llm.engine.recorder.submitted
                and not llm.engine.live
                and not llm._streams
            )

    run(work())


def test_accepted_runs_arrive_before_the_end() -> None:
    async def work() -> None:
        async with engine(policy="fixed:g=3") as llm:
            sizes = [len(output.new_token_ids) async for output in llm.generate(prompt_of(30), PARAMS)]
        assert sum(sizes) == 20 and len(sizes) > 2 and max(sizes) > 1, sizes

    run(work())


def test_a_slow_reader_misses_no_token() -> None:
    async def work() -> None:
        async with engine() as llm:
            stream = await llm.add_request("slow", prompt_of(30), PARAMS)
            while llm.engine.has_unfinished_requests:
                await asyncio.sleep(0.01)
            last, streamed = await read(stream)
        assert streamed == last.outputs[0].token_ids and len(streamed) == 20

    run(work())


@pytest.mark.parametrize("ahead", [False, True])
def test_abort_ends_the_iterator_with_what_there_is(ahead: bool) -> None:
    async def work() -> None:
        async with engine(async_scheduling=ahead) as llm:
            stream = await llm.add_request("a", prompt_of(30), LONG)
            first = await anext(stream)
            assert await llm.abort("a") is True and await llm.abort("a") is False
            last, more = await read(stream)
            assert last.finished and last.outputs[0].finish_reason == "abort"
            assert first.new_token_ids + more == last.outputs[0].token_ids
            waiting = [await llm.add_request(str(number), prompt_of(60), LONG) for number in range(9)]
            assert await llm.abort("8") is True
            last, _ = await read(waiting[8])
            assert last.outputs[0].finish_reason == "abort" and last.outputs[0].token_ids == []
            assert last.prompt_token_ids == prompt_of(60)
        for stream in waiting[:8]:  # shut down while they ran
            last, _ = await read(stream)
            assert last.outputs[0].finish_reason == "abort"

    run(work())


def test_leaving_an_iterator_or_cancelling_its_task_aborts_the_request() -> None:
    async def work() -> None:
        async with engine() as llm:
            outputs = llm.generate(prompt_of(30), LONG)
            await anext(outputs)
            await outputs.aclose()  # type: ignore[attr-defined]
            task = asyncio.create_task(read(llm.generate(prompt_of(20), LONG)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            deadline = asyncio.get_running_loop().time() + 10
            while not clean(llm) and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)
            assert clean(llm)
            last, _ = await read(llm.generate(prompt_of(9), PARAMS))
            assert len(last.outputs[0].token_ids) == 20

    run(work())


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty prompt"), (prompt_of(512), "max-model-len"), ([5, 999], "vocabulary"), ("hi", "no tokenizer")],
)
def test_a_request_that_cannot_run_is_refused_to_its_caller(prompt: Any, words: str) -> None:
    async def work() -> None:
        async with engine() as llm:
            good = await llm.add_request("good", prompt_of(9), PARAMS)
            with pytest.raises(InputError, match=words):
                await llm.add_request("bad", prompt, PARAMS)
            with pytest.raises(InputError, match="id of its own"):
                await llm.add_request("good", prompt_of(9), LONG)
            last, _ = await read(good)
            assert len(last.outputs[0].token_ids) == 20

    run(work())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_out_of_memory_fails_its_requests_and_the_engine_goes_on(ahead: bool) -> None:
    async def work() -> None:
        async with engine(async_scheduling=ahead) as llm:
            launch = llm.engine.runner.launch

            def broken(*_given: Any) -> Any:
                raise torch.OutOfMemoryError("CUDA out of memory")

            stream = await llm.add_request("a", prompt_of(9), LONG)
            await anext(stream)
            llm.engine.runner.launch = broken  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="lower max_num_batched_tokens"):
                await read(stream)
            llm.engine.runner.launch = launch  # type: ignore[method-assign]
            assert clean(llm)
            last, _ = await read(llm.generate(prompt_of(9), PARAMS))
            assert len(last.outputs[0].token_ids) == 20

    run(work())


def test_a_step_that_breaks_unforeseen_reaches_every_reader_and_later_callers() -> None:
    async def work() -> None:
        async with engine() as llm:

            def broken(*_given: Any) -> Any:
                raise RuntimeError("illegal memory access")

            streams = [await llm.add_request(str(number), prompt_of(9), LONG) for number in range(3)]
            llm.engine.runner.launch = broken  # type: ignore[method-assign]
            for stream in streams:
                with pytest.raises(RuntimeError, match="illegal memory access"):
                    await read(stream)
            with pytest.raises(EngineError, match="illegal memory access"):
                await llm.add_request("late", prompt_of(9), PARAMS)
            assert not llm.is_running

    run(work())


@pytest.mark.parametrize("ahead", [False, True])
def test_policy_switches_and_reloads_change_no_output(tmp_path: Path, ahead: bool) -> None:
    path = tmp_path / "policy.json"
    prompts = [prompt_of(length) for length in (40, 100)]
    params = SamplingParams(temperature=0.8, max_tokens=120, ignore_eos=True, seed=5)
    expected = [output.outputs[0].token_ids for output in LLM("tiny-llama", **SETTINGS).generate(prompts, params)]

    async def work() -> None:
        async with engine(async_scheduling=ahead) as llm:
            with pytest.raises(UsageError, match="path"):
                await llm.reload_policy()
            readers = [asyncio.create_task(read(llm.generate(prompt, params))) for prompt in prompts]
            for kind in ("autoregressive", "fsm", "fixed"):
                path.write_text(json.dumps({"kind": kind}), encoding="utf-8")
                spec = await llm.reload_policy(path if kind == "autoregressive" else None)
                assert spec.kind == llm.engine.scheduler.policy_spec.kind == kind
            path.write_text('{"kind": "fixd"}', encoding="utf-8")
            with pytest.raises(AspireError, match="did you mean 'fixed'"):
                await llm.reload_policy()
            with pytest.raises(UsageError, match="cost model"):
                await llm.set_policy("aspire")
            assert llm.engine.scheduler.policy_spec.kind == "fixed"
            ends = await asyncio.gather(*readers)
        assert [last.outputs[0].token_ids for last, _ in ends] == expected

    run(work())


def test_shutdown_drains_or_aborts_and_ends_the_thread() -> None:
    async def work() -> None:
        llm = engine()
        streams = [await llm.add_request(str(number), prompt_of(9), PARAMS) for number in range(6)]
        await llm.shutdown(drain=True)
        assert [len((await read(stream))[0].outputs[0].token_ids) for stream in streams] == [20] * 6
        with pytest.raises(EngineError, match="shut down"):
            await llm.add_request("late", prompt_of(9), PARAMS)
        await llm.shutdown()
        assert "aspire-engine" not in {thread.name for thread in threading.enumerate()}

    run(work())


def test_readers_of_two_event_loops(request: pytest.FixtureRequest) -> None:
    llm = engine()
    request.addfinalizer(llm.close)
    results: list[int] = []

    def reader() -> None:
        last, _ = asyncio.run(read(llm.generate(prompt_of(30), PARAMS)))
        results.append(len(last.outputs[0].token_ids))

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [20, 20]


def test_chat_uses_the_template_of_the_model() -> None:
    class Templated:
        @staticmethod
        def apply_chat_template(messages: list[dict[str, str]], *, tokenize: bool) -> list[int]:
            assert tokenize
            return [len(message["content"]) for message in messages]

    async def work() -> None:
        async with engine() as llm:
            llm.engine._tokenizer = Templated()  # type: ignore[assignment]
            last, _ = await read(llm.chat([{"role": "user", "content": "four"}], PARAMS))
            assert last.prompt_token_ids == [4]
            with pytest.raises(InputError, match="no messages"):
                await read(llm.chat([]))

    run(work())
