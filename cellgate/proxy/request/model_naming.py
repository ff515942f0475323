"""Gives a request the model that serves the name its client wrote, and another one when no unit can.

The rest of the gate knows only the model that serves: it stands in the ask and in the body that units get.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.process.tallies import FALLBACKS, NAMED, tally
from cellgate.proxy.request.form_model import find_model, with_form_model
from cellgate.proxy.request.model_choice import ModelChoice, Naming
from cellgate.proxy.request.model_splice import with_model
from cellgate.proxy.request.routes import IN_FORM, IN_PATH, with_path_model
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.nouns import Ask
from cellgate.router.retry import Attempts

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.request.routes import ModelPlace
    from cellgate.proxy.wire.request import Request

_NOT_FOUND = Failure(
    FailureKind.BODY_TOO_LARGE,
    "the gate cannot write the model into this body; put `model` first, before the messages",
    param="model",
)
_NO_UNIT_LEFT = frozenset(
    {
        FailureKind.NO_UNIT,
        FailureKind.UNKNOWN_MODEL,
        FailureKind.MODEL_GONE,
        FailureKind.EVICTED,
        FailureKind.REFUSED,
        FailureKind.UNREACHABLE,
        FailureKind.CONNECT_TIMEOUT,
    }
)
"""What says that no unit can serve a model now. That all are busy is not among it: then requests wait."""


def name_model(exchange: Exchange, choice: ModelChoice, ask: Ask) -> Ask | Failure:
    """The ask with the model that serves it."""
    asked = ask.model
    if asked is None:
        return ask
    naming = Naming(choice, asked, ask.session or exchange.response.request_id.decode("latin-1"))
    exchange.naming = naming
    served = naming.served(asked)
    if asked in choice.names:
        tally(NAMED, asked, served)
    return _served_by(exchange, naming, ask, served)


def fall_back(exchange: Exchange, failure: Failure) -> bool:
    """Whether another model is tried for a request that no unit could serve: its ask says which."""
    # A request without a model has no names.
    naming, selection = getattr(exchange, "naming", None), exchange.selection
    if naming is None or failure.kind not in _NO_UNIT_LEFT:
        return False
    if exchange.response.begun or exchange.request.is_placed:
        return False
    before, model = naming.name, naming.next()
    admission = exchange.admission
    while model is not None and admission is not None and not admission.may_fall_back(naming.name):
        model = naming.next()
    if model is None:
        return False
    tally(FALLBACKS, before, naming.name)
    ask = _served_by(exchange, naming, selection.ask, model)
    if isinstance(ask, Failure):
        return False
    selection.ask, selection.failure, selection.history = ask, None, Attempts()
    exchange.response.model = model
    return True


def _served_by(exchange: Exchange, naming: Naming, ask: Ask, model: str) -> Ask | Failure:
    """Write the model into the body and the ask, and into a line of the response."""
    response, request, before = exchange.response, exchange.request, ask.model or ""
    if model != before and not _write(request, exchange.route.model, before, model):
        return _NOT_FOUND
    response.lines = response.lines.replace(naming.told, b"")
    naming.told = naming.line(model) if model != naming.asked else b""
    response.lines += naming.told
    return ask._replace(model=model)


def _write(request: Request, place: ModelPlace, before: str, model: str) -> bool:
    """Write the model where the request names it. False: it was not found there."""
    body: bytes | None
    if place is IN_PATH:
        request.target = with_path_model(request.target, model)
        return True
    if place is IN_FORM and find_model(request.lines, request.body) is not None:
        body = with_form_model(request.lines, request.body, model)
    else:
        body = with_model(request.body, before, model)
    if body is None:
        return False
    request.body = body
    return True
