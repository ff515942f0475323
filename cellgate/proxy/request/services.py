"""What a request needs of its gate or worker: its services."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from cellgate.proxy.config.settings import Peers, Settings
from cellgate.proxy.http.body_memory import BodyMemory
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.http.unit import Pool
from cellgate.proxy.request.beginnings import Beginnings
from cellgate.proxy.request.cors import CorsRules
from cellgate.proxy.request.large_bodies import WhyNot
from cellgate.proxy.request.models import LocalEndpoints, ModelChoice
from cellgate.proxy.request.ports import Dispatcher, Observer, Reports, ResponseHost
from cellgate.proxy.request.routes import RoutingHeaders
from cellgate.router.board import Board
from cellgate.router.nouns import Ask
from cellgate.router.opinions import Opinions
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.proxy.request.ports import Charge
    from cellgate.proxy.request.response import Response
    from cellgate.proxy.request.routes import ModelPlace
from cellgate.proxy.request.unclaimed_blocks import UnclaimedBlocks

OPEN_ROUTES = frozenset({"health", "unit_health"})
"""Routes that need no key: load balancers ask for them."""


class Services(ResponseHost, Protocol):
    """The gateway, as a request sees it. `board` is read only: it may be a replica."""

    settings: Settings
    memory: BodyMemory
    board: Board
    dispatcher: Dispatcher
    reports: Reports
    peers: Peers
    payer: Payer
    routing_headers: RoutingHeaders
    local_endpoints: LocalEndpoints
    screen_request: Callable[[Any, Ask], bool] | None
    """Whether the request of an exchange has to wait for the verdict of a guardrail; then its `screened` is
    called with it. None: there is no guardrail.
    """
    screen_answer: Callable[[Any], None] | None
    """The first part of the answer to an exchange is about to be sent: the guardrail holds it, if need be."""
    cors: CorsRules | None
    """Which pages of other sites may use the gate; None: none."""
    models: ModelChoice | None
    """The names of models that are the gate's own; None: there are none."""
    unclaimed: UnclaimedBlocks
    beginnings: Beginnings
    """What is known of recent bodies."""
    start_scheduler: ReadScheduler
    """What one turn of the loop may cost in which requests begin."""
    opinions: Opinions
    """Whose fault answers are that are not good."""
    identify: Callable[[KeyedRequest], Admission | Failure] | None
    """What the key of a request allows, or why it does not count. The key is taken out of the request: its
    unit does not get it. None: nobody asks for keys.
    """
    rng: Random
    """The gate's source of randomness."""

    def own_url(self) -> str:
        """Where other gates reach this one; empty: that is not known."""

    def pool(self, state: UnitState) -> Pool:
        """The connections to a unit."""

    def read_large(
        self,
        request: Request,
        payer: str,
        why_not: WhyNot,
        route: str,
        tell: Callable[[Ask | Failure], None],
    ) -> Callable[[], None]:
        """Parse a large body of a route off the loop, in the share of `payer`, then call `tell`, in any case;
        `why_not` is asked when it is its turn. The returned function stops that.
        """

    def is_stopping(self) -> bool:
        """True once the gate has begun to stop; health checks report it."""

    def defect(self, what: str, error: Exception) -> None:
        """Log a defect of the gate, and count it."""


class KeyedRequest(Protocol):
    """A request whose key is checked: its exchange."""

    request: Request
    response: Response

    def stop(self, failure: Failure) -> None:
        """End it with this error, at any time."""


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


Payer = Callable[[str, bytes], str]
"""Who pays for a request without a key, as a payer's name (router/shares.py), by its peer and whom that says
it speaks for.
"""
