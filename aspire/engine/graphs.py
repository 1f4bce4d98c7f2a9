"""CUDA graphs of steps, keyed by padded sizes and captured when first needed.

Padded tokens write to the trash page, padded rows have no query; a graph's bounds hold for every step that replays it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire.engine.step_input import Shape, StepInput, host_buffer
from aspire.scheduler import StepPlan
from aspire_kernels import counters

if TYPE_CHECKING:
    from aspire.engine.runner import ModelRunner, StepBounds, StepResult
    from aspire.engine.selectors import PageLists


_PAGES_PER_ROW = 2  # a verification of 17 tokens begins at most two pages
_PROMPT_PAGES = 1024  # of prompts that enter with a step
_CUTS = (2, 8)  # layers before which a new graph begins, where the device waits for the launch


@dataclass
class _HostEnd:
    """Page-locked buffers of one launch. A graph has two sets, used in turn: while a step runs, the host already fills
    the input of the next and may not yet have read the result of the one before."""

    upload: Tensor
    inp: StepInput
    result: Tensor
    done: torch.cuda.Event

    @classmethod
    def of(cls, shape: Shape, packed: Tensor) -> _HostEnd:
        """Buffers for inputs of ``shape`` and results like ``packed``."""
        upload, view = host_buffer(shape.size, pinned=True)
        result = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        return cls(upload, StepInput(shape, view), result, torch.cuda.Event())


@dataclass
class _Captured:
    """A graph with the buffers that it reads and writes."""

    graphs: list[torch.cuda.CUDAGraph]
    device_input: StepInput
    packed: Tensor  # on the device
    ends: tuple[_HostEnd, _HostEnd]
    paths: dict[str, int]  # kernel launches in it, by path
    launches: int = 0

    def replay(self) -> None:
        """Launch the whole step."""
        for graph in self.graphs:
            graph.replay()
        for path, launches in self.paths.items():
            counters.count(path, launches)


class GraphCache:
    """Graphs of one runner. They share one memory pool, since only one runs at a time. The largest bucket holds any
    step (max_num_batched_tokens)."""

    def __init__(self, runner: ModelRunner, buckets: Sequence[int]) -> None:
        self._runner = runner
        self._buckets = np.array(sorted(buckets), dtype=np.int64)
        self._row_buckets = np.array([*_powers(runner.config.max_num_seqs)], dtype=np.int64)
        self._graphs: dict[tuple[Shape, StepBounds, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    def forget(self, lists: PageLists) -> None:
        """Drop the graphs that read ``lists``."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[2] != id(lists)}
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # a pool dies with the last of its graphs

    def launch(self, plan: StepPlan, forced: NDArray[np.int64] | None) -> Callable[[], StepResult]:
        """Start the step by replaying its graphs, captured first if need be; the returned call waits for its result.

        At most two steps may be in flight.
        """
        from aspire.engine.runner import StepBounds

        shape = self._shape_of(plan)
        bounds = StepBounds.for_graph(plan, self._runner.config.max_model_len, shape.tokens)
        key = (shape, bounds, id(self._runner.lists))
        captured = self._graphs.get(key)
        if captured is None:
            torch.cuda.synchronize()  # the step in flight is not part of the capture
            start = time.perf_counter()
            captured = self._graphs[key] = self._capture(shape, bounds)
            torch.cuda.synchronize()
            self._runner.capture_s += time.perf_counter() - start
        if len(plan.new_pages) > shape.pages:
            self._runner.write_pages(plan.new_pages)
            plan = replace(plan, new_pages=plan.new_pages[:0])
        end = captured.ends[captured.launches % 2]
        captured.launches += 1
        self._runner.fill(end.inp, plan, forced)
        captured.device_input.buffer.copy_(end.upload, non_blocking=True)
        captured.replay()
        end.result.copy_(captured.packed, non_blocking=True)
        end.done.record()

        def wait() -> StepResult:
            end.done.synchronize()
            return self._runner.unpack(end.result.numpy(), plan, shape.samples)

        return wait

    def _shape_of(self, plan: StepPlan) -> Shape:
        """Padded sizes. Steps with prompt chunks are all padded to the same rows, since so many other sizes differ."""
        limit = self._runner.config.max_num_seqs
        tokens = int(self._buckets[np.searchsorted(self._buckets, plan.num_query_tokens)])
        if plan.num_prefills:
            doublings = (-(-max(plan.num_samples, 1) // limit) - 1).bit_length()
            samples = min(tokens, limit << doublings)
            return Shape(tokens, limit, samples, _PAGES_PER_ROW * limit + _PROMPT_PAGES)
        rows = int(self._row_buckets[np.searchsorted(self._row_buckets, plan.num_rows)])
        return Shape(tokens, rows, tokens, _PAGES_PER_ROW * rows)

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

    def _capture(self, shape: Shape, bounds: StepBounds) -> _Captured:
        runner = self._runner
        # all rows padded: a warm-up run compiles kernels and sizes scratch, and changes no slot
        host, view = host_buffer(shape.size, pinned=True)
        blank = StepInput(shape, view)
        blank.clear(runner.config.max_num_seqs)
        device_input = StepInput(shape, host.to(runner.device))
        runner.forward(device_input, bounds)
        torch.cuda.synchronize()
        before = counters.snapshot()
        gc.disable()  # page-locked memory that the garbage collector frees during a capture would break it
        try:
            graphs, packed = self._record(device_input, bounds)
        finally:
            gc.enable()
        ends = (_HostEnd.of(shape, packed), _HostEnd.of(shape, packed))
        paths = counters.since(before)
        for path, launches in paths.items():
            counters.count(path, -launches)  # captured, not run
        for graph in graphs:
            graph.replay()  # the first replay takes longer: the graph is sent to the device
        return _Captured(graphs, device_input, packed, ends, paths)

    def _record(self, device_input: StepInput, bounds: StepBounds) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
        """Capture the forward as a few graphs, cut before some layers.

        Launching a graph takes the host time in proportion to its kernels; with a short first graph the GPU starts
        while the host still launches the others. Steps launched ahead need no cuts.
        """
        graphs: list[torch.cuda.CUDAGraph] = []
        cuts = () if self._runner.config.async_scheduling else _CUTS

        def cut(layer: int) -> None:
            if layer in cuts:
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
