"""The connections to all units and of their probes: created when first needed, closed with the unit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from cellgate.probes.agenda import Agenda
from cellgate.probes.base import Fetch, Net
from cellgate.probes.engines import CLOSING
from cellgate.probes.gate_word import VIA_GATE, name_there
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.trusted_peers import gates_token
from cellgate.proxy.wire.fetch import UnitFetch
from cellgate.proxy.wire.heads import TOKEN_FIELD, UNIT_FIELD
from cellgate.proxy.wire.net import UnitNet
from cellgate.proxy.wire.pool import MakeTls, Pool
from cellgate.proxy.wire.rota import ReadScheduler
from cellgate.router.nouns import Unit
from cellgate.router.unit_state import UnitState

PURGE_S = 1.0


class ProbeTransport(NamedTuple):
    """How the probes of a unit reach it: its own address, and any other."""

    fetch: Fetch
    net: Net


class UnitPools:
    """Pools by unit. `own_keys`: requests get the unit's own key, because those of clients end at the gate.
    `token` gives the admin token: units of gates are named with what is made of it.

    `on_broken` is called with a unit that closed a connection unexpectedly, `on_gate_fault` with the reason
    why the gate could not open one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout_s: float,
        tls: MakeTls | None,
        own_keys: bool,
        token: Callable[[], str | None],
        on_broken: Callable[[UnitState], None],
        on_gate_fault: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._connect_timeout_s = connect_timeout_s
        self.tls = tls
        self._own_keys = own_keys
        self._token = token
        self._on_broken = on_broken
        self._on_gate_fault = on_gate_fault
        self._read_scheduler = ReadScheduler(loop.call_soon, LIMITS.reply_bytes_per_turn)
        self._deadlines = Agenda(loop)
        self._purge_at = 0.0
        self._pools: dict[UnitState, Pool] = {}
        self._nets: dict[UnitState | None, UnitNet] = {}
        """By unit; that of None is for servers of no unit."""

    def pool(self, state: UnitState) -> Pool:
        """The connections to a unit's own address."""
        pool = self._pools.get(state)
        if pool is None:
            pool = Pool(
                state.unit.url,
                self._loop,
                connect_timeout_s=self._connect_timeout_s,
                tls=self.tls,
                read_scheduler=self._read_scheduler,
                on_broken=lambda: self._on_broken(state),
                on_gate_fault=self._on_gate_fault,
            )
            pool.lines = self._lines(pool, state.unit)
            self._pools[state] = pool
        # Which engine it is may be found out late, and change.
        pool.closes_after_stream = state.engine in CLOSING
        return pool

    def renew(self) -> None:
        """Units were configured anew: their keys may be others."""
        for state, pool in self._pools.items():
            pool.lines = self._lines(pool, state.unit)

    def _lines(self, pool: Pool, unit: Unit) -> bytes:
        """What the head of each request to the unit begins with."""
        lines = b"host: %b\r\n" % pool.authority
        if unit.engine == VIA_GATE:
            lines += b"%b: %b\r\n" % (UNIT_FIELD, name_there(unit).encode())
            if (token := self._token()) is not None:
                lines += b"%b: %b\r\n" % (TOKEN_FIELD, gates_token(token).encode())
        if self._own_keys and unit.api_key:
            lines += b"authorization: Bearer %b\r\n" % unit.api_key.encode()
        return lines

    def probe_transport(self, state: UnitState) -> ProbeTransport:
        """How the probes of a unit reach it."""

        def heard() -> None:
            state.heard_at = self._loop.time()

        fetch = UnitFetch(self.pool(state), self._loop, heard, self._deadlines, state.unit.api_key)
        return ProbeTransport(fetch, self._net(state, heard))

    def net(self) -> Net:
        """Access to servers that belong to no unit."""
        return self._net(None, lambda: None)

    def _net(self, state: UnitState | None, heard: Callable[[], None]) -> UnitNet:
        net = self._nets.get(state)
        if net is None:
            net = UnitNet(
                self._loop,
                heard,
                connect_timeout_s=self._connect_timeout_s,
                tls=self.tls,
                read_scheduler=self._read_scheduler,
                deadlines=self._deadlines,
                on_gate_fault=self._on_gate_fault,
            )
            self._nets[state] = net
        return net

    def distrust(self, state: UnitState) -> None:
        """Close idle connections: their process is gone or cannot be trusted."""
        if state in self._pools:
            self._pools[state].purge()

    def leave(self, state: UnitState) -> None:
        """The unit is no longer configured: keep no connection, but let replies in flight finish."""
        if (net := self._nets.pop(state, None)) is not None:
            net.close()
        if state in self._pools:
            self._pools[state].close()

    def tick(self, now: float) -> None:
        """Close connections that have been idle for too long, forget unused pools; once a second."""
        if now < self._purge_at:
            return
        self._purge_at = now + PURGE_S
        for state, pool in list(self._pools.items()):
            pool.purge(now)
            if state.retired and not state.leases:
                del self._pools[state]
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
