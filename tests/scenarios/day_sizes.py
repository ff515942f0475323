"""What a gate keeps, in figures: found by walking over it, so that what is added one day is counted as well.

Every container that an object of the product holds counts under `Class.attribute`, with all of its like in
one sum. What has a bound of its own (a deque with `maxlen`) may fill up: neither it nor its content counts.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from tests.sim.world import World

PRODUCT = ("cellgate.", "tests.scenarios.observed")
MORE = 1.1
"""So much more of something, and `FEW` items, may be there by chance: a probe that is just under way."""
FEW = 8
BLOCKS = 8000
"""So many more objects may be alive: lines read for a traceback, whatever bounded logs have come to hold in
a first hour. (Twelve short days: 1,500 to 6,200.)
"""
PARTS = frozenset({"ReplyHead.fields", "_UnitFlips.last"})
"""A handful each, whose owners are counted: one connection more is no growth, nor is another verdict
of a unit.
"""
PLACES = frozenset({"Timers._slots", "Timers._order"})
"""Containers of what is counted itself: up to 2 empty places for each call, and 64 more, are no growth."""


def sizes(*roots: object) -> Counter[str]:
    """How many items are in the containers that these objects lead to, and how many objects of each class."""
    found: Counter[str] = Counter()
    seen: dict[int, object] = {}
    left: list[tuple[str, object]] = [("", root) for root in roots]
    while left:
        place, thing = left.pop()
        if id(thing) in seen:
            continue
        # Kept, lest another one gets its id meanwhile.
        seen[id(thing)] = thing
        if isinstance(thing, deque) and thing.maxlen is not None:
            continue
        if isinstance(thing, Mapping | list | set | frozenset | deque | tuple):
            if place not in PLACES:
                found[place] += len(thing)
            left += [(place, item) for item in _items(thing)]
        elif isinstance(thing, MethodType):
            left.append((place, thing.__self__))
        elif isinstance(thing, FunctionType):
            left += [(place, cell.cell_contents) for cell in thing.__closure__ or ()]
        elif type(thing).__module__.startswith(PRODUCT) and not isinstance(thing, type):
            name = type(thing).__name__
            found[f"all {name}"] += 1
            attributes = ((f"{name}.{attribute}", value) for attribute, value in _attributes(thing))
            left += [(place, value) for place, value in attributes if place not in PARTS]
    return found


def _items(thing: Any) -> Iterator[object]:
    """What a container holds."""
    if isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield key
            yield value
    else:
        yield from list(thing)


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    """The attributes of an object, in slots or not."""
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, slot):
                yield slot, getattr(thing, slot)


@dataclass(frozen=True, slots=True)
class Mark:
    """How things stand at a quiet moment. `labels`: units that a gate's metrics show; `blocks`: small objects
    that are alive in the whole process; `kinds`: those that the collector knows, by type.
    """

    at_s: float
    sizes: Counter[str]
    blocks: int
    kinds: Counter[str]


def mark(world: World, *roots: object) -> Mark:
    """Take stock."""
    found = sizes(*roots)
    found["tasks"] = len(asyncio.all_tasks(world.loop))
    found["timers"] = len(world.loop.timers)
    found["connections"] = sum(not is_outside for is_outside in world.net.transports.values())
    gc.collect()
    blocks = sys.getallocatedblocks()
    kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Mark(world.loop.time(), found, blocks, kinds)


def grown(before: Mark, after: Mark) -> list[str]:
    """What there is more of than chance explains, in a sentence each."""
    more = [
        f"{place}: {before.sizes[place]} have become {size}"
        for place, size in after.sizes.items()
        if size > before.sizes[place] * MORE + FEW
    ]
    if after.blocks - before.blocks > BLOCKS:
        kinds = ", ".join(f"{n} {kind}" for kind, n in (after.kinds - before.kinds).most_common(5))
        more.append(f"{after.blocks - before.blocks} more objects are alive, of these: {kinds}")
    return more


def table(marks: list[Mark], most: int = 40) -> Iterator[str]:
    """The marks side by side: what differs between any two of them first, then what there is most of."""
    yield f"{'':44}" + "".join(f"{(each.at_s - marks[0].at_s) / 3600.0:>9.2f} h" for each in marks)
    yield f"{'objects alive':44}" + "".join(f"{each.blocks:>11}" for each in marks)
    places = {place for each in marks for place in each.sizes}

    def key(place: str) -> tuple[int, str]:
        counts = [each.sizes[place] for each in marks]
        return min(counts) - max(counts), place

    for place in sorted(places, key=key)[:most]:
        yield f"{place:44}" + "".join(f"{each.sizes[place]:>11}" for each in marks)
