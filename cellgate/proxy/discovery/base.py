"""What is found by discovery: cells and units that the configuration does not list.

1. A source always reports everything it finds, never a difference; follow.py acts on changes.
2. A source that fails only reports that: its last units are kept.

In this order: `Found`, `Suspicion`, `Feed`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from cellgate.router.nouns import Cell, Unit

GROUP = "group"
"""In place of a node: the unit as a whole."""


@dataclass(frozen=True, slots=True)
class Found:
    """All that a source finds at one moment, in the order for display.

    `cells` are those that the source brings along, with their weights; a source of one configured cell has
    none. `epochs` name the incarnation of units, for those whose processes the source can tell apart.
    """

    units: tuple[Unit, ...] = ()
    cells: tuple[Cell, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    epochs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A fault of a unit that a source reports, as long as it reports it.

    `node` is the node concerned, or GROUP. `fatal`: the unit cannot work while this
    stands; otherwise it is suspected once, and a canary decides.
    """

    unit: str
    node: str
    reason: str
    fatal: bool = True


class SourceError(Exception):
    """A source failed. `str()` is one line: in which phase, and what can be done."""


Follow = Callable[[Any], AsyncGenerator[Found, None]]
"""Follows a source: yields what is found, at first and then after each change.

Repeating the same costs nothing. Never ends by itself; raises SourceError when the source fails, and is
called again after a pause. It must not block the loop.
"""


class Feed:
    """Passes the units found in Redis to their follower. One for each gate.

    `on_taken` is called once the gate has taken over what was found.
    """

    def __init__(self) -> None:
        self._found: Found | None = None
        self._news = asyncio.Event()
        self.on_taken: Callable[[], None] = lambda: None

    def put(self, found: Found) -> bool:
        """This is all there is now; whether that is news, which its follower will take over."""
        if found == self._found:
            return False
        self._found = found
        self._news.set()
        return True

    async def follow(self) -> AsyncGenerator[Found, None]:
        """Each fleet, once it is another than the last. While Redis is gone the last holds."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._found is not None
            yield self._found
            self.on_taken()


def named(text: str) -> str:
    """A name for a unit that is valid in a URL, a label and a log line."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).strip("._-")[:128] or "unit"
