"""The simulated loop: time that costs nothing, and errors instead of waiting for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.sim.loop import START_S, Deadlock
from tests.sim.world import World, run


@pytest.mark.alone
def test_an_hour_of_one_second_timers_takes_no_time_and_ends_on_the_second() -> None:
    world = World(1)

    async def main() -> None:
        for _ in range(3600):
            await asyncio.sleep(1.0)

    began = time.process_time()
    run(world, main())
    assert world.loop.time() == START_S + 3600 + 1  # and the moment of grace
    assert time.process_time() - began < 5.0


def test_timers_and_outside_events_happen_in_the_order_of_their_time() -> None:
    world = World(1)
    seen: list[tuple[str, float]] = []

    def note(what: str) -> None:
        seen.append((what, round(world.loop.time() - START_S, 6)))

    async def main() -> None:
        world.loop.call_later(0.2, note, "timer")
        world.loop.outside(0.1, note, "early")
        world.loop.outside(0.3, note, "late")
        world.loop.outside(0.25, note, "cancelled").cancel()
        await asyncio.sleep(1.0)

    run(world, main())
    assert seen == [("early", 0.1), ("timer", 0.2), ("late", 0.3)]


def test_waiting_for_what_cannot_happen_is_a_deadlock_that_names_the_task() -> None:
    async def hopeless() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="hopeless") as deadlock:
        run(World(77), hopeless())
    assert deadlock.value.__notes__ == ["replay with World(77)"]


def test_a_scenario_longer_than_its_limit_fails() -> None:
    with pytest.raises(Deadlock, match="time limit passed at 1060"):
        run(World(1, limit_s=60.0), asyncio.sleep(61.0))


def test_callbacks_that_call_each_other_for_ever_are_noticed() -> None:
    world = World(1)

    def again() -> None:
        world.loop.call_soon(again)

    async def main() -> None:
        again()
        await asyncio.sleep(1.0)

    with pytest.raises(Deadlock, match="time stands still"):
        run(world, main())


def test_a_blocking_callback_delays_everything_else() -> None:
    world = World(1)

    async def main() -> float:
        world.loop.call_later(0.1, world.loop.block, 2.0)
        await asyncio.sleep(0.5)
        return world.loop.time() - START_S

    assert run(world, main()) == pytest.approx(2.1)


def test_the_executor_runs_the_function_inline_a_little_later() -> None:
    world = World(1)

    def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        assert await world.loop.run_in_executor(None, sum, [1, 2, 3]) == 6
        assert world.loop.time() > START_S
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(fail)

    run(world, main())


def test_an_exception_in_a_callback_fails_the_scenario() -> None:
    world = World(1)

    async def main() -> None:
        world.loop.call_soon(lambda: 1 / 0)

    with pytest.raises(ExceptionGroup, match="unhandled") as group:
        run(world, main())
    assert isinstance(group.value.exceptions[0], ZeroDivisionError)


def test_a_task_that_fails_unheard_fails_the_scenario_even_while_somebody_holds_it() -> None:
    world = World(1)

    async def fail() -> None:
        raise KeyError("lost")

    async def main() -> asyncio.Task[None]:
        return asyncio.ensure_future(fail())

    with pytest.raises(ExceptionGroup) as group:
        run(world, main())
    assert isinstance(group.value.exceptions[0], KeyError)


def test_a_task_whose_failure_somebody_took_is_no_problem() -> None:
    async def fail() -> None:
        raise KeyError("heard")

    async def main() -> None:
        assert isinstance((await asyncio.gather(fail(), return_exceptions=True))[0], KeyError)

    run(World(1), main())


@pytest.mark.parametrize("kind", ["task", "timer", "listener", "transport"])
def test_what_the_program_leaves_behind_is_a_leak(kind: str) -> None:
    world = World(1)
    kept: list[object] = []

    async def main() -> None:
        loop = world.loop
        if kind == "task":
            kept.append(loop.create_task(asyncio.sleep(100.0)))
        elif kind == "timer":
            loop.call_later(100.0, print)
        else:
            server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
            await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
            if kind == "transport":
                server.close()

    with pytest.raises(AssertionError, match=kind):
        run(world, main())


def test_an_allowance_of_timers_is_no_leak() -> None:
    world = World(1)

    async def main() -> None:
        world.loop.call_later(100.0, print)

    run(world, main(), timers=1)
