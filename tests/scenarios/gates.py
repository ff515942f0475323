"""Two gates side by side before the same engines, with a Redis between them; each may be replaced.

Clients come through an ingress that goes by the gates' readiness, as any load balancer does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from cellgate.extras.redis.link import RedisLink
from cellgate.extras.redis.reports import HEARTBEAT_S
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.shared_bans import SharedBans
from cellgate.extras.redis.sharing import Sharing
from cellgate.extras.redis_client.redis_names import Names
from cellgate.probes.canary import YIELD_S
from cellgate.proxy.config.settings import Address
from cellgate.proxy.ingress.reports import readiness
from cellgate.router.board import Flip
from tests.scenarios.harness import BACK_S, GATE_PORT, Stage
from tests.scenarios.observed import ObservedGate
from tests.sim.client import ORDINARY, Client, Manner
from tests.sim.conversation import Reply
from tests.sim.redis import SimRedis

HOSTS = ("gate", "gate-2")
DELAY_S = 0.5
DRAIN_S = 300.0
ROLLED_S = 60.0
LOOKED_AT_S = 2.0


class GatesStage(Stage):
    """`alive` are the gates that run now, by host; `redis` is what they share, `links` their lines to it."""

    heartbeat_s = HEARTBEAT_S

    def __init__(self, seed: int, units: int, **options: Any) -> None:
        super().__init__(seed, units, **options)
        # Of an idle unit, the gate whose turn it is not waits for the canary of the other.
        self.promise_s += YIELD_S
        for host in HOSTS[1:]:
            self.world.net.add_host(host)
        self.redis = SimRedis(self.world)
        self.alive = {HOSTS[0]: self.gate}
        self.client = _Ingress(self)
        self._seed = seed
        self._opened = count(1)
        self.links: dict[ObservedGate, RedisLink] = {}

    def drain(self, unit: str, *, drained: bool) -> None:
        """As an operator does, at all gates."""
        for gate in self.alive.values():
            gate.set_drain(unit, drained)

    def in_flight(self, unit: str) -> int:
        """At all gates."""
        return sum(gate.board.units[unit].in_flight for gate in self.alive.values())

    async def replace_gate(self, host: str) -> None:
        """One gate stops in good order, then another one starts in its place, and is ready."""
        gate = self.alive[host]
        await self._close(gate)
        self.gates.append(await self._open(host))
        await self.until(lambda: self.is_ready(host), BACK_S)

    def alive_client(self, number: int) -> Client:
        """Clients of one gate alone."""
        return Client(self.world, f"{list(self.alive)[number]}:{GATE_PORT}")

    def is_ready(self, host: str) -> bool:
        """What a gate says of itself."""
        gate = self.alive[host]
        return readiness(gate.board, gate.is_stopping())[0]

    def all_up(self) -> bool:
        return all(state.case.verdict.value == "up" for gate in self.alive.values() for state in gate.board)

    # -- inside --------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._start(self.gate, HOSTS[0])
        self.gates += [await self._open(host) for host in HOSTS[1:]]

    async def _end(self) -> None:
        for gate in list(self.alive.values()):
            await self._close(gate)

    async def _open(self, host: str) -> ObservedGate:
        settings = replace(self.gate.settings, listen=Address(host, GATE_PORT))
        gate = self._make_gate(settings, self._seed + 10 + next(self._opened))
        self.alive[host] = gate
        await self._start(gate, host)
        return gate

    async def _start(self, gate: ObservedGate, host: str) -> None:
        with self.world.at(host):
            await gate.start()
            self.links[gate] = self._share(gate, f"{host}-{next(self._opened)}")

    async def _close(self, gate: ObservedGate) -> None:
        await gate.stop(delay_s=DELAY_S, drain_s=DRAIN_S)
        await self.links.pop(gate).close()

    def _share(self, gate: ObservedGate, name: str) -> RedisLink:
        """What extras/redis/link.py does, with another Redis and a known chance."""
        roster = Roster(name, self.heartbeat_s)
        sharing = Sharing(
            gate.board,
            name,
            roster,
            gate.now,
            gate.prober.observe,
            gate.metrics.recent_ttft_s,
            is_stopping=gate.is_stopping,
        )
        bans = SharedBans(gate.containment, name, gate.now)
        link = RedisLink(
            self.redis.client,
            name,
            sharing.changes,
            roster,
            now=gate.now,
            rng=Random(self._seed),
            on_flip=sharing.received,
            tell=lambda _line: None,
            names=Names(),
            heartbeat_s=self.heartbeat_s,
            bans=bans,
        )

        def flipped(flip: Flip) -> None:
            if (view := sharing.report(flip)) is not None:
                link.flipped(view)

        def tick(now: float) -> None:
            gate.board.remote_load = sharing.tick(now)

        gate.containment.on_ban = lambda ban, lifted: link.banned(bans.row(ban, lifted=lifted))
        gate.plane.on_flip.append(flipped)
        gate.plane.ticker.looks.append(tick)
        link.start()
        return link


class _Ingress(Client):
    """Each request goes to a gate that is ready; if none is, to one that does not stop."""

    def __init__(self, stage: GatesStage) -> None:
        super().__init__(stage.world, f"{HOSTS[0]}:{GATE_PORT}")
        self._stage = stage
        self._ways = {host: Client(stage.world, f"{host}:{GATE_PORT}") for host in HOSTS}

    async def exchange(
        self, requests: list[bytes], manner: Manner = ORDINARY, methods: list[str] | None = None
    ) -> list[Reply]:
        stage = self._stage
        standing = [host for host in HOSTS if not stage.alive[host].is_stopping()]
        ready = [host for host in standing if stage.is_ready(host)]
        return await self._ways[stage.rng.choice(ready or standing)].exchange(requests, manner, methods)


async def roll_gates(stage: GatesStage) -> None:
    """One gate after the other."""
    for host in HOSTS:
        await stage.replace_gate(host)
        await asyncio.sleep(1.0)


async def roll_units(stage: GatesStage, names: Iterable[str]) -> None:
    """One unit after the other: drained, restarted once it is empty, and back in use."""
    for name in names:
        stage.drain(name, drained=True)
        await stage.until(lambda name=name: not stage.in_flight(name), ROLLED_S)  # type: ignore[misc]
        stage.engines[name].restart()
        stage.drain(name, drained=False)
        await asyncio.sleep(LOOKED_AT_S)
        await stage.until(stage.all_up, BACK_S)


async def lose_redis(stage: GatesStage, rng: Random, most_s: float = 10.0) -> None:
    """It is away or hangs, and comes back with or without what it knew."""
    redis = stage.redis
    redis.is_away, redis.hangs = (True, False) if rng.random() < 0.5 else (False, True)
    await asyncio.sleep(rng.uniform(2.0, most_s))
    if rng.random() < 0.5:
        redis.forget()
    redis.is_away = redis.hangs = False
