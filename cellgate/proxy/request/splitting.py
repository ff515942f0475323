"""What follows from leg 1 of a split request, and from the transfer of its blocks. Actions of the table.

A transfer that fails or does not come is the fault of the link, not of the decoder: the decoder computes the
prompt itself, under the same lease. One that cannot is left, and another pair is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.request.asking import begin, send_request
from cellgate.proxy.request.states import ExchangeState
from cellgate.proxy.wire.failure import FailureKind
from cellgate.router.split_nouns import LINK_FAILED, TRANSFERRED, SplitStep

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.request.nixl import Handoff
    from cellgate.proxy.request.sglang import Rendezvous
    from cellgate.router.unit_state import Lease

OF_LINKS = (FailureKind.UNIT_ERROR, FailureKind.FIRST_EVENT_ERROR, FailureKind.TRANSFER_FAILED)
"""What a decoder answers that could not fetch the blocks. One that is gone, or busy, answers none of this."""
FULL_S = 10.0
"""So much longer a transfer may take to a decoder that may be full."""
_SENT = (ExchangeState.HOLDING, ExchangeState.RESUMED)


def prefilled(exchange: Exchange, turn: Handoff | Rendezvous | None) -> None:
    """It is the decoder's turn. None: the prompt was not computed, and the decoder computes it."""
    attempt, leg = exchange.in_flight(), exchange.leg
    assert leg is not None
    lease, now = attempt.lease, exchange.gate.now()
    if not leg.split.together:
        _expect(exchange, lease)
    if turn is None:
        lease.split = exchange.leg = None
        begin(exchange, lease, fresh=False)
        return
    is_resumed = exchange.continuation is not None
    exchange.state = ExchangeState.RESUMED if is_resumed else ExchangeState.HOLDING
    leg.sent_at = now
    # Of a stream that is resumed, only the end may be missing.
    attempt.needs_token = not is_resumed
    # A kept connection may be stale, and the blocks are handed over once.
    send_request(exchange, attempt, leg.target, turn.spend(), fresh=True)


def _expect(exchange: Exchange, lease: Lease) -> None:
    """From here on the silence of a decoder means something."""
    lease.paused = exchange.response.paused
    lease.unit_state.work_at = exchange.gate.now()


def tick(exchange: Exchange, now: float) -> None:
    """Time has passed while the prompt is computed."""
    assert exchange.leg is not None
    if not exchange.response.paused:
        exchange.response.keep_warm(now, exchange.gate.settings.timeouts.head_hold_s)
    exchange.leg.tick(now)


def arrived(exchange: Exchange, lease: Lease) -> None:
    """The decoder has sent something: it has the blocks. The leg with its copies of the prompt is not kept as
    long as the stream.
    """
    leg, exchange.leg = exchange.leg, None
    assert leg is not None
    if exchange.response.status >= 400:
        # An error for the client: no blocks were needed.
        leg.drop()
        return
    leg.settle()
    split = leg.split
    # An answer that comes as a whole says little about the transfer.
    seconds = lease.first_at - leg.sent_at if lease.ask.stream else 0.0
    if split.together:
        _expect(exchange, lease)
        # Its part that was spent on the prompt is not known better.
        seconds = max(0.0, seconds - split.prefill_s)
    step = SplitStep(TRANSFERRED, split.prefiller, lease.unit, split.tokens, seconds)
    exchange.gate.reports.split(step)


def is_overdue(exchange: Exchange, lease: Lease, now: float) -> bool:
    """Whether the blocks have not come for too long, although their decoder works.

    A decoder that does nothing is judged by its own silence. One that is full begins with nobody: it has
    longer, until it begins to answer a request that came later.
    """
    split, leg = lease.split, exchange.leg
    if split is None or leg is None or not leg.sent_at or exchange.state not in _SENT:
        return False
    over_s = now - leg.sent_at - split.limit_s
    if over_s <= 0.0 or lease.unit_state.life_at <= leg.sent_at:
        return False
    return not split.may_wait or over_s > FULL_S or _was_overtaken(lease, leg.sent_at)


def _was_overtaken(lease: Lease, sent_at: float) -> bool:
    """Whether the decoder has begun to answer a request that it got later."""
    return any(other.committed and other.opened_at > sent_at for other in lease.unit_state.leases)


def link_failed(exchange: Exchange, reason: str) -> None:
    """The blocks have not arrived."""
    leg, exchange.leg = exchange.leg, None
    assert leg is not None
    split = leg.split
    step = SplitStep(LINK_FAILED, split.prefiller, leg.decoder.unit, split.tokens, reason=reason)
    exchange.gate.reports.split(step)
    leg.drop()


def compute_here(exchange: Exchange) -> None:
    """The decoder computes the prompt itself."""
    lease = exchange.in_flight().lease
    lease.split = None
    lease.unit_state.work_at = exchange.gate.now()
    begin(exchange, lease, fresh=False)
