"""Comparison of texts: where they part, with which margins, and what is left out."""

from __future__ import annotations

import numpy as np
import pytest

from aspire.compare import Text, compare
from aspire.errors import InputError


def _text(tokens: list[int], margins: list[float] | None = None, name: str = "a") -> Text:
    return Text(name, tokens, None if margins is None else np.array(margins, dtype=np.float32))


def test_equal_texts_tell_how_far_margins_moved() -> None:
    found = compare([_text([1, 2, 3], [1.0, 2.0, np.inf])], [_text([1, 2, 3], [1.5, 2.0, np.inf])])
    assert found.equal_share == 1.0 and not found.differences and found.first_difference == ""
    assert found.moved.tolist() == [0.5, 0.0]
    assert found.largest_margin is None


def test_a_difference_has_its_place_and_both_margins() -> None:
    base = [_text([1, 2, 3], [1.0, 0.01, 5.0]), _text([4, 5], [1.0, 1.0], "b")]
    ours = [_text([1, 9, 9], [1.0, 0.03, 7.0]), _text([4, 5], [1.0, 1.0], "b")]
    found = compare(ours, base)
    (difference,) = found.differences
    assert (difference.request, difference.position) == ("a", 1)
    assert difference.margin == pytest.approx(0.01) and difference.other_margin == pytest.approx(0.03)
    assert difference.shift == pytest.approx(0.04)
    assert found.equal == 1 and found.equal_share == 0.5 and found.largest_margin == pytest.approx(0.01)
    assert len(found.moved) == 1 + 2
    assert "output token 1, where the two best scores are 0.01 apart" in found.first_difference
    both = found + compare(ours[1:], base[1:])
    assert both.compared == 3 and both.to_json()["text_equal_share"] == pytest.approx(2 / 3)


def test_a_shorter_text_differs_unless_only_the_common_length_counts() -> None:
    ours, base = [_text([1, 2])], [_text([1, 2, 3])]
    (difference,) = compare(ours, base).differences
    assert difference.position == 2 and difference.margin is None and difference.shift is None
    assert compare(ours, base, common_length=True).equal == 1
    assert compare([_text([1, 4])], base, common_length=True).equal == 0


def test_what_did_not_finish_is_left_out_and_strangers_are_errors() -> None:
    found = compare([None, _text([1])], [_text([1]), None])
    assert found.compared == 0 and found.equal_share is None
    with pytest.raises(InputError, match="2 and 1"):
        compare([None, None], [None])
    with pytest.raises(InputError, match="'a'.*'b'"):
        compare([_text([1])], [_text([1], name="b")])
