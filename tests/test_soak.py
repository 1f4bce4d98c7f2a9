"""A few seconds of the soak that `make soak` runs for minutes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.soak import Soak


def test_random_traffic_loses_and_changes_nothing() -> None:
    soak = Soak(seed=1, model="tiny-llama")
    for _ in range(2):
        soak.round(2.0)
    assert soak.problems == []
    ended = soak.counts["finished"] + soak.counts["aborted"] + soak.counts["rejected"]
    assert ended == soak.counts["submitted"] > 0
