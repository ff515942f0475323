"""Sends a request to a unit, or asks it to resume a stream that another one broke. Actions of the table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import orjson

from cellgate.proxy.request import nixl, sglang
from cellgate.proxy.request.answer_shape import SHAPES
from cellgate.proxy.request.ask import is_large
from cellgate.proxy.request.attempt import Attempt
from cellgate.proxy.request.continuation import why_not
from cellgate.proxy.request.forwarding import head_for_unit, names_rank, rank_line
from cellgate.proxy.request.prefill_leg import PrefillLeg
from cellgate.proxy.request.routes import UNLISTED
from cellgate.proxy.request.states import ExchangeState
from cellgate.proxy.request.transfer_fields import may_have_some, named_in, without_transfer
from cellgate.proxy.resume.eligible import TOKENS
from cellgate.proxy.resume.token_ids import asking, gives_ids
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.sse import BOM
from cellgate.router.split_nouns import UNFIT, SplitStep
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.resume.passage import Rewriter
    from cellgate.proxy.resume.replay_buffer import ReplayBuffer

# A member of an enum is a slow attribute on CPython 3.11.
HOLDING, PROVING = ExchangeState.HOLDING, ExchangeState.PROVING
_NOT_SEARCHED = Failure(
    FailureKind.BAD_JSON,
    "the body names parameters of a transfer of KV blocks, which only the gate may, in a form that cannot be "
    "taken out; send it without",
)


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
    selection, request = exchange.selection, exchange.request
    exchange.attempt = attempt = Attempt(exchange, exchange.gate.dispatcher, exchange.response, lease)
    selection.given = None
    lease.on_evict = exchange.evicted
    # A kept connection may be stale and need a second try, which not every path allows.
    fresh = fresh or exchange.route.kind is UNLISTED
    if exchange.continuation is None:
        body = request.body
        if lease.unit_state.moves_blocks:
            request.lines = sglang.own_lines(request.lines) if lease.unit_state.meets else request.lines
            reads_json = exchange.route.json or exchange.route.kind is UNLISTED
            bare = _bare(body) if reads_json else body
            if bare is None:
                exchange.state = HOLDING
                exchange.stop(_NOT_SEARCHED)
                return
            if _begin_leg(exchange, lease, request.target, bare):
                return
            body = _stripped(bare, lease) if reads_json and bare.lstrip()[:1] == b"{" else bare
        exchange.state = HOLDING
        attempt.shape = SHAPES.get(exchange.route.name)
        if selection.ask.continuable & TOKENS and _gives_ids(exchange, lease):
            body, attempt.has_ids = asking(body), True
        send_request(exchange, attempt, request.target, body, fresh=fresh)
        return
    if lease.split is not None and not lease.split.together:
        # A stream that is resumed has been split already.
        lease.split = None
    exchange.state = PROVING
    lines = exchange.gate.pool(lease.unit_state).lines
    head = partial(head_for_unit, request, exchange.client, exchange.response, lines)
    exchange.continuation.begin(exchange, lease.unit_state, head, fresh=fresh)


def _bare(body: bytes) -> bytes | None:
    """The body without what only the gate may say of a transfer; None: it cannot be searched for that."""
    if body.lstrip()[:1] != b"{":
        # No object, or one in an encoding that some engines read and the gate does not.
        return None if b"\0" in body[:4] or body.startswith(BOM) else body
    if is_large(body):
        return None if named_in(body) else body
    if not may_have_some(body):
        return body
    try:
        return without_transfer(body)
    except (orjson.JSONDecodeError, TypeError):
        # No JSON, or nested too deeply to be written again.
        return None


def _stripped(body: bytes, lease: Lease) -> bytes:
    """The JSON object without the same at its top."""
    return sglang.stripped(body) if lease.unit_state.meets else nixl.stripped(body)


def _begin_leg(exchange: Exchange, lease: Lease, target: bytes, body: bytes) -> bool:
    """Have the prompt of a request computed by another unit. False: it is not split, or cannot be."""
    request, response, gate = exchange.request, exchange.response, exchange.gate
    if (split := lease.split) is None:
        return False
    prompt: nixl.PromptLeg | sglang.Rendezvous | str
    if split.together:
        # Its body is not parsed, however large it is.
        prompt = sglang.Rendezvous(body, gate.board.units[split.prefiller].unit, gate.rng)
    elif is_large(body):
        prompt = "the request is too large to be parsed again"
    else:
        prompt = nixl.PromptLeg.of(body, response.request_id.decode("latin-1"))
    if isinstance(prompt, str):
        gate.reports.split(SplitStep(UNFIT, split.prefiller, lease.unit, reason=prompt))
        lease.split = None
        return False

    def head(lines: bytes, length: int) -> bytes:
        return head_for_unit(request, exchange.client, response, lines, target, length)

    # Nothing was sent to the decoder yet, so that its silence means nothing.
    lease.paused = True
    exchange.state = ExchangeState.PREFILLING
    exchange.leg = leg = PrefillLeg(exchange, gate, lease, split, prompt, head)
    leg.target = target
    leg.begin(exchange.selection.ask)
    return True


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
    if _begin_leg(exchange, attempt.lease, target, body):
        return
    send_request(exchange, attempt, target, body, fresh=False)


def send_request(exchange: Exchange, attempt: Attempt, target: bytes, body: bytes, *, fresh: bool) -> None:
    """Send `body` to the path `target` of the unit."""
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
