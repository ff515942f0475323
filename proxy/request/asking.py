"""Sends a request to a unit, or asks it to resume a stream that another one broke. Actions of the table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cellgate.proxy.request.attempt import Attempt
from cellgate.proxy.request.continuation import why_not
from cellgate.proxy.request.forwarding import head_for_unit, names_rank, rank_line
from cellgate.proxy.request.routes import UNLISTED
from cellgate.proxy.request.states import ExchangeState
from cellgate.proxy.resume.eligible import TOKENS
from cellgate.proxy.resume.token_ids import asking, gives_ids
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.resume.passage import Rewriter
    from cellgate.proxy.resume.replay_buffer import ReplayBuffer

# A member of an enum is a slow attribute on CPython 3.11.
HOLDING, PROVING = ExchangeState.HOLDING, ExchangeState.PROVING


def grant(exchange: Exchange, lease: Lease) -> None:
    """A unit was found: send it the request."""
    response = exchange.response
    for observer in response.observers:
        observer.attempted(lease, response.attempts)
    response.attempts += 1
    response.rank = None
    begin(exchange, lease, fresh=False)


def begin(exchange: Exchange, lease: Lease, *, fresh: bool) -> None:
    """Send the request to the unit, on a new connection if `fresh`."""
    exchange.attempt = attempt = Attempt(exchange, exchange.gate.dispatcher, exchange.response, lease)
    exchange.selection.given = None
    lease.on_evict = exchange.evicted
    # A kept connection may be stale and need a second try, which not every path allows.
    fresh = fresh or exchange.route.kind is UNLISTED
    if exchange.continuation is None:
        exchange.state = HOLDING
        request, body = exchange.request, exchange.request.body
        if exchange.selection.ask.continuable & TOKENS and _gives_ids(exchange, lease):
            body, attempt.has_ids = asking(body), True
        _send(exchange, attempt, request.target, body, fresh=fresh)
        return
    exchange.state = PROVING
    lines = exchange.gate.pool(lease.unit_state).lines
    head = partial(head_for_unit, exchange.request, exchange.client, exchange.response, lines)
    exchange.continuation.begin(exchange, lease.unit_state, head, fresh=fresh)


def _gives_ids(exchange: Exchange, lease: Lease) -> bool:
    """Whether the unit gives token ids, and they are of use."""
    state = lease.unit_state
    is_known = gives_ids(state.engine, state.build.version)
    return is_known and not why_not(exchange.gate, exchange.request, exchange.selection.ask)


def resume(exchange: Exchange, target: bytes, body: bytes, replay: ReplayBuffer, stitch: Rewriter) -> None:
    """The unit has proven that it can resume the stream: send `body` to its path `target`."""
    attempt = exchange.in_flight()
    exchange.state = ExchangeState.RESUMED
    attempt.go_on(replay, stitch)
    _send(exchange, attempt, target, body, fresh=False)


def _send(exchange: Exchange, attempt: Attempt, target: bytes, body: bytes, *, fresh: bool) -> None:
    lease, request = attempt.lease, exchange.request
    pool = exchange.gate.pool(lease.unit_state)
    lines = pool.lines if lease.rank < 0 else pool.lines + _rank_line(exchange, lease.rank)
    head = head_for_unit(request, exchange.client, exchange.response, lines, target, len(body))
    attempt.send(head, body, pool, to_head=request.method == b"HEAD", fresh=fresh)


def _rank_line(exchange: Exchange, rank: int) -> bytes:
    """The header line of the rank that was chosen; none where the client has chosen one itself."""
    if names_rank(exchange.request):
        return b""
    exchange.response.rank = rank
    return rank_line(rank)
