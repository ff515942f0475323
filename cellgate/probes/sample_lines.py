"""The few lines of a large page of metrics that are wanted, found where they were the last time.

An engine's page has hundreds of lines, in the same order each time: searching for the next line that is
wanted is several times cheaper than looking at the beginning of each. New lines are found by looking at all
of them now and then.
"""

from __future__ import annotations

import re

ALL_EVERY = 10
"""So seldom all lines are looked at."""
NEAR = 400
"""Lines are moved by no more bytes, mostly, when numbers before them have got longer."""


class SampleLines:
    """Of one page that is read again and again. `pattern` matches a line break and a wanted line behind it;
    its first group is the name of the metric.
    """

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self._starts: tuple[bytes, ...] = ()
        """How the wanted lines begin, in their order: a line break, the name and what follows it."""
        self._gaps: list[int] = []
        """How far they were from the end of those before."""
        self._left = 0
        """So many pages until all lines are looked at again."""

    def of(self, page: bytes) -> list[re.Match[bytes]]:
        """Those in `page`."""
        # Mostly it begins with a comment. It is large, and is copied only if it does not.
        body = page if page.startswith(b"#") else b"\n" + page
        if self._left > 0:
            self._left -= 1
            if (found := self._known(body)) is not None:
                return found
        found = list(self._pattern.finditer(body))
        self._starts = tuple(dict.fromkeys(body[match.start() : match.end(1) + 1] for match in found))
        self._gaps = [0] * len(self._starts)
        known = self._known(body)
        # Not of a page whose lines are in disorder, nor of one that has none yet.
        is_same = known and [m.span() for m in known] == [m.span() for m in found]
        self._left = ALL_EVERY - 1 if is_same else 0
        return found

    def _known(self, body: bytes) -> list[re.Match[bytes]] | None:
        """Those that begin as they did; None when some are missing."""
        found, at, match_at = [], 0, self._pattern.match
        for number, start in enumerate(self._starts):
            first = self._first(body, start, at, at + self._gaps[number])
            if first < 0:
                return None
            self._gaps[number], at = first - at, first
            while body.startswith(start, at):
                if (match := match_at(body, at)) is not None:
                    found.append(match)
                at = body.find(b"\n", at + 1)
                at = len(body) if at < 0 else at
        return found

    def _first(self, body: bytes, start: bytes, after: int, guess: int) -> int:
        """Where the first line is that begins so; probably near `guess`."""
        found = guess if body.startswith(start, guess) else body.find(start, guess - NEAR, guess + NEAR)
        # One before it would be right before it: samples of a metric stand together.
        if found < after or body.startswith(start, body.rfind(b"\n", after, found)):
            return body.find(start, after)
        return found
