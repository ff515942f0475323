"""A request walked through the gate: the page says what it takes, and a chunk takes two calls."""

from __future__ import annotations

from tests.walk import stale, table, walk, written


def test_the_page_says_what_a_request_takes() -> None:
    assert stale(written(), table(walk())) == [], "python -m tests.walk --write"


def test_a_chunk_is_two_calls() -> None:
    assert walk().chunk.calls.total() == 2
