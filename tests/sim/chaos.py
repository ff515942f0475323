"""Faults at random, decided by the world's seed; each strikes one engine or its network, for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loadtests.simunit.nonsense import KINDS
from tests.sim.behaviour import Behaviour, Break
from tests.sim.hurt import go_on, kill, stop, stop_core

if TYPE_CHECKING:
    from tests.sim.engine import Engine
    from tests.sim.world import World

BYTES_PER_S = 20_000.0

Strike = Callable[["World", "Engine"], None]


def behave(**fields: object) -> Strike:
    """A strike that changes how the engine behaves."""

    def strike(_: World, engine: Engine) -> None:
        for name, value in fields.items():
            setattr(engine.behaviour, name, value)

    return strike


STRIKES: dict[str, Strike] = {
    "die": lambda _, engine: engine.die(),
    "restart": lambda _, engine: engine.restart(),
    "kill the last node": lambda _, engine: kill(engine, len(engine.nodes) - 1),
    "stop the last node": lambda _, engine: stop(engine, len(engine.nodes) - 1),
    "stop the core": lambda _, engine: stop_core(engine),
    "agent out of reach": lambda world, engine: world.net.partition(engine.nodes[-1].agent),
    "lose a follower": behave(follower_lost=True),
    "wedge": behave(wedged=True),
    "wedge under comments": behave(wedged=True, keepalive_s=1.0),
    "spin": behave(spinning=True),
    "stop": behave(silent=True),
    "slow": behave(slow=5.0),
    "errors": behave(error_rate=0.5),
    "busy": behave(busy_status=503),
    "error in streams": behave(breaks=Break.ERROR, breaks_after_events=3),
    "truncate streams": behave(breaks=Break.TRUNCATE, breaks_after_events=3),
    "stall streams": behave(breaks=Break.STALL, breaks_after_events=3),
    "garbage": behave(garbage=True),
    "tear events": behave(torn=True),
    "partition": lambda world, engine: world.net.partition(engine.address),
    "refuse": lambda world, engine: world.net.refuse(engine.address),
    "black hole": lambda world, engine: world.net.blackhole(engine.address),
    "reset": lambda world, engine: world.net.reset(engine.address),
    "slow link": lambda world, engine: world.net.slow(engine.address, BYTES_PER_S),
    "resolver": lambda world, engine: world.net.fail_resolver(engine.name),
}


def _answer(kind: str) -> Strike:
    """Generations get nonsense of this kind: all or half of them, canaries mostly not."""

    def strike(world: World, engine: Engine) -> None:
        behaviour, rng = engine.behaviour, world.rng
        behaviour.answers, behaviour.answers_share = kind, rng.choice((1.0, 1.0, 0.5))
        behaviour.spares_canaries = rng.random() < 0.7

    return strike


NONSENSE: dict[str, Strike] = {f"answers {kind}": _answer(kind) for kind in KINDS}
"""An engine answers fast and wrong."""


class Chaos:
    """Strikes one of the engines every now and then, until `stop`; at most `at_most` are hurt at a time.

    `pause_s`, `lasting_s`: the bounds of the time between strikes, and of how long each lasts. `cured` is
    told of each engine that is well again.
    """

    def __init__(
        self,
        world: World,
        engines: list[Engine],
        at_most: int = 1,
        strikes: dict[str, Strike] = STRIKES,
        pause_s: tuple[float, float] = (1.0, 30.0),
        lasting_s: tuple[float, float] = (0.5, 30.0),
        cured: Callable[[Engine], object] = lambda _engine: None,
    ) -> None:
        self._world = world
        self._well = list(engines)
        self._hurt: list[Engine] = []
        self._at_most = at_most
        self._strikes = strikes
        self._pause_s = pause_s
        self._lasting_s = lasting_s
        self._cured = cured
        self._is_on = True
        self._rest()

    def stop(self) -> None:
        """Undo everything; from now on all engines are well."""
        self._is_on = False
        for engine in list(self._hurt):
            self._cure(engine)

    def _rest(self) -> None:
        self._world.loop.outside(self._world.rng.uniform(*self._pause_s), self._strike)

    def _strike(self) -> None:
        if not self._is_on:
            return
        rng = self._world.rng
        if self._well and len(self._hurt) < self._at_most:
            engine, name = rng.choice(self._well), rng.choice(list(self._strikes))
            self._well.remove(engine)
            self._hurt.append(engine)
            self._world.trace.note("strike", engine.name, name)
            self._strikes[name](self._world, engine)
            self._world.loop.outside(rng.uniform(*self._lasting_s), self._cure, engine)
        self._rest()

    def _cure(self, engine: Engine) -> None:
        if engine not in self._hurt:
            return
        self._hurt.remove(engine)
        self._well.append(engine)
        self._world.trace.note("cure", engine.name)
        self._world.net.heal(engine.address)
        self._world.net.heal(engine.nodes[-1].agent)
        if engine.is_dead or engine.behaviour.follower_lost:
            engine.restart()
        go_on(engine)
        engine.behaviour = Behaviour()
        self._cured(engine)
