"""KV events of simulated units, as a gate gets them: a moment later, and always complete.

And what could be had at most: a gate that sees what each cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

from cellgate.router.board import Board
from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.kv_index import BLOCKS_MAX, Event, Lessons
from cellgate.router.prefix import KnownPrefixes, PrefixCache
from loadtests.gym.prompts import Blocks
from loadtests.gym.world import World

LATE_S = 0.006
"""From an engine's step to the gate: the median of vLLM's."""


def follow(world: World, board: Board) -> None:
    """A gate with this board follows the events of all units."""
    lessons = Lessons()
    for number, place in enumerate(world.fleet.places):
        costs = board.units[place.unit.name].costs
        known = KnownPrefixes(costs.prefixes, lessons)
        known.rank(0, BLOCKS_MAX)
        known.resume(0)
        costs.follow(known)
        kv = world.engines[number].kv
        kv.publish = partial(_publish, world, known, [], kv.publish)


class Seen(PrefixCache):
    """A unit's cache as it is at this moment; what it computes just now is believed as ever."""

    __slots__ = ("_number", "_world")

    def __init__(self, world: World, number: int, limit: int) -> None:
        super().__init__(limit)
        self._world = world
        self._number = number

    def match(self, blocks: Sequence[int]) -> int:
        """Rounded up to a block of bytes, of which the gate's costs are made."""
        if not isinstance(blocks, Blocks) or not blocks:
            return 0
        text, believed = blocks.text, super().match(blocks)
        tokens = self._world.engines[self._number].cached(text.names, text.tokens)
        held = min(ceil(tokens / text.tokens * text.size / BLOCK_BYTES), len(blocks))
        return believed if believed > held and self.is_awaited(blocks[believed - 1]) else held

    def lacks(self, _block: int) -> bool:
        """What other gates tell is never better."""
        return True


def see(world: World, board: Board) -> None:
    """A gate with this board sees what the caches of all units hold."""
    for number, place in enumerate(world.fleet.places):
        costs = board.units[place.unit.name].costs
        costs.cache = costs.prefixes = Seen(world, number, costs.prefixes.limit)


def _publish(
    world: World,
    known: KnownPrefixes,
    waiting: list[tuple[int, Event]],
    others: Callable[[Event], None] | None,
    event: Event,
) -> None:
    """To this gate, and to those that followed before."""
    if others is not None:
        others(event)
    if not waiting:
        world.at(world.now + LATE_S, partial(_deliver, known, waiting))
    waiting.append((known.incarnation, event))


def _deliver(known: KnownPrefixes, waiting: list[tuple[int, Event]], now: float) -> None:
    for incarnation, event in waiting:
        if incarnation == known.incarnation:
            known.apply(0, event, now)
    waiting.clear()
