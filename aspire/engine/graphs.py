"""CUDA graphs of decode steps, keyed by padded sizes and captured when first needed.

Padded tokens write to the trash page, padded rows have no query; a graph's bounds hold for every step that replays it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from aspire.engine.step_input import Shape, StepInput, host_buffer
from aspire.scheduler import Mode, StepPlan

if TYPE_CHECKING:
    from aspire.engine.runner import ModelRunner, StepBounds, StepResult


_PAGES_PER_ROW = 2  # a verification of 17 tokens begins at most two pages
_CUTS = (2, 8)  # layers before which a new graph begins


@dataclass
class _Captured:
    """A graph with the buffers that it reads and writes."""

    graphs: list[torch.cuda.CUDAGraph]
    host: Tensor  # page-locked
    host_input: StepInput
    device_input: StepInput
    packed: Tensor  # on the device
    result: Tensor  # page-locked
    result_view: np.ndarray
    done: torch.cuda.Event

    def replay(self) -> None:
        """Launch the whole step."""
        for graph in self.graphs:
            graph.replay()


class GraphCache:
    """Graphs of one runner. They share one memory pool, since only one runs at a time."""

    def __init__(self, runner: ModelRunner, buckets: Sequence[int]) -> None:
        self._runner = runner
        self._buckets = np.array(sorted(buckets), dtype=np.int64)
        self._row_buckets = np.array([*_powers(runner.config.max_num_seqs)], dtype=np.int64)
        self._graphs: dict[tuple[Shape, StepBounds, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs: something that they read has been replaced."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool dies with the last of its graphs

    def fits(self, plan: StepPlan) -> bool:
        """Whether a graph can run the step: it only decodes, and buckets hold its tokens and new pages."""
        few_pages = len(plan.new_pages) <= _PAGES_PER_ROW * plan.num_rows
        return few_pages and plan.num_query_tokens <= self._buckets[-1] and not (plan.modes == Mode.PREFILL).any()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start the step by replaying its graphs, captured first if need be; the returned call waits for its result."""
        from aspire.engine.runner import StepBounds

        tokens = int(self._buckets[np.searchsorted(self._buckets, plan.num_query_tokens)])
        rows = int(self._row_buckets[np.searchsorted(self._row_buckets, plan.num_rows)])
        shape = Shape(tokens, rows, tokens, self._runner.config.max_num_seqs, _PAGES_PER_ROW * rows)
        bounds = StepBounds.for_graph(plan, self._runner.config.max_model_len)
        key = (shape, bounds, id(self._runner.lists))
        captured = self._graphs.get(key)
        if captured is None:
            start = time.perf_counter()
            captured = self._graphs[key] = self._capture(shape, bounds, plan)
            torch.cuda.synchronize()
            self._runner.capture_s += time.perf_counter() - start
        else:
            self._runner.fill(captured.host_input, plan)
            captured.device_input.buffer.copy_(captured.host, non_blocking=True)
        captured.replay()
        captured.result.copy_(captured.packed, non_blocking=True)
        captured.done.record()

        def wait() -> StepResult:
            captured.done.synchronize()
            return self._runner.unpack(captured.result_view, plan, tokens)

        return wait

    def replay_seconds(self, repeats: int = 20) -> float:
        """Median GPU time of the step that was captured last, replayed alone."""
        captured = list(self._graphs.values())[-1]
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            captured.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return float(np.median(times))

    def _capture(self, shape: Shape, bounds: StepBounds, plan: StepPlan) -> _Captured:
        runner = self._runner
        host, view = host_buffer(shape.size, pinned=True)
        host_input = StepInput(shape, view)
        runner.fill(host_input, plan)
        device_input = StepInput(shape, host.to(runner.device))
        # a first run compiles kernels and sizes scratch; a step run twice writes the same KV and lists
        runner.forward(device_input, bounds)
        torch.cuda.synchronize()
        device_input.buffer.copy_(host)
        # page-locked memory that the garbage collector frees during a capture would break it
        gc.collect()
        gc.disable()
        try:
            graphs, packed = self._record(device_input, bounds)
        finally:
            gc.enable()
        result = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        return _Captured(graphs, host, host_input, device_input, packed, result, result.numpy(), torch.cuda.Event())

    def _record(self, device_input: StepInput, bounds: StepBounds) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
        """Capture the forward as a few graphs, cut before some layers.

        Launching a graph takes the host time in proportion to its kernels; with a short first graph the GPU starts
        while the host still launches the others.
        """
        graphs: list[torch.cuda.CUDAGraph] = []

        def cut(layer: int) -> None:
            if layer in _CUTS:
                graphs[-1].capture_end()
                begin()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            begin()
            packed, _ = self._runner.forward(device_input, bounds, before_layer=cut)
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graphs, packed


def _powers(limit: int) -> list[int]:
    """1, 2, 4 .. below ``limit``, and ``limit``."""
    return [*[1 << k for k in range(limit.bit_length()) if 1 << k < limit], limit]
