"""What a request needs of its gate or worker."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.config.trusted_peers import Peers
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.request.cors import CorsRules
from cellgate.proxy.request.dispatcher import Dispatcher
from cellgate.proxy.request.door import Door
from cellgate.proxy.request.guard import Guard
from cellgate.proxy.request.large_reads import WhyNot
from cellgate.proxy.request.local_endpoints import LocalEndpoints
from cellgate.proxy.request.model_choice import ModelChoice
from cellgate.proxy.request.orphans import Orphans
from cellgate.proxy.request.reports import Reports
from cellgate.proxy.request.routing_headers import RoutingHeaders
from cellgate.proxy.wire.body_memory import BodyMemory
from cellgate.proxy.wire.failure import Failure
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.request import Request
from cellgate.router.board import Board
from cellgate.router.nouns import Ask
from cellgate.router.opinions import Opinions
from cellgate.router.unit_state import UnitState

Payer = Callable[[str, bytes], str]
"""Who pays for a request without a key, as a payer's name (router/shares.py), by its peer and whom that says
it speaks for.
"""


class Services(Protocol):
    """The gateway, as a request sees it. `board` is read only: it may be a replica."""

    settings: Settings
    memory: BodyMemory
    board: Board
    dispatcher: Dispatcher
    reports: Reports
    peers: Peers
    shows_all: bool
    payer: Payer
    routing_headers: RoutingHeaders
    local_endpoints: LocalEndpoints
    guard: Guard | None
    """The guardrail; None: there is none."""
    cors: CorsRules | None
    """Which pages of other sites may use the gate; None: none."""
    models: ModelChoice | None
    """The names of models that are the gate's own; None: there are none."""
    orphans: Orphans
    opinions: Opinions
    """Whose fault answers are that are not good."""
    door: Door | None
    """Who asks clients for keys; None: nobody does."""
    rng: Random
    """The gate's source of randomness."""
    is_leaving: bool
    """True once responses close their connections: the gate stops, or a successor accepts clients."""

    def now(self) -> float: ...

    def new_id(self) -> bytes:
        """An id for a request that came without one."""

    def pool(self, state: UnitState) -> Pool:
        """The connections to a unit."""

    def read_large(
        self, request: Request, payer: str, why_not: WhyNot, tell: Callable[[Ask | Failure], None]
    ) -> Callable[[], None]:
        """Parse a large body off the loop, in the share of `payer`, then call `tell`, in any case; `why_not`
        is asked when it is its turn. The returned function stops that.
        """

    def report_lines(self, request: Request, *, to_trusted: bool) -> bytes:
        """Header lines of each response that report to the ingress: the load of the gate, and its stop."""

    def is_stopping(self) -> bool:
        """True once the gate has begun to stop; health checks report it."""

    def finished(self, record: Finished) -> None:
        """A request is over."""

    def defect(self, what: str, error: Exception) -> None:
        """Log a defect of the gate, and count it."""
