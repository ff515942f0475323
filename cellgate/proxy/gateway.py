"""The data plane of one process: its clients, their requests, and the connections to units.

It decides nothing about units: the dispatcher chooses them, and it only reads the Board.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from cellgate.extras import part_of
from cellgate.proxy.admission.keys import KeyChecker
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import Peers, Settings, payer_at
from cellgate.proxy.http.body_memory import BodyMemory
from cellgate.proxy.http.client import ClientExchange, ResponseClient
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import HIDDEN_FIELDS, KEY_FIELDS
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.server import ClientConnection, first_to_close, refusal_unread
from cellgate.proxy.http.slow_readers import Backlogs
from cellgate.proxy.http.turned_away import TurnedAway
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.http.unit import MakeTls, UnitPools
from cellgate.proxy.ingress.reports import FORMAT_FIELD, LoadLines, response_line
from cellgate.proxy.observe.access_log import AccessLog, Finished
from cellgate.proxy.observe.defects import report_defect
from cellgate.proxy.process.listeners import BACKLOG, Descriptors, Entrance, allowed, own_url
from cellgate.proxy.process.memory import SmallBlocks
from cellgate.proxy.process.signals import Ticker
from cellgate.proxy.request.beginnings import Beginnings
from cellgate.proxy.request.cors import FIELDS as CORS_FIELDS
from cellgate.proxy.request.cors import cors_rules
from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.large_bodies import LargeReads, ReadBody, WhyNot
from cellgate.proxy.request.models import LocalEndpoints, choice_of
from cellgate.proxy.request.ports import Dispatcher, GateFault, Observer, Reports
from cellgate.proxy.request.routes import RoutingHeaders
from cellgate.proxy.request.services import Admission, KeyedRequest, Payer
from cellgate.proxy.request.table import EXCHANGE_TABLE
from cellgate.proxy.request.unclaimed_blocks import UnclaimedBlocks
from cellgate.router.board import Board
from cellgate.router.nouns import Ask
from cellgate.router.opinions import Opinions
from cellgate.router.shares import ADDRESS

FULL_S = 1.0
"""A gate that has accepted no client for this long, for lack of descriptors, is not ready."""
_NO_ROOM = Failure(
    FailureKind.NO_RESOURCES,
    "the gate has no file descriptor left for one more client; retry, or raise its limit of open files",
)
PAYERS_KEPT = 4096
CLIENTS_PER_TURN = 256
"""So many clients have their clocks checked in one turn of the loop: it takes some 0.3 ms."""
GATEWAY_LINGER_S = 0.5
"""How long a stopping gate keeps idle connections: a request may be in transit."""

Observe = Callable[[ResponseClient, Request, float], tuple[Observer, ...]]
"""The observers of a request that a client has sent, at a time."""


class Gateway:
    """The gateway of one process, on one loop.

    `board` is that of the control plane, or a worker's replica; `load_lines` are header lines that report the
    gate's load to the ingress; `read` parses large bodies off the loop. Before clients are accepted,
    `entrance` may be replaced, and `observe` set.
    """

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        ticker: Ticker,
        *,
        board: Board,
        dispatcher: Dispatcher,
        reports: Reports,
        unit_pools: UnitPools,
        load_lines: LoadLines,
        access_log: AccessLog,
        read: ReadBody,
    ) -> None:
        self.settings, self.limits = settings, settings.limits
        self.board, self.dispatcher, self.reports = board, dispatcher, reports
        self.clients: dict[ClientConnection, None] = {}
        self.memory = BodyMemory(_share_of_bodies(settings), settings.limits.body_bytes)
        self.beginnings = known = Beginnings()
        self.backlogs, self.large_reads = Backlogs(), LargeReads(loop, read, self.memory, known)
        self.models = choice_of(settings.models, settings.fallback)
        self.local_endpoints = LocalEndpoints(board, self.models)
        self.pool = unit_pools.pool
        """The connections to a unit."""
        self.unclaimed, self.opinions = UnclaimedBlocks(board, self.pool, reports, loop.time), Opinions()
        self.routing_headers, self.cors = RoutingHeaders(settings.headers), cors_rules(settings.cors)
        self.key_check: KeyChecker | None = None
        self.identify: Callable[[KeyedRequest], Admission | Failure] | None = None
        self.routing_fields = self._fields()
        self.peers = Peers(settings.trusted)
        self.payer: Payer = lru_cache(PAYERS_KEPT)(partial(_payer, self.peers))
        self.shows_all, self._own_url = settings.internal_headers == "all", ""
        self.observe: Observe | None = None
        self._guardrail = guard = _guardrail(settings, loop, unit_pools.tls)
        self.screen_request: Callable[[Any, Ask], bool] | None = (
            None if guard is None else guard.screen_request
        )
        self.screen_answer: Callable[[Any], None] | None = None if guard is None else guard.screen_answer
        self.entrance, self.now = Entrance(loop, self.connection), loop.time
        self.read_scheduler = ReadScheduler(loop.call_soon, LIMITS.request_bytes_per_turn)
        self.start_scheduler = ReadScheduler(loop.call_soon, LIMITS.request_bytes_per_turn)
        self._loop, self.rng, self._unit_pools = loop, rng, unit_pools
        self._load_lines, self._access_log = load_lines, access_log
        self.is_leaving = self._stopping = False
        """True once responses close their connections: the gate stops, or a successor accepts clients."""
        self._unticked: list[ClientConnection] = []
        self._sessions: set[ClientExchange] = set()
        self._stop_line, self._empty = response_line(stopping=False), asyncio.Event()
        ticker.looks += self._looks()

    def _looks(self) -> list[Callable[[float], object]]:
        """What is done with each tick."""
        return [
            SmallBlocks(lambda: len(self.clients)).tick,
            self._tick_clients,
            self.memory.tick,
            self._shed,
            self._tick_pools,
            self.unclaimed.tick,
            self._end_if_empty,
            self._flush_log,
        ]

    # -- life ----------------------------------------------------------------------------------------------

    def take_settings(self, settings: Settings) -> None:
        """The configuration was read again: requests that come from now on go by it."""
        self.settings = settings
        self.models = choice_of(settings.models, settings.fallback)
        self.local_endpoints = LocalEndpoints(self.board, self.models)
        self.cors = cors_rules(settings.cors)
        self.routing_fields = self._fields()

    def _fields(self) -> frozenset[bytes]:
        """The header fields of requests that are read for each of them."""
        fields = self.routing_headers.names | {FORMAT_FIELD}
        if self.cors is not None:
            fields |= CORS_FIELDS
        return fields if self.key_check is None else fields | KEY_FIELDS | HIDDEN_FIELDS

    def ask_for_keys(self, key_check: KeyChecker) -> None:
        """Ask all clients that come from now on for keys."""
        self.key_check, self.identify = key_check, key_check.identify
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
        await self.entrance.open(self.settings.listen, listeners, tls, BACKLOG)

    @property
    def port(self) -> int:
        """The port listened on; 0: none."""
        return self.entrance.port

    def own_url(self) -> str:
        """Where other gates reach this one; empty: that is not known."""
        if not self._own_url and (port := self.settings.listen.port or self.port):
            self._own_url = own_url(self.settings, port)
        return self._own_url

    def announce_stop(self) -> None:
        """The gate stops: responses close their connections from now on."""
        self._stopping = self.is_leaving = True
        self._stop_line = response_line(stopping=True)

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
        self.is_leaving = True
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
        self.unclaimed.close()
        if self._guardrail is not None:
            self._guardrail.close()
        # One turn for aborted connections to close.
        await asyncio.sleep(0)
        self._access_log.close()

    # -- for connections -----------------------------------------------------------------------------------

    def shows_internals(self, peer: str) -> bool:
        """Whether the answers to this peer tell which unit it was, and how busy the gate is."""
        return self.shows_all or self.peers.trusts(peer)

    def connection(self) -> ClientConnection:
        """For a client that was accepted."""
        return ClientConnection(self)

    def exchange(self, client: ResponseClient, request: Request) -> ClientExchange:
        if request.upgrades and isinstance(client, ClientConnection):
            # Imported late: most gates have none.
            session: ClientExchange = part_of("realtime", "session").RealtimeSession(
                self, client, request, self._sessions
            )
            return session
        if self.observe is None:
            return Exchange(EXCHANGE_TABLE, self, client, request)
        return Exchange(EXCHANGE_TABLE, self, client, request, self.observe(client, request, self.now()))

    def own_lines(self, request: Request) -> bytes:
        """Without these, a page of another site cannot read why it was refused."""
        return b"" if self.cors is None else self.cors.lines(request)

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
        self.finished(
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

    def defect(self, what: str, error: Exception) -> None:
        """Log a defect of the gate, and count it."""
        report_defect(self._loop, what, error)

    # -- for requests: see request/services.py -------------------------------------------------------------

    def new_id(self) -> bytes:
        """An id for a request that came without one."""
        return b"%032x" % self.rng.getrandbits(128)

    def read_large(
        self, request: Request, payer: str, why_not: WhyNot, route: str, tell: Callable[[Ask | Failure], None]
    ) -> Callable[[], None]:
        """Parse a large body off the loop, then call `tell`, in any case. Returns what stops it."""
        return self.large_reads.start(request, payer, why_not, route, tell)

    def report_lines(self, request: Request, *, to_trusted: bool) -> bytes:
        """Header lines of each response that report to the ingress: the load of the gate, and its stop."""
        if not to_trusted:
            return self._stop_line
        line = self._load_lines.usual
        for name, value in request.routing:
            if name == FORMAT_FIELD:
                line = self._load_lines.line(value)
        return line + self._stop_line

    def is_stopping(self) -> bool:
        """True once the gate has begun to stop; health checks report it."""
        return self._stopping

    def finished(self, record: Finished) -> None:
        self.reports.finished(record)
        self._access_log.write(record)

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted, through no fault of a unit."""
        self.reports.send(GateFault(reason))

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
        too_many = len(self.clients) - self.board.in_flight - LIMITS.idle_connections
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
        if self.is_leaving and not self.clients:
            self._empty.set()

    def _flush_log(self, _now: float) -> None:
        self._access_log.flush()


def _guardrail(settings: Settings, loop: asyncio.AbstractEventLoop, tls: MakeTls | None) -> Any:
    """That of the extra, if one is configured."""
    if settings.guardrail is None:
        return None
    return part_of("guardrail", "guard").Guardrail(settings.guardrail, loop, tls)


def _payer(peers: Peers, peer: str, forwarded_for: bytes) -> str:
    return ADDRESS + payer_at(peer, forwarded_for.decode("latin-1"), peers)


def _share_of_bodies(settings: Settings) -> int:
    """The memory for bodies in bytes: that of the gate, or a worker's part, which is enough for one body."""
    whole, workers = settings.limits.bodies_bytes, settings.workers
    return whole if workers == 1 else max(whole // workers, settings.limits.body_bytes)
