"""Discovery: where cells and units come from when the configuration does not list them.

1. A source tells the whole of what it finds each time, never a difference; follow.py sees to what follows.
2. A source that loses sight of its world says so and no more: what it told last stays.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from cellgate.router.nouns import Cell, Unit

GROUP = "group"
"""What stands for a node where a unit as a whole is meant."""


def named(text: str) -> str:
    """A name for a unit that can stand in a URL, a label and a log line, however it is called elsewhere."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).strip("._-")[:128] or "unit"


class SourceError(Exception):
    """The world of a source cannot be seen. `str()` is one line: in which phase, and what can be done."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What a source holds against a unit, for as long as it tells it.

    `node` is the node concerned, or GROUP. `fatal`: the unit cannot work while this
    stands; otherwise it is suspected once, and a canary decides.
    """

    unit: str
    node: str
    reason: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """All that a source finds at one moment, in the order in which people are to see it.

    `cells` are those that the source brings along, with their weights; a source of one configured cell has
    none. `epochs` name the incarnation of units, for those whose processes the source can tell apart.
    """

    units: tuple[Unit, ...] = ()
    cells: tuple[Cell, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    epochs: tuple[tuple[str, str], ...] = ()


Follow = Callable[[Any], AsyncGenerator[Found, None]]
"""Follows a source: what is found, at once when its world is reached, then whenever it has changed.

The same again is no news and costs nothing. Never ends by itself; raises LostError when the world is lost,
and is then called anew after a pause. It must not block the loop.
"""
