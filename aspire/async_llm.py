"""`AsyncLLM`: one engine for many coroutines. A thread of its own steps the engine; outputs stream to async iterators.

    async with AsyncLLM("smollm2-135m") as llm:
        async for output in llm.generate("Tell me about the sea.", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

The engine is touched by its thread alone: every call is handed to it and done between two steps.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from aspire.engine.config import EngineConfig
from aspire.engine.llm_engine import LLMEngine
from aspire.errors import AspireError, EngineError, InputError, UsageError
from aspire.heap import settled_heap
from aspire.llm import LLM
from aspire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from aspire.sampling_params import SamplingParams
from aspire.scheduler import CostModel, PolicySpec

_Command = tuple[Callable[[], Any], Future[Any]]


class OutputStream:
    """Outputs of one request as they come; ends after the finished one, or raises what ended the engine's work.

    A slow reader gets the newest output, with the ``new_token_ids`` of all since the one it read before.
    """

    def __init__(self, request_id: str, prompt: str | None, token_ids: list[int], loop: asyncio.AbstractEventLoop):
        self.request_id = request_id
        self.loop = loop
        self._prompt = prompt
        self._token_ids = token_ids
        self._pending: RequestOutput | None = None
        self._last: RequestOutput | None = None
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Called in the reader's loop."""
        if self._pending is not None:
            output = replace(output, new_token_ids=self._pending.new_token_ids + output.new_token_ids)
        self._pending = replace(output, prompt=self._prompt)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """The reader gets ``error`` after what it has not read yet. Called in its loop."""
        self._error = error
        self._changed.set()

    def abort(self) -> None:
        """End with what there is, as aborted. Called in the reader's loop."""
        so_far = self._pending or self._last
        if so_far is None:
            nothing = CompletionOutput(0, "", [])
            so_far = RequestOutput(self.request_id, None, self._token_ids, [nothing], False, RequestMetrics(0.0))
        if not so_far.finished:
            ended = replace(so_far.outputs[0], finish_reason="abort")
            new = self._pending.new_token_ids if self._pending else []
            self._pending = None
            self.put(replace(so_far, outputs=[ended], finished=True, new_token_ids=new))

    @property
    def finished(self) -> bool:
        """Whether the reader has seen the end."""
        return self._last is not None and self._last.finished

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        self._last, self._pending = self._pending, None
        return self._last


