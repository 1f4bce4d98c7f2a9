"""Time of GPU work: CUDA-graph replays between events, inputs rotated so that the L2 cache cannot serve them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median over replays, and all of them."""

    seconds: float
    samples: tuple[float, ...]

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.samples) - min(self.samples)) / self.seconds


class Captured:
    """Calls captured in one CUDA graph."""

    def __init__(self, calls: Sequence[Callable[[], object]], rounds: int = 1) -> None:
        """Run every call once (compiles, allocates), then capture ``rounds`` rounds of all of them."""
        self._keep = list(calls)  # inputs must outlive the graph
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        # not the context manager torch.cuda.graph: it collects garbage each time, which would dominate a sweep
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            torch.cuda.synchronize()
            self.graph.capture_begin()
            try:
                for _ in range(rounds):
                    for call in calls:
                        call()
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.calls = rounds * len(calls)

    def replay_seconds(self) -> float:
        """Seconds of one call in one replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.calls


def measure(calls: Sequence[Callable[[], object]], *, repeats: int = 7, target_ms: float = 3.0) -> Timing:
    """Median time of a call when ``calls`` (over different inputs) run one after the other in a graph."""
    captured = Captured(calls)
    captured.replay_seconds()
    once = captured.replay_seconds() * captured.calls
    rounds = max(1, min(50, int(target_ms / 1e3 / max(once, 1e-6))))
    if rounds > 1:
        captured = Captured(calls, rounds)
        captured.replay_seconds()
    samples = tuple(captured.replay_seconds() for _ in range(repeats))
    return Timing(statistics.median(samples), samples)


def measure_ratio(
    numerator: Sequence[Callable[[], object]], denominator: Sequence[Callable[[], object]], repeats: int = 7
) -> tuple[Timing, Timing, list[float]]:
    """Times of two sets of calls, replayed in turn so that clocks and neighbours treat both alike, and their ratios."""
    pair = [Captured(numerator), Captured(denominator)]
    for captured in pair * 2:
        captured.replay_seconds()
    samples = [[captured.replay_seconds() for captured in pair] for _ in range(repeats)]
    up, down = zip(*samples, strict=True)
    return (
        Timing(statistics.median(up), tuple(up)),
        Timing(statistics.median(down), tuple(down)),
        [a / b for a, b in samples],
    )


def copy_bandwidth(gigabytes: float = 4.0) -> Timing:
    """Bytes per second (read + written) of a large device-to-device copy, in ``seconds`` of the returned timing.

    Not from a graph: there the driver copies by other means, seen a third slower on an H200.
    """
    source = torch.randint(0, 2**31 - 1, (int(gigabytes * 2**30 / 8),), device="cuda", dtype=torch.int64)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    rates = []
    for _ in range(14):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(copied / (start.elapsed_time(end) / 1e3))
    kept = tuple(rates[3:])
    return Timing(statistics.median(kept), kept)
