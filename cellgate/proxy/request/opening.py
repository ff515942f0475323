"""The begin of an exchange: the request is parsed, and a unit is found for it. Actions of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.ask import SPLIT_ROUTES, is_large, plain_ask, read_ask, stored_ask
from cellgate.proxy.request.asking import grant
from cellgate.proxy.request.content_coding import Decoding, unsupported
from cellgate.proxy.request.door import OPEN_ROUTES
from cellgate.proxy.request.doubts import show_first, spared
from cellgate.proxy.request.form_model import find_model
from cellgate.proxy.request.model_naming import fall_back, name_model
from cellgate.proxy.request.placement import not_here
from cellgate.proxy.request.routes import GENERATE, IN_FORM, IN_PATH, OWN, STICKY, model_in, why_refused
from cellgate.proxy.request.states import ExchangeState
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.nouns import Ask
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.door import Door
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.request.large_reads import WhyNot

_new = tuple.__new__
_PAYER = Ask._fields.index("payer")
_BEHIND_PAYER = _PAYER + 1
# A member of an enum is a slow attribute on CPython 3.11.
_SMALL = LIMITS.json_nodes_on_loop
WAITING, OVER = ExchangeState.WAITING, ExchangeState.OVER


def start(exchange: Exchange) -> None:
    """Decide what kind of request it is, and begin."""
    route, request, gate = exchange.route, exchange.request, exchange.gate
    if gate.cors is not None:
        exchange.response.lines = gate.cors.lines(request)
        if request.method == b"OPTIONS":
            exchange.state = OVER
            exchange.response.answer(200, b"", b"allow: %b\r\n" % b", ".join(route.methods))
            return
    if gate.door is not None and route.name not in OPEN_ROUTES and not _enter(exchange, gate.door):
        return
    if (request.is_placed or request.is_explained) and route.kind is not OWN:
        refusal = exchange.selection.apply_placement(request)
        if refusal is not None:
            refuse(exchange, refusal)
            return
        exchange.response.shows_internals = True
    kind = route.kind
    if kind is not GENERATE or request.method not in route.methods:
        why = why_refused(route, request.method, pass_unlisted=gate.settings.pass_unlisted)
        if why is not None:
            allows = why.kind is FailureKind.METHOD_NOT_ALLOWED
            exchange.state = OVER
            exchange.response.refuse(why, b"allow: %b\r\n" % b", ".join(route.methods) if allows else b"")
            return
        if kind is OWN:
            exchange.state = OVER
            answer = gate.local_endpoints.answer(request.path, stopping=gate.is_stopping())
            exchange.response.answer(*answer)
            return
    _read(exchange)


def _read(exchange: Exchange) -> None:
    """Read what the request asks for, from its body or its path. Large bodies are parsed off the loop."""
    route, request = exchange.route, exchange.request
    if request.coding:
        _decode(exchange)
    elif route.json or (route.model is IN_FORM and request.body.startswith(b"{")):
        body = request.body
        # Most are smaller than any large one.
        if len(body) > _SMALL and is_large(body):
            _read_late(exchange)
        else:
            ask(exchange, read_ask(body, route.name))
    elif route.kind is STICKY:
        ask(exchange, stored_ask(request.path))
    else:
        field = find_model(request.lines, request.body) if route.model is IN_FORM else None
        model = None if field is None else field.name
        ask(exchange, plain_ask(request.target, request.body)._replace(model=model))


def _decode(exchange: Exchange) -> None:
    """Have a compressed body decoded before it is read."""
    gate, request = exchange.gate, exchange.request
    if not request.body or request.coding == b"identity":
        request.coding = b""
        _read(exchange)
        return
    if (failure := unsupported(request.coding)) is not None:
        _turn_away(exchange, failure)
        return

    def then(failure: Failure | None) -> None:
        exchange.stop_reading = None
        if failure is None:
            _read(exchange)
        else:
            _turn_away(exchange, failure)

    decoding = Decoding(exchange, gate.memory, gate.settings.limits.body_bytes, then)
    exchange.stop_reading = decoding.stop
    decoding.go_on()


def _read_late(exchange: Exchange) -> None:
    """Have a large body parsed. Who pays is its key, or where there is none, its client's address."""
    admission = exchange.admission
    payer = exchange.gate.payer(exchange.client.peer, exchange.request.forwarded_for)
    why_not: WhyNot = _nothing
    if admission is not None:
        payer, why_not = admission.payer, admission.refusal
    gate, request = exchange.gate, exchange.request
    exchange.stop_reading = gate.read_large(request, payer, why_not, exchange.asked)