class AsyncLLM:
    """A model with its engine in a thread. Arguments as `aspire.LLM`; methods may be called from any event loop."""

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        config: EngineConfig | None = None,
        cost_model: CostModel | str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.engine: LLMEngine = LLM(model, config=config, cost_model=cost_model, **settings).engine
        self.engine.recorder.stop()
        self._numbers = count()
        self._streams: dict[str, OutputStream] = {}  # of the engine's thread
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._open = threading.Lock()  # held while a command is queued, or the queue is closed
        self._ended: BaseException | None = None
        self._stops = self._drains = False
        self._policy_path: Path | None = None
        self._thread = threading.Thread(target=self._run, name="aspire-engine", daemon=True)
        self._thread.start()

    # ---- requests ------------------------------------------------------------------------------------------------

    async def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> OutputStream:
        """Queue a prompt (text or token ids); iterate over what is returned. Raises as `LLMEngine.add_request`."""
        text = prompt if isinstance(prompt, str) else None
        # long prompts take milliseconds to encode: not in the thread that steps the engine
        ids: list[int] = list(prompt) if not isinstance(prompt, str) else await asyncio.to_thread(self._encode, prompt)
        stream = OutputStream(request_id, text, ids, asyncio.get_running_loop())

        def add() -> None:
            if self._drains:
                raise EngineError("the engine is shutting down; make a new AsyncLLM")
            self.engine.add_request(request_id, ids, sampling_params, priority=priority)
            self._streams[request_id] = stream

        try:
            await self._call(add)
        except asyncio.CancelledError:
            self._send(lambda: self._abort(request_id, stream))
            raise
        return stream

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as accepted runs come in; the last is ``finished``. Leaving the iterator early aborts the request."""
        name = request_id if request_id is not None else f"async-{next(self._numbers)}"
        stream = await self.add_request(name, prompt, sampling_params, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            if not stream.finished:
                self._send(lambda: self._abort(name, stream))

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`generate` of a conversation, in the model's own chat template."""
        if not messages:
            raise InputError("chat got no messages; give at least one {'role', 'content'}")
        ids = self.engine.tokenizer.apply_chat_template(messages, tokenize=True)
        async for output in self.generate(ids, sampling_params, request_id):
            yield output

    async def abort(self, request_id: str) -> bool:
        """End a request now; its iterator ends with ``finish_reason`` abort. False if it is not there any more."""
        return bool(await self._call(lambda: self._abort(request_id)))

    # ---- the engine at run time ----------------------------------------------------------------------------------

    async def set_policy(self, policy: PolicySpec | str) -> PolicySpec:
        """Switch policy and selector between two steps; outputs stay the same. Raises `AspireError`."""
        spec = PolicySpec.parse(policy) if isinstance(policy, str) else policy
        await self._call(lambda: self.engine.set_policy(spec))
        return spec

    async def reload_policy(self, path: str | Path | None = None) -> PolicySpec:
        """Read policy.json again (``path`` None: the file read last) and switch to it."""
        chosen = Path(path) if path is not None else self._policy_path
        if chosen is None:
            raise UsageError("reload_policy needs the path of a policy.json the first time")
        spec = await self.set_policy(str(chosen))
        self._policy_path = chosen
        return spec

    async def shutdown(self, *, drain: bool = False) -> None:
        """Stop the thread: at once, aborting what runs, or with ``drain`` after everything queued has ended."""
        await asyncio.to_thread(self.close, drain=drain)

    def close(self, *, drain: bool = False) -> None:
        """`shutdown` for callers without an event loop."""
        self._send(self._drain if drain else self._stop)
        self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.shutdown()

    @property
    def is_running(self) -> bool:
        """Whether requests can be added."""
        return self._ended is None and self._thread.is_alive()

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text)

    def _send(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the engine's thread do ``work`` between two steps."""
        done: Future[Any] = Future()
        with self._open:
            if self._ended is None:
                self._commands.put((work, done))
            else:
                done.set_exception(self._stopped())
        return done

    async def _call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._send(work))

    def _stopped(self) -> EngineError:
        return EngineError(f"the engine has stopped ({self._ended}); make a new AsyncLLM")

    def _stop(self) -> None:
        self._stops = True

    def _drain(self) -> None:
        self._drains = True

    @settled_heap()
    def _run(self) -> None:
        """Obey and step until told to stop, or until a step raises what is no `AspireError`."""
        failure: BaseException | None = None
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            failure = error
        with self._open:
            self._ended = failure or EngineError("it was shut down")
        while not self._commands.empty():
            self._commands.get()[1].set_exception(self._stopped())
        self._end_all(failure)

    def _obey(self) -> bool:
        """Do what was asked for, waiting for something while there is no work. False: stop."""
        while not self._stops:
            working = self.engine.has_unfinished_requests
            if self._drains and not working:
                return False
            try:
                work, done = self._commands.get(block=not working)
            except queue.Empty:
                return True
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
        return False

    def _step(self) -> None:
        try:
            outputs = self.engine.step(stream=True)
        except AspireError as error:  # e.g. out of memory: its requests fail, the engine goes on
            self._end_all(error)
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, output))
                if output.finished:
                    del self._streams[output.request_id]
        for loop, pairs in by_loop.items():
            if not _in_loop(loop, partial(_put_all, pairs)):
                for stream, _ in pairs:
                    self._abort(stream.request_id)

    def _abort(self, request_id: str, only: OutputStream | None = None) -> bool:
        """Abort a request; with ``only``, if it is still that one and not another of the same id."""
        stream = self._streams.get(request_id)
        if only is not None and stream is not only:
            return False
        known = self.engine.abort(request_id)
        if known and stream is not None:  # one that has just ended gets its own last output
            del self._streams[request_id]
            _in_loop(stream.loop, stream.abort)
        return known

    def _end_all(self, error: BaseException | None) -> None:
        """Abort every request; the readers get ``error``, or an aborted output without one."""
        for name, stream in self._streams.items():
            self.engine.abort(name)
            _in_loop(stream.loop, stream.abort if error is None else partial(stream.fail, error))
        self._streams.clear()


def _put_all(pairs: list[tuple[OutputStream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)


def _in_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> bool:
    """Let ``loop`` do ``work`` soon; False when it is closed and nobody reads any more."""
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        return False
    return True
