"""KV events of simulated units, as a gate gets them: a moment later, and always complete."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cellgate.router.board import Board
from cellgate.router.known_prefixes import KnownPrefixes
from cellgate.router.kv_index import BLOCKS_MAX, Event
from cellgate.router.kv_lessons import Lessons
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