def _nothing() -> None:
    """There is no reason."""


def read_late(exchange: Exchange, read: Ask | Failure) -> None:
    """A large body was read, without its route: it can be split nevertheless."""
    splits = exchange.route.name in SPLIT_ROUTES
    ask(exchange, read if isinstance(read, Failure) else read._replace(splits=splits))


def _enter(exchange: Exchange, door: Door) -> bool:
    """Whether the request shows a key that counts. If not, the response has ended."""
    found, response = door.identify(exchange), exchange.response
    if isinstance(found, Failure):
        exchange.state = OVER
        response.refuse(found)
        return False
    exchange.admission, response.observers = found, (found, *response.observers)
    return True


def ask(exchange: Exchange, read: Ask | Failure) -> None:
    """The request is parsed."""
    if isinstance(read, Failure):
        _turn_away(exchange, read)
        return
    gate, request = exchange.gate, exchange.request
    asked = gate.routing_headers.apply(read, request.routing, request.received_at)
    if exchange.admission is not None and isinstance(asked, Ask):
        asked = exchange.admission.admit(asked, read.priority, exchange.route.model)
    elif isinstance(asked, Ask):
        # As _replace does, in a quarter of the time.
        payer = gate.payer(exchange.client.peer, request.forwarded_for)
        asked = _new(Ask, (*asked[:_PAYER], payer, *asked[_BEHIND_PAYER:]))
    if exchange.route.model is IN_PATH and isinstance(asked, Ask):
        asked = asked._replace(model=gate.local_endpoints.known(model_in(request.path)))
    if gate.models is not None and isinstance(asked, Ask):
        if exchange.route.name != "model":
            asked = name_model(exchange, gate.models, asked)
        elif card := gate.local_endpoints.model(request.path):
            exchange.state = OVER
            exchange.response.answer(200, card, b"")
            return
    if isinstance(asked, Failure):
        _turn_away(exchange, asked)
        return
    exchange.selection.ask = asked
    exchange.response.model = asked.model or ""
    if gate.guard is not None and gate.guard.screen_request(exchange, asked):
        return
    if exchange.admission is not None:
        exchange.selection.charge = exchange.admission.charge(asked)
    find_unit(exchange)


def screened(exchange: Exchange, asked: Ask | Failure) -> None:
    """A guardrail has seen the request, and may have changed it."""
    if isinstance(asked, Failure):
        _turn_away(exchange, asked)
        return
    exchange.selection.ask = asked
    # Only now: a request that was denied has used nothing.
    if exchange.admission is not None:
        exchange.selection.charge = exchange.admission.charge(asked)
    find_unit(exchange)


def _turn_away(exchange: Exchange, failure: Failure) -> None:
    """No unit is looked for."""
    exchange.state = OVER
    exchange.response.refuse(failure)


def find_unit(exchange: Exchange, *, draws: bool = False, moved: bool = False) -> None:
    """Find a unit: the first, or the next one (see Selection.acquire)."""
    exchange.state = WAITING
    if exchange.gate.opinions.watching and not exchange.doubtful:
        exchange.selection.avoid = spared(exchange)
    found = exchange.selection.acquire(exchange, draws, moved)
    if isinstance(found, Lease):
        grant(exchange, found)
    elif found is not None:
        refuse(exchange, found)


def refuse(exchange: Exchange, failure: Failure) -> None:
    """There is no unit: another model serves the request, or the client gets an error, in the form that is
    still possible.
    """
    if exchange.doubtful and show_first(exchange):
        return
    if exchange.gate.models is not None and fall_back(exchange, failure):
        find_unit(exchange)
        return
    if failure.used_up and exchange.admission is not None:
        exchange.admission.used_up(failure)
    exchange.state = OVER
    response = exchange.response
    if not response.begun:
        reason = ""
        if exchange.request.is_placed:
            failure, reason = not_here(failure, exchange.gate.board, exchange.selection.ask.unit)
        response.refuse(failure, reason=reason)
    elif exchange.continuation is None:
        response.break_off(failure)
    else:
        exchange.continuation.no_unit(failure)
