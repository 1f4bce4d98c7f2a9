"""Launch counters per path: the proof that a fast path was taken. Counting is host-side: a replayed
graph runs no host code, so who replays it counts what was launched into it."""

from __future__ import annotations

from collections import Counter

_counts: Counter[str] = Counter()


def count(path: str, launches: int = 1) -> None:
    """Add ``launches`` to the counter of ``path`` (e.g. ``attention.triton.sparse``)."""
    _counts[path] += launches


def snapshot() -> dict[str, int]:
    """Copy of all counters, by path, in alphabetical order."""
    return dict(sorted(_counts.items()))


def since(before: dict[str, int]) -> dict[str, int]:
    """Launches by path since the `snapshot` ``before``."""
    return {path: count - before.get(path, 0) for path, count in snapshot().items() if count != before.get(path, 0)}


def reset() -> None:
    """Set every counter to zero."""
    _counts.clear()
