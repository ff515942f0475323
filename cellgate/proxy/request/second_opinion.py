"""In doubt about an answer: asks another unit, before the client sees it. An action of the table.

router/opinions.py decides; this keeps what the first unit said, finds another one, and shows the first answer
where nobody has a better one. Of a burst, a few are asked elsewhere, and the others are held until one of
these has said something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.answer_shape import (
    ENDLESS,
    NO_TEXT,
    NO_TOKEN,
    NONE_COUNTED,
    REPEATS,
    SHORT_LOOP,
    loops,
)
from cellgate.proxy.request.doubts import (
    ABORTED,
    able,
    asked_kind,
    cost_of,
    drop,
    is_asked_for,
    may_choose,
    outcome_of_doubt,
    show_first,
    unsure,
)
from cellgate.proxy.request.life import ExchangeState
from cellgate.proxy.request.ports import Refuses
from cellgate.proxy.request.response import NO_PATH, Doubt, HeldAnswer
from cellgate.proxy.request.start import find_unit, refuse
from cellgate.router.nouns import Outcome, Refusal
from cellgate.router.opinions import COMPUTED, Advice, Refusing
from cellgate.router.unit_state import Lease
from cellgate.router.uses import use_of

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange


_BY_RATE = (NONE_COUNTED, NO_TEXT, *ENDLESS)
"""Answers that may be meant."""
HOLD_S = 10.0
"""So long an answer is held at most."""


def doubt(exchange: Exchange, what: str, body: bytes | None, *, is_outdone: bool = False) -> bool:
    """The attempt in flight has an answer that is not good; without a `body`, none that could be shown.
    Whether the request was taken elsewhere; if not, the answer is shown, or waited for. `is_outdone`: others
    are seen to do better.
    """
    attempt, gate, unit = exchange.in_flight(), exchange.gate, exchange.in_flight().lease.unit
    opinions, kind, now = gate.opinions, asked_kind(exchange), gate.now()
    payer = exchange.selection.ask.payer
    attempt.doubt, attempt.is_clients = "" if body is None else what, False
    if body is not None and is_asked_for(exchange, body):
        attempt.doubt = ""
        return False
    is_counted = what in _BY_RATE
    if is_counted and not _is_too_often(exchange, what, body) and not is_outdone:
        return False
    if what.startswith("404") and exchange.selection.ask.model is not None:
        # An adapter may have left.
        reason = f"unit {unit} answered that it does not serve model {kind.model}"
        attempt.blame(Failure(FailureKind.MODEL_GONE, reason), judged=True)
    others = (
        [each.unit.name for each in able(exchange) if each.unit.name != unit] if may_choose(exchange) else []
    )
    if not others:
        _tell(exchange, opinions.unasked(unit, kind, what, now))
        return _end(exchange, what)
    asked = len(exchange.doubtful)
    agrees = next((each.unit for each in exchange.doubtful if each.what == what), None)
    if agrees is not None and opinions.same(agrees, unit, kind, what, len(others), now, payer):
        attempt.is_clients = True
        return _end(exchange, what)
    # What is broken is no answer to anything.
    is_broken, cost = what == NO_TOKEN, cost_of(what, body)
    step = opinions.doubt(
        unit, kind, what, asked, now, payer, is_broken=is_broken, cost=cost, is_counted=is_counted
    )
    if step is Advice.HOLD:
        if body is None or what == NO_PATH:
            return _end(exchange, what)
        exchange.held = HeldAnswer(_keep(exchange, what, body), opinions.settled(unit, kind), now + HOLD_S)
        return True
    if step is Advice.SHOW or not _asks(exchange, what, body, step, others):
        if step is Advice.SHOW:
            _tell(exchange, opinions.apart(unit, kind))
        else:
            opinions.dropped(unit, kind, payer, is_spent=False)
        return _end(exchange, what)
    return True


def look_again(exchange: Exchange, held: HeldAnswer, now: float) -> None:
    """Time has passed: whether it is known by now what the held answer is worth."""
    first, opinions, kind = held.first, exchange.gate.opinions, asked_kind(exchange)
    settled = opinions.settled(first.unit, kind)
    if settled == held.settled and now < held.until:
        return
    payer, cost = exchange.selection.ask.payer, cost_of(first.what, first.body)
    step = opinions.doubt(first.unit, kind, first.what, 0, now, payer, cost=cost, is_counted=True)
    if step is Advice.HOLD and now < held.until:
        exchange.held = held._replace(settled=settled)
        return
    exchange.held = None
    if step in (Advice.ASK, Advice.INSIST):
        exchange.doubtful = (first,)
        other = _second(exchange, first.unit, [state.unit.name for state in able(exchange)])
        if not isinstance(other, Refusal) or step is Advice.INSIST:
            _move_away(exchange, other)
            return
    show_first(exchange, first)


def _asks(exchange: Exchange, what: str, body: bytes | None, step: Advice, others: list[str]) -> bool:
    """Whether another unit gets the request."""
    other = _second(exchange, exchange.in_flight().lease.unit, others)
    if isinstance(other, Refusal) and step is not Advice.INSIST:
        return False
    exchange.doubtful = (*exchange.doubtful, _keep(exchange, what, body))
    _move_away(exchange, other)
    return True


def _second(exchange: Exchange, unit: str, others: list[str]) -> Lease | Refusal | None:
    """Another unit than this one, one of the others; None: it comes later."""
    selection = exchange.selection
    trusted = exchange.gate.opinions.witnesses(others)
    # Who answers nonsense looks the least loaded, to the next one who asks as well.
    selection.avoid = tuple(name for name in others if name not in trusted) if trusted else unsure(exchange)
    other = selection.acquire_second(exchange, unit)
    if isinstance(other, Refusal) and selection.avoid:
        selection.avoid = ()
        other = selection.acquire_second(exchange, unit)
    return other


def _keep(exchange: Exchange, what: str, body: bytes | None) -> Doubt:
    """What the unit said; its attempt is over."""
    attempt, response, selection = exchange.in_flight(), exchange.response, exchange.selection
    unit, head = attempt.lease.unit, None if body is None else response.promised
    kept = Doubt(unit, what, head, response.own_lines, body or b"", response.status)
    if body is None:
        attempt.abandon()
    exchange.release(outcome_of_doubt(what, attempt.is_clients, response.status))
    selection.history = selection.history.after(unit)
    exchange.state = ExchangeState.WAITING
    return kept


def _move_away(exchange: Exchange, other: Lease | Refusal | None) -> None:
    """The request goes to the other unit, or waits for one."""
    if isinstance(other, Refusal):
        find_unit(exchange, moved=True)
    elif other is not None:
        exchange.resolve(other)


def repeated(exchange: Exchange) -> None:
    """The stream in flight says the same token again and again: as a rate, that may be its unit."""
    attempt = exchange.in_flight()
    attempt.doubt, attempt.is_clients = REPEATS, False
    _is_too_often(exchange, REPEATS, None)


def shown_whole(exchange: Exchange) -> None:
    """An answer was shown, while doubts are about: a short one may have said the same again and again."""
    shape = exchange.route.shape
    if shape is not None and shape.text and loops(exchange.response.tail, *SHORT_LOOP):
        repeated(exchange)


def _is_too_often(exchange: Exchange, what: str, body: bytes | None) -> bool:
    """Whether its unit answers so more often than others do, which may be meant. The gate asks by itself;
    what was computed is computed again only where chance hardly explains the difference.
    """
    opinions, lease, now = exchange.gate.opinions, exchange.in_flight().lease, exchange.gate.now()
    kind, prompt = asked_kind(exchange), exchange.selection.ask.fingerprint
    found = opinions.by_rate(
        lease.unit, kind, what, prompt, now, has_begun=lease.committed, is_endless=body is None
    )
    _tell(exchange, found)
    return found is not None and (found.is_far if cost_of(what, body) >= COMPUTED else found.is_apart)


def served(exchange: Exchange, lease: Lease) -> None:
    """A good answer begins, while doubts are about: whose word it proves wrong."""
    opinions, kind, ask = exchange.gate.opinions, asked_kind(exchange), exchange.selection.ask
    size = ask.prompt_bytes
    opinions.good(lease.unit, kind, size)
    doubts, exchange.doubtful = exchange.doubtful, ()
    for each in doubts:
        if each.what == ABORTED:
            continue
        is_fault = each.what != NO_PATH
        found = opinions.served(each.unit, lease.unit, kind, size, each.what, ask.payer, is_fault=is_fault)
        _tell(exchange, found)


def _end(exchange: Exchange, what: str) -> bool:
    """No other unit is asked: whether the client gets something else than this answer."""
    drop(exchange)
    if what != NO_PATH:
        return False
    path = exchange.request.path.decode("latin-1")
    unit = exchange.in_flight().lease.unit
    exchange.abort(Outcome.CLIENT_ERROR)
    refuse(exchange, Failure(FailureKind.NOT_SERVED, f"the engine of unit {unit} does not serve {path}"))
    return True


def _tell(exchange: Exchange, found: Refusing | None) -> None:
    if found is not None:
        exchange.gate.reports.send(Refuses(found, use_of(exchange.selection.ask)))
