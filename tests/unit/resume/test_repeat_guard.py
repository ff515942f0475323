"""Text that a unit may have repeated, and text that is certainly new."""

from __future__ import annotations

import pytest

from cellgate.proxy.resume.chat import RepeatGuard


@pytest.mark.parametrize("pieces", [["abc"], ["a", "b", "c"], ["abcd"], ["ab", "cd"], ["", "abc"]])
def test_a_unit_that_repeats_all_is_found_out(pieces: list[str]) -> None:
    guard = RepeatGuard("abc")
    *before, last = [guard.feed(piece) for piece in pieces]
    assert (before, last) == ([""] * len(before), None)


@pytest.mark.parametrize("pieces", [["xyz"], ["a", "bx", "abc"], ["ab", "ab"], ["aab"], ["", "x"], ["ab"]])
def test_new_text_comes_through_whole_and_in_order(pieces: list[str]) -> None:
    """Also when it ends while it might still have been a repetition."""
    guard = RepeatGuard("abc")
    assert "".join([guard.feed(piece) or "" for piece in pieces] + [guard.flush()]) == "".join(pieces)


def test_new_text_is_held_back_for_no_longer_than_it_takes() -> None:
    guard = RepeatGuard("abc")
    assert [guard.feed(piece) for piece in ("a", "x", "abc")] == ["", "ax", "abc"]
