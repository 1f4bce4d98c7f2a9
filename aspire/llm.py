"""`LLM`: offline generation, the first thing a user writes. Names and return types as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from aspire.engine.config import EngineConfig
from aspire.engine.llm_engine import LLMEngine
from aspire.errors import InputError, UsageError, check_keys
from aspire.heap import settled_heap
from aspire.outputs import RequestOutput
from aspire.sampling_params import SamplingParams
from aspire.scheduler import CostModel

Prompt = str | Sequence[int]


class LLM:
    """A model with its engine. ``settings`` are those of `EngineConfig`; ``cost_model`` is a file or a loaded model.

    >>> llm = LLM(model="smollm2-135m", policy="aspire:cost_ratio=0.3")
    >>> llm.generate(["Why is the sky blue?"], SamplingParams(temperature=0.7, max_tokens=64))
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        config: EngineConfig | None = None,
        cost_model: CostModel | str | Path | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(cost_model, (str, Path)):
            settings["cost_model"], cost_model = cost_model, None
        if config is None:
            check_keys("LLM", settings, [field.name for field in fields(EngineConfig)])
            config = EngineConfig(model=model, **settings)
        elif settings:
            raise UsageError(f"give either config or settings ({', '.join(settings)}), not both")
        self.engine = LLMEngine(config, cost_model=cost_model)
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        on_step: Callable[[list[RequestOutput]], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt (text or token ids); outputs come in the order of the prompts.

        ``on_step`` sees every step's new outputs (progress, streaming). Raises `InputError` before anything runs when a
        prompt is empty or too long.
        """
        many = _as_list(prompts)
        params = _params_for(many, sampling_params)
        ids = list(request_ids) if request_ids is not None else [str(self._requests + i) for i in range(len(many))]
        if len(ids) != len(many):
            raise UsageError(f"{len(ids)} request ids for {len(many)} prompts; give one for each")
        self._requests += len(many)
        added: list[str] = []
        try:
            for name, prompt, each in zip(ids, many, params, strict=True):
                self.engine.add_request(name, prompt, each)
                added.append(name)
            return self._run(ids, on_step)
        except BaseException:
            for name in added:
                self.engine.abort(name)
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate an answer to each conversation, in the model's own chat template."""
        if not messages:
            raise InputError("chat got no messages; give at least one {'role', 'content'}")
        single = isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        template = self.engine.tokenizer.apply_chat_template
        prompts: list[Prompt] = [template(conversation, tokenize=True) for conversation in conversations]
        return self.generate(prompts, sampling_params)

    @settled_heap()
    def _run(self, ids: list[str], on_step: Callable[[list[RequestOutput]], None] | None) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        wanted = set(ids)
        while len(done) < len(wanted):
            outputs = self.engine.step()
            if on_step is not None:
                on_step(outputs)
            done.update({output.request_id: output for output in outputs if output.finished})
        return [done[name] for name in ids]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(prompts: list[Prompt], given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise UsageError(f"{len(given)} sampling parameters for {len(prompts)} prompts; give one, or one for each")
    return list(given)
