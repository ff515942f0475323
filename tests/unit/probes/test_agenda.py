"""One timer for many calls: when they are made, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

from cellgate.probes.runner import PER_TURN, SLOTS_PER_S, SPARE, Agenda
from tests.sim.world import World, run

EARLY_S = 0.01


def play(
    scenario: Callable[[Agenda, list[tuple[str, float]]], None], for_s: float = 10.0
) -> list[tuple[str, float]]:
    """What was called when, in seconds from the beginning; no timer may be left."""
    world, made = World(1), list[tuple[str, float]]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        agenda, began_at = Agenda(loop, EARLY_S), loop.time()
        scenario(agenda, made)
        await asyncio.sleep(for_s)
        made[:] = [(name, round(at - began_at, 6)) for name, at in made]

    run(world, main())
    return made


def noted(name: str, made: list[tuple[str, float]]) -> Callable[[], None]:
    """A call that takes down when it was made."""
    return lambda: made.append((name, asyncio.get_running_loop().time()))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_calls_are_made_in_the_order_of_their_times() -> None:
    def scenario(agenda: Agenda, made: list[tuple[str, float]]) -> None:
        for at_s in (3.0, 1.0, 2.0, 1.0):
            agenda.at(now() + at_s, noted(f"{at_s:g}", made))

    assert play(scenario) == [("1", 1.0), ("1", 1.0), ("2", 2.0), ("3", 3.0)]


def test_calls_that_are_due_soon_are_made_with_one_that_is_due_now() -> None:
    def scenario(agenda: Agenda, made: list[tuple[str, float]]) -> None:
        for name, at_s in (("first", 1.0), ("soon", 1.0 + 0.9 * EARLY_S), ("later", 1.0 + 1.1 * EARLY_S)):
            agenda.at(now() + at_s, noted(name, made))

    assert play(scenario) == [("first", 1.0), ("soon", 1.0), ("later", 1.0 + 1.1 * EARLY_S)]


def test_a_call_that_was_cancelled_is_not_made() -> None:
    def scenario(agenda: Agenda, made: list[tuple[str, float]]) -> None:
        first = agenda.at(now() + 1.0, noted("first", made))
        second = agenda.at(now() + 2.0, noted("second", made))
        agenda.at(now() + 1.0, lambda: agenda.cancel(second))
        agenda.cancel(first)
        agenda.cancel(first)

    assert play(scenario) == []


def test_calls_that_were_cancelled_are_not_kept_until_their_time() -> None:
    def scenario(agenda: Agenda, made: list[tuple[str, float]]) -> None:
        agenda.at(now() + 5.0, noted("kept", made))
        for number in range(10 * SPARE):
            agenda.cancel(agenda.at(now() + 3600.0 + number / SLOTS_PER_S, noted("cancelled", made)))
            assert sum(map(len, agenda._slots.values())) == 1
            assert len(agenda._slots) == len(agenda._order) <= SPARE + 3

    assert play(scenario) == [("kept", 5.0)]


def test_calls_may_add_others() -> None:
    def scenario(agenda: Agenda, made: list[tuple[str, float]]) -> None:
        def again() -> None:
            noted("again", made)()
            if len(made) < 3:
                agenda.at(now() + 1.0, again)

        agenda.at(now(), again)

    assert play(scenario) == [("again", 0.0), ("again", 1.0), ("again", 2.0)]


def test_the_loop_turns_between_many_calls() -> None:
    turns: list[int] = []

    def scenario(agenda: Agenda, made: list[tuple[str, float]]) -> None:
        def turn() -> None:
            turns.append(len(made))
            if len(made) < 3 * PER_TURN:
                asyncio.get_running_loop().call_soon(turn)

        for _ in range(3 * PER_TURN):
            agenda.at(now(), noted("x", made))
        turn()

    assert len(play(scenario)) == 3 * PER_TURN
    assert all(later - earlier <= PER_TURN for earlier, later in pairwise(turns))


def test_a_call_that_fails_does_not_stop_the_others() -> None:
    world, made = World(1), list[str]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        agenda = Agenda(loop, EARLY_S)
        agenda.at(now() + 1.0, lambda: made.append(str(1 // 0)))
        agenda.at(now() + 1.0, lambda: made.append("at"))
        agenda.soon(lambda _: made.append(str(1 // 0)), None)
        agenda.soon(made.append, "soon")
        await asyncio.sleep(2.0)
        assert len(world.loop.problems) == 2
        world.loop.forgive()

    run(world, main())
    assert made == ["soon", "at"]


def test_answers_are_told_in_a_later_turn_in_their_order() -> None:
    told: list[int] = []

    async def main() -> None:
        agenda = Agenda(asyncio.get_running_loop())
        for number in range(2 * PER_TURN):
            agenda.soon(told.append, number)
        assert told == []
        await asyncio.sleep(1.0)

    run(World(1), main())
    assert told == [*range(2 * PER_TURN)]
