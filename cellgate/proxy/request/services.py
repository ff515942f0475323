"""What a request needs of its gate or worker: its services."""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Callable
from functools import lru_cache, partial
from random import Random
from typing import TYPE_CHECKING, Any

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Peers, Settings, payer_at
from cellgate.proxy.http.body_memory import BodyMemory
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.http.unit import Pool
from cellgate.proxy.ingress.reports import FORMAT_FIELD, LoadLines, response_line
from cellgate.proxy.observe.access_log import AccessLog, Finished
from cellgate.proxy.observe.defects import report_defect
from cellgate.proxy.process.listeners import own_url
from cellgate.proxy.request.beginnings import Beginnings
from cellgate.proxy.request.cors import cors_rules
from cellgate.proxy.request.large_bodies import LargeReads, ReadBody
from cellgate.proxy.request.models import LocalEndpoints, choice_of
from cellgate.proxy.request.ports import Dispatcher, Observer, Reports
from cellgate.proxy.request.routes import RoutingHeaders
from cellgate.proxy.request.unclaimed_blocks import UnclaimedBlocks
from cellgate.router.board import Board
from cellgate.router.nouns import Ask
from cellgate.router.opinions import Opinions
from cellgate.router.shares import ADDRESS
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.proxy.request.ports import Charge
    from cellgate.proxy.request.routes import ModelPlace

OPEN_ROUTES = frozenset({"health", "unit_health"})
"""Routes that need no key: load balancers ask for them."""
PAYERS_KEPT = 4096

Payer = Callable[[str, bytes], str]
"""Who pays for a request without a key, as a payer's name (router/shares.py), by its peer and whom that says
it speaks for.
"""


class Services:
    """Those of one process. `board` is only read: it may be a replica. `pool` has the connections to a unit;
    `load_lines` are header lines that report the gate's load to the ingress; `read` parses large bodies off
    the loop.
    """

    def __init__(
        self,
        settings: Settings,
        loop: AbstractEventLoop,
        rng: Random,
        *,
        board: Board,
        dispatcher: Dispatcher,
        reports: Reports,
        pool: Callable[[UnitState], Pool],
        load_lines: LoadLines,
        access_log: AccessLog,
        read: ReadBody,
    ) -> None:
        self.board, self.dispatcher, self.reports, self.pool = board, dispatcher, reports, pool
        self.now, self.rng, self._loop = loop.time, rng, loop
        self.memory = BodyMemory(_share_of_bodies(settings), settings.limits.body_bytes)
        self.beginnings = known = Beginnings()
        """What is known of recent bodies."""
        self.large_reads = LargeReads(loop, read, self.memory, known)
        self.start_scheduler = ReadScheduler(loop.call_soon, LIMITS.request_bytes_per_turn)
        """What one turn of the loop may cost in which requests begin."""
        self.unclaimed, self.opinions = UnclaimedBlocks(board, pool, reports, loop.time), Opinions()
        self.routing_headers = RoutingHeaders(settings.headers)
        self.peers = Peers(settings.trusted)
        self.payer: Payer = lru_cache(PAYERS_KEPT)(partial(_payer, self.peers))
        self.shows_all = settings.internal_headers == "all"
        """Everybody may know which unit answers."""
        self.take_settings(settings)
        self.identify: Callable[[Any], Admission | Failure] | None = None
        """What the key of a request allows (a KeyedRequest, admission/keys.py), or why it does not count. The
        key is taken out of the request: its unit does not get it. None: nobody asks for keys.
        """
        self.screen_request: Callable[[Any, Ask], bool] | None = None
        """Whether the request of an exchange has to wait for the verdict of a guardrail; then its `screened`
        is called with it. None: there is no guardrail.
        """
        self.screen_answer: Callable[[Any], None] | None = None
        """The first part of the answer to an exchange is about to be sent: the guardrail holds it, if need
        be.
        """
        self.is_leaving = self.is_stopping = False
        """True once responses close their connections: the gate stops, or a successor accepts clients. Once
        the gate has begun to stop, health checks report it.
        """
        self.port = 0
        """The port listened on; 0: none yet."""
        self._own_url, self._stop_line = "", response_line(stopping=False)
        self._load_lines, self.access_log = load_lines, access_log

    def take_settings(self, settings: Settings) -> None:
        """The configuration was read, or read again: requests that come from now on go by it."""
        self.settings = settings
        self.models = choice_of(settings.models, settings.fallback)
        """The names of models that are the gate's own; None: there are none."""
        self.local_endpoints = LocalEndpoints(self.board, self.models)
        self.cors = cors_rules(settings.cors)
        """Which pages of other sites may use the gate; None: none."""

    def announce_stop(self) -> None:
        """The gate stops: responses close their connections from now on."""
        self.is_stopping = self.is_leaving = True
        self._stop_line = response_line(stopping=True)

    def shows_internals(self, peer: str) -> bool:
        """Whether the answers to this peer tell which unit it was, and how busy the gate is."""
        return self.shows_all or self.peers.trusts(peer)

    def own_url(self) -> str:
        """Where other gates reach this one; empty: that is not known."""
        if not self._own_url and (port := self.settings.listen.port or self.port):
            self._own_url = own_url(self.settings, port)
        return self._own_url

    def new_id(self) -> bytes:
        """An id for a request that came without one."""
        return b"%032x" % self.rng.getrandbits(128)

    def report_lines(self, request: Request, *, to_trusted: bool) -> bytes:
        """Header lines of each response that report to the ingress: the load of the gate, and its stop."""
        if not to_trusted:
            return self._stop_line
        line = self._load_lines.usual
        for name, value in request.routing:
            if name == FORMAT_FIELD:
                line = self._load_lines.line(value)
        return line + self._stop_line

    def finished(self, record: Finished) -> None:
        """A request is over."""
        self.reports.finished(record)
        self.access_log.write(record)

    def defect(self, what: str, error: Exception) -> None:
        """Log a defect of the gate, and count it."""
        report_defect(self._loop, what, error)


def _payer(peers: Peers, peer: str, forwarded_for: bytes) -> str:
    return ADDRESS + payer_at(peer, forwarded_for.decode("latin-1"), peers)


def _share_of_bodies(settings: Settings) -> int:
    """The memory for bodies in bytes: that of the gate, or a worker's part, which is enough for one body."""
    whole, workers = settings.limits.bodies_bytes, settings.workers
    return whole if workers == 1 else max(whole // workers, settings.limits.body_bytes)


class Admission(Observer, ABC):
    """What one request may do, by its key. It observes the request, to account for it."""

    __slots__ = ()

    @abstractmethod
    def admit(self, ask: Ask, body_priority: int, place: ModelPlace) -> Ask | Failure:
        """The ask as the key allows it, with its tenant; or why it does not. `body_priority` is what the
        body says for the engine, `place` where the request names its model.
        """

    @abstractmethod
    def charge(self, ask: Ask) -> Charge:
        """What the request is charged with: called once, before a unit is found; it is settled at its end."""

    @property
    @abstractmethod
    def payer(self) -> str:
        """Whom the work for it is charged to."""

    @abstractmethod
    def used_up(self, refusal: Failure) -> None:
        """A limit of its key has nothing left, and it was refused for that."""

    @abstractmethod
    def refusal(self) -> Failure | None:
        """Why it is refused by now, before its body is read; None: it is not."""

    @abstractmethod
    def may_fall_back(self, model: str) -> bool:
        """Whether another model may serve it."""
