"""Noise for the wire: how bytes are damaged, and how they arrive. Strategies for Hypothesis."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

WORDS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b",",
    b"0",
    b"1",
    b"f",
    b"-",
    b"\xff",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"\n\n",
    b"data: x\n\n",
    b"data: ",
    b'data: {"error": 1}\n\n',
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Host: b\r\n",
    b"Expect: 100-continue\r\n",
    b"HTTP/1.0",
    b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
]


class Damage(NamedTuple):
    """`removed` bytes at a place (a share of the whole) make way for `inserted` ones, or are doubled."""

    place: float
    removed: int
    inserted: bytes
    doubled: bool

    def done_to(self, data: bytes) -> bytes:
        """The damaged bytes."""
        at = int(self.place * len(data))
        middle = data[at : at + self.removed]
        return data[:at] + (middle * 2 if self.doubled else self.inserted) + data[at + self.removed :]


DAMAGE = st.builds(
    Damage,
    place=st.floats(0, 1, exclude_max=True),
    removed=st.integers(0, 40) | st.just(1000),
    inserted=st.sampled_from([b"", *WORDS]),
    doubled=st.booleans(),
)
DAMAGES = st.lists(DAMAGE, max_size=3)


class Cut(NamedTuple):
    """A cut at a place (a share of the whole), or so many bytes before the end of the line that it is in."""

    place: float
    before_end: int | None

    def in_(self, data: bytes) -> int:
        """The offset at which `data` is cut."""
        at = int(self.place * len(data))
        if self.before_end is None:
            return at
        return max(0, (data.find(b"\n", at) + 1 or len(data)) - self.before_end)


class Cuts(NamedTuple):
    """Where bytes are cut. `at_events`: also behind each event, and behind the chunk that ends with it."""

    places: list[Cut]
    at_events: bool

    def pieces(self, data: bytes) -> list[bytes]:
        """`data` in pieces, none of which is empty."""
        at = {cut.in_(data) for cut in self.places} | {0, len(data)}
        if self.at_events:
            at |= {match.end() for match in _EVENT_END.finditer(data)}
        return [data[start:end] for start, end in pairwise(sorted(at))]


_EVENT_END = re.compile(rb"\n\n(?:\r\n)?")

CUTS = st.builds(
    Cuts,
    places=st.lists(
        st.builds(Cut, place=st.floats(0, 1), before_end=st.none() | st.integers(0, 2)), max_size=8
    ),
    at_events=st.booleans(),
)


def damaged(data: bytes, damages: list[Damage]) -> bytes:
    """`data` after all of it."""
    for damage in damages:
        data = damage.done_to(data)
    return data
