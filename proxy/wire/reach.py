"""The connections to all units, and the ways their probes go: made when first needed, gone with the unit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from cellgate.probes.base import Fetch, Net
from cellgate.probes.gate_word import VIA_GATE, name_there
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.wire.fetch import UnitFetch
from cellgate.proxy.wire.heads import UNIT_FIELD
from cellgate.proxy.wire.net import UnitNet
from cellgate.proxy.wire.pool import MakeTls, Pool
from cellgate.proxy.wire.rota import Rota
from cellgate.router.unit_state import Desk


class Ways(NamedTuple):
    """How the probes of a unit reach it: its own address, and any other."""

    fetch: Fetch
    net: Net


class Reach:
    """Pools by desk.

    `on_broken` is told of a unit that ended a connection out of turn, `on_own_trouble` why the gate itself
    could not open one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout_s: float,
        tls: MakeTls | None,
        on_broken: Callable[[Desk], None],
        on_own_trouble: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._on_broken = on_broken
        self._on_own_trouble = on_own_trouble
        self._rota = Rota(loop.call_soon, LIMITS.reply_bytes_per_turn)
        self._pools: dict[Desk, Pool] = {}
        self._nets: dict[Desk | None, UnitNet] = {}
        """By desk; that of None is for servers of no unit."""

    def pool(self, desk: Desk) -> Pool:
        """The connections to a unit's own address."""
        pool = self._pools.get(desk)
        if pool is None:
            pool = Pool(
                desk.unit.url,
                self._loop,
                connect_timeout_s=self._connect_timeout_s,
                tls=self._tls,
                rota=self._rota,
                on_broken=lambda: self._on_broken(desk),
                on_own_trouble=self._on_own_trouble,
            )
            if desk.unit.engine == VIA_GATE:
                pool.lines += b"%b: %b\r\n" % (UNIT_FIELD, name_there(desk.unit).encode())
            self._pools[desk] = pool
        return pool

    def ways(self, desk: Desk) -> Ways:
        """The ways of a unit's probes."""

        def heard() -> None:
            desk.heard_at = self._loop.time()

        net = self._net(desk, heard)
        return Ways(UnitFetch(self.pool(desk), self._loop, heard, desk.unit.api_key), net)

    def net(self) -> Net:
        """The way to servers that are no unit's."""
        return self._net(None, lambda: None)

    def _net(self, desk: Desk | None, heard: Callable[[], None]) -> UnitNet:
        net = self._nets.get(desk)
        if net is None:
            net = UnitNet(
                self._loop,
                heard,
                connect_timeout_s=self._connect_timeout_s,
                tls=self._tls,
                rota=self._rota,
                on_own_trouble=self._on_own_trouble,
            )
            self._nets[desk] = net
        return net

    def distrust(self, desk: Desk) -> None:
        """Close what is idle: it leads to a process that is gone or cannot be trusted."""
        if desk in self._pools:
            self._pools[desk].purge()

    def leave(self, desk: Desk) -> None:
        """The unit is no longer configured: keep no connection, but let replies in flight finish."""
        if (net := self._nets.pop(desk, None)) is not None:
            net.close()
        if desk in self._pools:
            self._pools[desk].close()

    def tick(self, now: float) -> None:
        """Close what has been idle for too long, forget what nobody needs."""
        for desk, pool in list(self._pools.items()):
            pool.purge(now)
            if desk.retired and not desk.leases:
                del self._pools[desk]
        for net in self._nets.values():
            net.purge(now)

    def close(self) -> None:
        """Close all that is idle or being opened."""
        for pool in self._pools.values():
            pool.close()
        for net in self._nets.values():
            net.close()

    def __len__(self) -> int:
        """How many connections are open to the units' own addresses."""
        return sum(len(pool.connections) for pool in self._pools.values())
