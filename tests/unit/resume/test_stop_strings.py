"""Stop strings at the seam: what looking for them costs, and where a unit goes on."""

from __future__ import annotations

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.resume.eligible import BoundaryStops, StopMatch, stops_of, token_start
from tests.cost.bench import counted

LONGEST = LIMITS.stop_bytes


def steps(stop: str, shown: str, behind: list[str]) -> int:
    """Bytecodes for one stop string, from the first look to the end of the text."""
    with counted() as counts:
        seam = BoundaryStops(shown, [stop])
        for piece in behind:
            seam.feed(piece)
    return sum(counts.values())


@pytest.mark.parametrize(
    ("stop", "shown", "behind"),
    [("Z", "Z", "Z"), ("Z", "ZY", "Z"), ("ZY", "ZY", "ZY"), ("ZZZY", "ZZZY", "ZZZYZ")],
)
def test_twice_as_long_a_stop_string_costs_twice_as_much(stop: str, shown: str, behind: str) -> None:
    one, two = (
        steps(stop * (size // len(stop)), shown * size, [behind] * size) for size in (LONGEST // 2, LONGEST)
    )
    assert two < 2.2 * one
    assert two < 400 * LONGEST


def test_a_match_is_the_longest_beginning_that_is_an_end_of_the_text() -> None:
    stop, text = "abaabab", "abaabaabababaabab"
    match = StopMatch(stop)
    for end in range(1, len(text) + 1):
        complete = match.take(text[end - 1])
        longest = max(n for n in range(len(stop) + 1) if text[:end].endswith(stop[:n]))
        assert (match.size, complete) == (longest, longest == len(stop))


@pytest.mark.parametrize(
    ("shown", "start"),
    [
        ("", 0),
        ("one", 0),
        ("one two thr", 7),
        ("one two ", 3),
        ("one  two", 0),
        ("one\n two three 4", 8),
        ("a é", 1),
    ],
)
def test_with_stop_strings_it_goes_on_where_the_last_word_began(shown: str, start: int) -> None:
    assert token_start(shown, ["xy"]) == start
    assert token_start(shown, ["x"]) == token_start(shown, []) == len(shown)


def test_stop_strings_of_a_strange_form_are_none() -> None:
    assert stops_of({"stop": 5}) == stops_of({"stop": {"a": 1}}) == stops_of({}) == []
    assert stops_of({"stop": "ab"}) == stops_of({"stop": ["ab", 5, None]}) == ["ab"]
