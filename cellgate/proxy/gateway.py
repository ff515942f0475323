"""The data plane of one process: its clients, their requests, and the connections to units.

It decides nothing about units: the dispatcher chooses them, and it only reads the Board.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cellgate.extras import part_of
from cellgate.proxy.admission.keys import KeyChecker
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.http.client import ClientExchange, ResponseClient
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import HIDDEN_FIELDS, KEY_FIELDS
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.server import ClientConnection, first_to_close, refusal_unread
from cellgate.proxy.http.slow_readers import Backlogs
from cellgate.proxy.http.turned_away import TurnedAway
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.http.unit import MakeTls, UnitPools
from cellgate.proxy.ingress.reports import FORMAT_FIELD
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.process.listeners import BACKLOG, Descriptors, Entrance, allowed
from cellgate.proxy.process.memory import SmallBlocks
from cellgate.proxy.process.signals import Ticker
from cellgate.proxy.request.cors import FIELDS as CORS_FIELDS
from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.ports import GateFault, Observer
from cellgate.proxy.request.services import Services
from cellgate.proxy.request.table import EXCHANGE_TABLE

FULL_S = 1.0
"""A gate that has accepted no client for this long, for lack of descriptors, is not ready."""
_NO_ROOM = Failure(
    FailureKind.NO_RESOURCES,
    "the gate has no file descriptor left for one more client; retry, or raise its limit of open files",
)
CLIENTS_PER_TURN = 256
"""So many clients have their clocks checked in one turn of the loop: it takes some 0.3 ms."""
GATEWAY_LINGER_S = 0.5
"""How long a stopping gate keeps idle connections: a request may be in transit."""

Observe = Callable[[ResponseClient, Request, float], tuple[Observer, ...]]
"""The observers of a request that a client has sent, at a time."""


class Gateway:
    """The gateway of one process, on one loop. Before clients are accepted, `entrance` may be replaced, and
    `observe` set.
    """

    def __init__(
        self, services: Services, loop: asyncio.AbstractEventLoop, ticker: Ticker, unit_pools: UnitPools
    ) -> None:
        self.services, settings = services, services.settings
        # What a connection needs as well.
        self.memory, self.payer = services.memory, services.payer
        self.start_scheduler, self.shows_internals = services.start_scheduler, services.shows_internals
        self.now, self.defect = services.now, services.defect
        self.limits = settings.limits
        self.clients: dict[ClientConnection, None] = {}
        self.backlogs = Backlogs()
        self.read_scheduler = ReadScheduler(loop.call_soon, LIMITS.request_bytes_per_turn)
        self.key_check: KeyChecker | None = None
        self.routing_fields = self._fields()
        self.observe: Observe | None = None
        self._guardrail = guard = _guardrail(settings, loop, unit_pools.tls)
        if guard is not None:
            services.screen_request, services.screen_answer = guard.screen_request, guard.screen_answer
        self.entrance = Entrance(loop, self.connection)
        self._loop, self._unit_pools, self._access_log = loop, unit_pools, services.access_log
        self._unticked: list[ClientConnection] = []
        self._sessions: set[ClientExchange] = set()
        self._empty = asyncio.Event()
        ticker.looks += self._looks()

    def _looks(self) -> list[Callable[[float], object]]:
        """What is done with each tick."""
        return [
            SmallBlocks(lambda: len(self.clients)).tick,
            self._tick_clients,
            self.memory.tick,
            self._shed,
            self._tick_pools,
            self.services.unclaimed.tick,
            self._end_if_empty,
            self._flush_log,
        ]

    # -- life ----------------------------------------------------------------------------------------------

    def take_settings(self, settings: Settings) -> None:
        """The configuration was read again: requests that come from now on go by it."""
        self.services.take_settings(settings)
        self.routing_fields = self._fields()

    def _fields(self) -> frozenset[bytes]:
        """The header fields of requests that are read for each of them."""
        fields = self.services.routing_headers.names | {FORMAT_FIELD}
        if self.services.cors is not None:
            fields |= CORS_FIELDS
        return fields if self.key_check is None else fields | KEY_FIELDS | HIDDEN_FIELDS

    def ask_for_keys(self, key_check: KeyChecker) -> None:
        """Ask all clients that come from now on for keys."""
        self.key_check, self.services.identify = key_check, key_check.identify
        self.routing_fields = self._fields()

    async def listen(
        self, tls: ssl.SSLContext | None = None, listeners: Sequence[socket.socket] = ()
    ) -> None:
        """Accept clients: on `listeners`, where they are open already. Raises OSError."""
        if listeners:
            descriptors = Descriptors(allowed(), self.gate_fault, self._make_room, unopened=self._unopened)
            self.entrance.has_room = descriptors.has_room
            overflow = self.entrance.overflow
            overflow.places = descriptors.for_turned_away
            overflow.connection = partial(TurnedAway, self._loop, self._refuse_new)
        await self.entrance.open(self.services.settings.listen, listeners, tls, BACKLOG)
        self.services.port = self.port

    @property
    def port(self) -> int:
        """The port listened on; 0: none."""
        return self.entrance.port

    def announce_stop(self) -> None:
        """The gate stops: responses close their connections from now on."""
        self.services.announce_stop()

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        """Stop gracefully: accept for `delay_s` more, let responses end for up to `drain_s`."""
        self.announce_stop()
        await asyncio.sleep(delay_s)
        if drain_s > 0.0:
            await self.entrance.close_politely()
        for client in list(self.clients):
            client.leave_if_idle(GATEWAY_LINGER_S)
        await self._end(drain_s)

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """Another process accepts from the same queue now: let responses end for up to `drain_s`, then end.

        Idle connections stay open: the next request is answered, and its connection is then closed.
        """
        self.services.is_leaving = True
        await self._end(drain_s)

    async def _end(self, drain_s: float) -> None:
        self.entrance.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        for client in list(self.clients):
            client.cut()

    async def close(self) -> None:
        """All connections have ended."""
        self.services.unclaimed.close()
        if self._guardrail is not None:
            self._guardrail.close()
        # One turn for aborted connections to close.
        await asyncio.sleep(0)
        self._access_log.close()

    # -- for connections -----------------------------------------------------------------------------------

    def connection(self) -> ClientConnection:
        """For a client that was accepted."""
        return ClientConnection(self)

    def exchange(self, client: ResponseClient, request: Request) -> ClientExchange:
        if request.upgrades and isinstance(client, ClientConnection):
            # Imported late: most gates have none.
            session: ClientExchange = part_of("realtime", "session").RealtimeSession(
                self.services, client, request, self._sessions
            )
            return session
        if self.observe is None:
            return Exchange(EXCHANGE_TABLE, self.services, client, request)
        observers = self.observe(client, request, self.now())
        return Exchange(EXCHANGE_TABLE, self.services, client, request, observers)

    def own_lines(self, request: Request) -> bytes:
        """Without these, a page of another site cannot read why it was refused."""
        cors = self.services.cors
        return b"" if cors is None else cors.lines(request)

    def turns_away(self, request: Request) -> Failure | None:
        """Why the body of a request is not worth reading."""
        return None if self.key_check is None else self.key_check.turns_away(request)

    def body_payer(self, peer: str, request: Request) -> str:
        """Who pays for the memory of a body while it arrives: the tenant of its key, or its address."""
        tenant = "" if self.key_check is None else self.key_check.tenant_of(request)
        return tenant or self.payer(peer, request.forwarded_for)

    def _refuse_new(self, peer: str) -> bytes:
        """The answer to a client for which there are no file descriptors."""
        self.refused(peer, _NO_ROOM)
        return refusal_unread(_NO_ROOM)

    def refused(self, peer: str, failure: Failure) -> None:
        """A request that was not read was answered: it is malformed, or there is no room for it."""
        row = failure.kind.row
        self.services.finished(
            Finished(
                request_id="",
                peer=peer,
                method="",
                path="",
                route="unread",
                model="",
                status=row.status,
                code=failure.kind.value,
                unit="",
                outcome=row.outcome,
                attempts=0,
                resumed=0,
                ttft_s=None,
                duration_s=0.0,
                events=0,
                bytes_in=0,
                bytes_out=0,
            )
        )

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted, through no fault of a unit."""
        self.services.reports.send(GateFault(reason))

    # -- for the control plane: see Front ------------------------------------------------------------------

    def connections(self) -> Mapping[str, int]:
        """How many are open by side."""
        return {"client": len(self.clients), "unit": len(self._unit_pools)}

    def is_full(self) -> bool:
        """True while no client can be accepted, because file descriptors are short."""
        return self.now() - self.entrance.shut_at > FULL_S

    def seen_until(self, now: float) -> float:
        """Until when the progress of units is known: here always until now."""
        return now

    def log_dropped(self) -> int:
        """Lines that the access log has lost."""
        return self._access_log.dropped

    # -- with each tick ------------------------------------------------------------------------------------

    def _tick_clients(self, now: float) -> None:
        # Where the last tick has not reached all of them yet, it goes on.
        if not self._unticked:
            self._unticked = list(self.clients)
            self._tick_some(now)

    def _tick_some(self, now: float) -> None:
        """Check the clocks of a part of the clients; the others follow in the next turns of the loop."""
        for client in self._unticked[-CLIENTS_PER_TURN:]:
            if now < client.look_at:
                # Of thousands of streams that flow, nearly all.
                continue
            try:
                client.tick(now)
            except Exception as error:
                client.crashed("a client's clocks", error)
        del self._unticked[-CLIENTS_PER_TURN:]
        if self._unticked:
            self._loop.call_soon(self._tick_some, now)

    def _tick_pools(self, now: float) -> None:
        self._unit_pools.tick(now)
        if self._guardrail is not None:
            self._guardrail.tick(now)

    def _shed(self, _now: float) -> None:
        """Close surplus idle connections."""
        too_many = len(self.clients) - self.services.board.in_flight - LIMITS.idle_connections
        if too_many > 0:
            self._make_room(too_many)

    def _make_room(self, most: int) -> int:
        """Close up to `most` connections that may be closed (see http/server.py); returns how many."""
        going = first_to_close(self.clients, most, self.now())
        for client in going:
            client.close_idle()
            reached("idle_connections")
        return len(going)

    def _unopened(self) -> int:
        """How many clients may be about to have a connection to a unit opened, now or after waiting."""
        open_there = len(self._unit_pools)
        if len(self.clients) <= open_there:
            return 0
        asking = sum(not (client.has_asked and client.is_idle()) for client in self.clients)
        return max(0, asking - open_there)

    def _end_if_empty(self, _now: float) -> None:
        if self.services.is_leaving and not self.clients:
            self._empty.set()

    def _flush_log(self, _now: float) -> None:
        self._access_log.flush()


def _guardrail(settings: Settings, loop: asyncio.AbstractEventLoop, tls: MakeTls | None) -> Any:
    """That of the extra, if one is configured."""
    if settings.guardrail is None:
        return None
    return part_of("guardrail", "guard").Guardrail(settings.guardrail, loop, tls)
