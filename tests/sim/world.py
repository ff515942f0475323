"""A simulated world: one loop, one network, one source of randomness; and what must be true when it ends.

world = World(seed)
run(world, scenario(world))
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, TypeVar

from tests.sim.loop import Deadlock, SimLoop
from tests.sim.network import HERE, Network
from tests.sim.rooms import Rooms
from tests.sim.trace import Trace
from tests.sim.transfer import Transfers

T = TypeVar("T")

GRACE_S = 1.0
_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


class World:
    """`limit_s` bounds the virtual time a scenario may take; the same seed gives the same trace."""

    def __init__(self, seed: int, limit_s: float = 7200.0) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.loop = SimLoop(limit_s)
        self.trace = Trace(self.loop.time)
        self.net = Network(self.loop, Random(seed + 1), self.trace)
        self.dead: set[str] = set()
        self.transfers = Transfers(self.loop, self.dead.__contains__)
        self.rooms = Rooms(self)

    @contextmanager
    def at(self, host: str) -> Iterator[None]:
        """Let the code inside, and the tasks it starts, be on this host: its connections come from there."""
        token = HERE.set(self.net.canonical(host))
        try:
            yield
        finally:
            HERE.reset(token)

    def leaks(self) -> list[str]:
        """What the program has left behind: tasks, transports, listeners and timers."""
        loop, net = self.loop, self.net
        left = [f"task {task!r}" for task in asyncio.all_tasks(loop)]
        left += [
            f"transport {transport!r}" for transport, is_outside in net.transports.items() if not is_outside
        ]
        left += [
            f"listener {listener.address}" for listener in net.listeners.values() if not listener.is_outside
        ]
        left += [f"timer {timer!r}" for timer in loop.timers]
        return sorted(left)

    def assert_quiet(self) -> None:
        """Nothing of the program outlives the scenario."""
        leaks = self.leaks()
        assert not leaks, f"seed {self.seed}: the program left {len(leaks)} things behind:\n  " + "\n  ".join(
            leaks
        )


def run(world: World, main: Coroutine[Any, Any, T]) -> T:
    """Run a scenario to its end, then check that all went well and that nothing is left.

    Raises what `main` raised, `Deadlock`, an ExceptionGroup of what went wrong in callbacks and tasks, or
    AssertionError for a leak. Closes the loop: a world is run once.
    """
    loop = world.loop
    try:
        result = loop.run_until_complete(main)
        loop.run_until_complete(asyncio.sleep(GRACE_S))
        _raise_problems(world)
        world.assert_quiet()
    except BaseException as error:
        error.add_note(f"replay with World({world.seed})")
        raise
    finally:
        _close(loop)
    return result


def _raise_problems(world: World) -> None:
    errors = []
    for problem in world.loop.problems:
        error = problem.get("exception")
        errors.append(error if isinstance(error, Exception) else RuntimeError(problem["message"]))
        errors[-1].add_note(problem["message"])
    if errors:
        raise ExceptionGroup(f"{len(errors)} unhandled exceptions in the simulated loop", errors)


def _close(loop: SimLoop) -> None:
    """Cancel what is left, so that the failure that matters is the one reported."""
    loop.forgive()
    with suppress(Deadlock):
        loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
    loop.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def played(
    make: Callable[..., Any], *args: Any, given: Sequence[str] = (), **options: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Make something for an async test, its first parameter, and have that `play` the test. Parameters of the
    test that are `given` go to the maker, and to the test if it has them.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        _, *own = inspect.signature(test).parameters.values()
        names = {parameter.name for parameter in own}

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            made = make(*args, **options, **{name: fixtures[name] for name in given})
            made.play(test(made, **{name: fixtures[name] for name in names}))

        more = [inspect.Parameter(name, _KEYWORD) for name in given if name not in names]
        run.__signature__ = inspect.Signature(own + more)  # type: ignore[attr-defined]
        return run

    return decorate
