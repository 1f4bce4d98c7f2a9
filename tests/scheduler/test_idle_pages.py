"""The queue of idle pages against the standard library's ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aspire.scheduler.idle_pages import IdlePages

PAGES = 150  # more than one window of places


@given(st.integers(0, 2**20), st.integers(1, 60))
def test_the_oldest_are_taken_first_whatever_was_taken_out_between(seed: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    idle, expected = IdlePages(PAGES), OrderedDict[int, None]()
    for _ in range(rounds):
        some = rng.choice(PAGES, int(rng.integers(0, PAGES)), replace=False).astype(np.int32)
        match rng.integers(0, 3):
            case 0:
                new = some[[page not in expected for page in some.tolist()]]
                idle.push(new)
                expected.update(dict.fromkeys(new.tolist()))
            case 1:
                idle.remove(some)
                for page in some.tolist():
                    expected.pop(page, None)
            case _:
                count = int(rng.integers(0, len(expected) + 1))
                assert idle.pop(count).tolist() == [expected.popitem(last=False)[0] for _ in range(count)]
        assert len(idle) == len(expected)
        assert idle.count_of(some) == sum(page in expected for page in some.tolist())
    assert idle.pop(len(idle)).tolist() == list(expected)
