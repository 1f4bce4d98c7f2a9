"""Launch counters per path: the proof that a fast path was taken. Counting is host-side; a replayed graph counts at
capture only."""

from __future__ import annotations

from collections import Counter

_counts: Counter[str] = Counter()


def count(path: str, launches: int = 1) -> None:
    """Add ``launches`` to the counter of ``path`` (e.g. ``attention.triton.sparse``)."""
    _counts[path] += launches


def snapshot() -> dict[str, int]:
    """Copy of all counters, by path, in alphabetical order."""
    return dict(sorted(_counts.items()))


def reset() -> None:
    """Set every counter to zero."""
    _counts.clear()
