"""Finding the lines that are wanted where they were the last time."""

from __future__ import annotations

import random
import re

from cellgate.probes.engine_metrics import ALL_EVERY, SampleLines

WANTED = re.compile(rb"\n(a|b|ab)(?:\{([^\n]*)\})? ([^ \n]+)")


def found(lines: SampleLines, page: bytes) -> list[tuple[bytes | None, ...]]:
    """Names, labels and values of the lines that are wanted."""
    return [match.groups() for match in lines.of(page)]


def in_full(page: bytes) -> list[tuple[bytes | None, ...]]:
    """The same, looking at all lines."""
    return [match.groups() for match in WANTED.finditer(b"\n" + page)]


def test_the_same_page_with_other_values() -> None:
    lines = SampleLines(WANTED)
    for value in range(3 * ALL_EVERY):
        page = b'# HELP\nx 1\na{e="0"} %d\na{e="1"} 2 17\nay 3\nab 4\nb{} 5\nb\nz 1\n' % value
        assert found(lines, page) == in_full(page)


def test_a_series_more_is_seen_at_once() -> None:
    lines = SampleLines(WANTED)
    found(lines, b'a{e="0"} 1\nb 2\n')
    assert found(lines, b'a{e="0"} 1\na{e="1"} 1\nb 2') == in_full(b'a{e="0"} 1\na{e="1"} 1\nb 2')


def test_a_metric_less_is_seen_at_once() -> None:
    lines = SampleLines(WANTED)
    found(lines, b"a 1\nb 2\n")
    assert found(lines, b"a 1\n") == in_full(b"a 1\n")


def test_a_metric_more_is_seen_soon() -> None:
    lines = SampleLines(WANTED)
    found(lines, b"a 1\n")
    seen = [len(found(lines, b"a 1\nb 2\n")) for _ in range(ALL_EVERY)]
    assert seen == [1] * (ALL_EVERY - 1) + [2]


def test_a_page_in_disorder_is_always_looked_at_in_full() -> None:
    """Else some of its counters would be missed now and then, and their return taken for progress."""
    lines = SampleLines(WANTED)
    page = b"a 1\nb 2\na 3\n"
    assert [found(lines, page) for _ in range(2 * ALL_EVERY)] == [in_full(page)] * 2 * ALL_EVERY


def test_any_pages_that_keep_their_order() -> None:
    rng = random.Random(5)
    names = [b"a", b"ab", b"abc", b"b", b"c"]
    for _ in range(200):
        shape = [(name, rng.randrange(3)) for name in rng.sample(names, rng.randrange(1, 6))]
        lines = SampleLines(WANTED)
        for _ in range(5):
            rows = [
                b'%b{n="%d"} %d' % (name, n, rng.randrange(9)) for name, times in shape for n in range(times)
            ]
            page = b"\n".join(rows)
            assert found(lines, page) == in_full(page)
