"""How probes of a unit reach addresses other than the unit's own: nodes, exporters, agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cellgate.probes.agenda import Agenda
from cellgate.probes.base import FetchError, Listener, P, Trouble
from cellgate.proxy.wire.failure import FailureKind
from cellgate.proxy.wire.fetch import UnitFetch, fetch_error, request_head
from cellgate.proxy.wire.follow import Following
from cellgate.proxy.wire.pool import LATE_S, GateStalledError, MakeTls, Pool, connect_failure
from cellgate.proxy.wire.rota import ReadScheduler


class UnitNet:
    """The `Net` of one unit (see probes/base.py).

    `heard` is called when anything answers, `on_gate_fault` with a reason when the gate could not connect.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[], None],
        *,
        connect_timeout_s: float,
        tls: MakeTls | None,
        read_scheduler: ReadScheduler | None = None,
        deadlines: Agenda | None = None,
        on_gate_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._loop = loop
        self._heard = heard
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._read_scheduler = read_scheduler
        self._deadlines = deadlines or Agenda(loop)
        self._on_gate_fault = on_gate_fault
        self._pools: dict[str, Pool] = {}
        self._fetches: dict[str, UnitFetch] = {}

    def fetch(self, url: str, *, token: str = "") -> UnitFetch:
        """A `Fetch` to the server of `url`; the same each time, because it keeps its connection."""
        fetch = self._fetches.get(url)
        if fetch is None:
            self._pools[url] = pool = self._pool(url, connect_timeout_s=self._connect_timeout_s)
            self._fetches[url] = fetch = UnitFetch(pool, self._loop, self._heard, self._deadlines, token)
        return fetch

    async def connect(
        self, address: str, factory: Callable[[], P], *, timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        """A connection to HOST:PORT. Raises FetchError."""
        # A timeout needs a task, which the run of a probe is not.
        connecting = self._loop.create_task(self._connect(address, factory, timeout_s))
        try:
            return await connecting
        except asyncio.CancelledError:
            connecting.add_done_callback(_abort)
            connecting.cancel()
            raise

    async def _connect(
        self, address: str, factory: Callable[[], P], timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        host, _, port = address.rpartition(":")
        deadline = self._loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                transport, protocol = await self._loop.create_connection(factory, host.strip("[]"), int(port))
        except Exception as error:
            late = isinstance(error, TimeoutError) and self._loop.time() > deadline + LATE_S
            failure = connect_failure(GateStalledError() if late else error, address)
            assert failure is not None
            if failure.kind is FailureKind.REFUSED:
                self._heard()
            elif failure.kind is FailureKind.NO_RESOURCES:
                self._on_gate_fault(failure.message)
            raise fetch_error(failure) from None
        self._heard()
        return transport, protocol

    @asynccontextmanager
    async def follow(
        self, address: str, target: str, listener: Listener, *, token: str = "", timeout_s: float
    ) -> AsyncIterator[None]:
        """See `cellgate.probes.base.Net`."""
        pool = self._pool(f"http://{address}", connect_timeout_s=timeout_s)
        following = Following(self._loop, pool, request_head(address, token, target), listener)
        try:
            await following.asked
            self._heard()
            yield
        except FetchError as error:
            if error.trouble is Trouble.REFUSED:
                self._heard()
            raise
        finally:
            following.close()

    def purge(self, now: float) -> None:
        """Close what has been idle for too long."""
        for pool in self._pools.values():
            pool.purge(now)

    def close(self) -> None:
        """Close idle connections; probes in flight are cancelled by their runner."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, url: str, *, connect_timeout_s: float) -> Pool:
        return Pool(
            url,
            self._loop,
            connect_timeout_s=connect_timeout_s,
            tls=self._tls,
            read_scheduler=self._read_scheduler,
            on_gate_fault=self._on_gate_fault,
        )


def _abort(connecting: asyncio.Task[tuple[asyncio.Transport, P]]) -> None:
    """Close a connection that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[0].abort()
