"""What the commands that run the engine share: opening it, running prompts with progress, and its run directory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aspire.cli.console import Console
from aspire.cli.engine_options import EngineChoice

if TYPE_CHECKING:
    from aspire import LLM
    from aspire.measure import StopSignal
    from aspire.scheduler import PolicySpec
    from aspire_calibration import LoadedCostModel


def open_engine(
    choice: EngineChoice, policy: PolicySpec, console: Console, *, check: bool = True
) -> tuple[LLM, LoadedCostModel | None]:
    """Load the model under ``policy``; raises `MismatchError` when the cost model of the options is not for here."""
    config = choice.config(policy)
    prices = _cost_model(choice, console)
    console.say(f"loading {config.model}")
    from aspire import LLM
    from aspire.engine.identity import check_cost_model, identity_of

    llm = LLM(config=config, cost_model=prices)
    limits = llm.engine.scheduler_config
    console.say(
        f"{llm.engine.loaded.name} on {llm.engine.device}, {identity_of(llm.engine)[1]['dtype']}, "
        f"{llm.engine.runner.backend.name} kernels, {limits.num_pages} KV pages, "
        f"{limits.max_num_seqs} slots of {limits.max_model_len} tokens"
    )
    if config.lossy:
        console.warn(f"decode {config.decode} is lossy: the text is not that of the model's full attention")
    if llm.engine.loaded.synthetic:
        console.warn("random weights: the text means nothing, and acceptance is synthetic")
    if prices is not None and check:
        for difference in check_cost_model(llm.engine, prices):
            console.warn(f"the cost model was made for another setup: {difference}")
    return llm, prices


def _cost_model(choice: EngineChoice, console: Console) -> LoadedCostModel | None:
    path = choice.settings["cost_model"]
    if path is None:
        return None
    from aspire_calibration import load_cost_model

    return load_cost_model(path, warn=console.warn)


@contextmanager
def draining(console: Console) -> Iterator[StopSignal]:
    """Ctrl-C once: start nothing new, finish and write what runs. Twice: stop now."""
    from aspire.measure import StopSignal

    stop = StopSignal()

    def handler(number: int, frame: Any) -> None:
        if stop.drain:
            raise KeyboardInterrupt
        stop.drain = True
        console.warn("interrupted: finishing what runs, then writing; interrupt again to stop now")

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread: there is nothing to handle here
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def progress_of(update: Callable[..., None]) -> Callable[[int, int, int], None]:
    """A progress callback for `run_requests` that feeds a `Progress`."""
    import time

    start_s = time.monotonic()

    def tell(done: int, total: int, tokens: int) -> None:
        elapsed_s = max(1e-6, time.monotonic() - start_s)
        update(done, f"{tokens} tokens, {tokens / elapsed_s:.1f} tok/s" if tokens else "reading prompts", total=total)

    return tell
