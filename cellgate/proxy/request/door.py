"""The port to who asks clients for keys (doors/), as a request sees it. Where keys are off, there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.request.observer import Observer
from cellgate.proxy.wire.failure import Failure
from cellgate.router.nouns import Ask

if TYPE_CHECKING:
    from cellgate.proxy.request.dispatcher import Charge
    from cellgate.proxy.request.response import Response
    from cellgate.proxy.request.routes import ModelPlace
    from cellgate.proxy.wire.request import Request

OPEN_ROUTES = frozenset({"health", "unit_health"})
"""Routes that need no key: load balancers ask for them."""


class Visitor(Protocol):
    """A request that comes to the door: its exchange."""

    request: Request
    response: Response

    def stop(self, failure: Failure) -> None:
        """End it with this error, at any time."""


class Admission(Observer, Protocol):
    """What one request may do, by its key. It observes the request, to account for it."""

    def admit(self, ask: Ask, body_priority: int, place: ModelPlace) -> Ask | Failure:
        """The ask as the key allows it, with its tenant; or why it does not. `body_priority` is what the
        body says for the engine, `place` where the request names its model.
        """

    def charge(self, ask: Ask) -> Charge:
        """What the request is charged with. Called once, when a unit is about to be found for it; it is
        settled at its end.
        """

    @property
    def payer(self) -> str:
        """Whom the work for it is charged to."""

    def used_up(self, refusal: Failure) -> None:
        """A limit of its key has nothing left, and it was refused for that."""

    def refusal(self) -> Failure | None:
        """Why it is refused by now, before its body is read; None: it is not."""

    def may_fall_back(self, model: str) -> bool:
        """Whether another model may serve it."""


class Door(Protocol):
    """Finds the keys of requests."""

    def identify(self, visitor: Visitor) -> Admission | Failure:
        """What the key of a request allows, or why it does not count. The key is taken out of the request:
        its unit does not get it.
        """

    def turns_away(self, request: Request) -> Failure | None:
        """Why a request is refused whose head has come and whose body is still to come; None: it is not."""
