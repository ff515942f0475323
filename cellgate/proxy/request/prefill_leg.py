"""The leg of a split request to the unit that computes its prompt. The decoder's lease waits meanwhile; where
the two meet (SGLang), the decoder has the request at the same time.

1. A decoder that can compute the prompt itself does so whatever becomes of the leg, which then never fails a
   request. One that cannot would wait for a prefiller that is gone for minutes: it is left at once.
2. The prefiller's lease is released exactly once, before its owner learns of the end.
3. Blocks that were computed and that no decoder is known to have fetched are orphans (orphans.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.logs.defects import guarded
from cellgate.proxy.request.dispatcher import PickRequest
from cellgate.proxy.request.forwarding import rank_line
from cellgate.proxy.request.nixl import Handoff, PromptLeg
from cellgate.proxy.request.reply_status import failure_of, outcome_of
from cellgate.proxy.request.sglang import Rendezvous
from cellgate.proxy.wire.call import Call
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.sse import is_error, message_of
from cellgate.router.nouns import Ask, Outcome
from cellgate.router.split_nouns import LEG_LOST, LINK_FAILED, PREFILLED, SplitPlan, SplitStep
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.dispatcher import Pending
    from cellgate.proxy.request.orphans import HeadFor
    from cellgate.proxy.request.services import Services

REPLY_BYTES = 4 << 20
"""The largest answer to leg 1: ids of the blocks of a prompt of a million tokens."""
_WAIT_S = 1.0
"""A prefiller that was free a moment ago and gives no lease for this long is not waited for, unless it has to
be: then as long as the queue allows.
"""


class LegOwner(Protocol):
    """The exchange. `prefilled` is called once after `begin`, unless the leg is dropped or has failed."""

    def prefilled(self, turn: Handoff | Rendezvous | None) -> None:
        """It is the decoder's turn; None: the prompt was not computed."""

    def failed(self, failure: Failure) -> None:
        """A decoder that cannot compute the prompt has no pair any more."""

    def crashed(self, error: Exception) -> None: ...


class PrefillLeg:
    """One leg. `decoder` is the lease that waits; `handoff` is set once the prompt is computed.

    `settled`: no blocks are left to be freed, or that is under way; `sent_at` is when the decoder got its
    request (0: not yet), and `target` the path that it was sent to.
    """

    target: bytes

    __slots__ = (
        "_begun_at",
        "_call",
        "_gate",
        "_head",
        "_lease",
        "_owner",
        "_pending",
        "_prompt",
        "decoder",
        "handoff",
        "sent_at",
        "settled",
        "split",
        "target",
    )

    def __init__(
        self,
        owner: LegOwner,
        gate: Services,
        decoder: Lease,
        split: SplitPlan,
        prompt: PromptLeg | Rendezvous,
        head: HeadFor,
    ) -> None:
        self._owner = owner
        self._gate = gate
        self._prompt = prompt
        self._head = head
        self._pending: Pending | None = None
        self._lease: Lease | None = None
        self._call: Call | None = None
        self._begun_at = gate.now()
        self.split = split
        self.decoder = decoder
        self.handoff: Handoff | None = None
        self.settled = False
        self.sent_at = 0.0

    def begin(self, ask: Ask) -> None:
        """Get a lease on the prefiller for the prompt of `ask`, and send it there."""
        ask = ask._replace(stream=True, max_tokens=1, splits=False, unit=None, build=None, continuable=0)
        wanted = PickRequest(ask, len(self._prompt.body), has_failure=True, units=(self.split.prefiller,))
        found = self._gate.dispatcher.acquire(wanted, self)
        if isinstance(found, Lease | Failure):
            self.on_result(found)
        else:
            self._pending = found

    def on_result(self, found: Lease | Failure) -> None:
        """What came of asking for a lease."""
        self._pending = None
        if isinstance(found, Failure):
            self._lose(f"unit {self.split.prefiller} has no room, or is not in rotation")
            return
        self._lease = lease = found
        lease.on_evict = self._evicted
        pool, prompt, body = self._gate.pool(lease.unit_state), self._prompt, self._prompt.body
        # A room leads to a rank by itself.
        is_free = lease.rank < 0 or self.split.together
        lines = pool.lines if is_free else pool.lines + rank_line(lease.rank)
        self._call = Call(self, pool, self._head(lines, len(body)), body, max_bytes=REPLY_BYTES)
        # A kept connection may be stale, and would need a second try.
        self._call.begin(fresh=True)
        if isinstance(prompt, Rendezvous) and self._lease is lease:
            self._owner.prefilled(prompt)

    def crashed(self, error: Exception) -> None:
        """Passing on its lease has failed."""
        self._owner.crashed(error)

    def tick(self, now: float) -> None:
        """Time has passed."""
        waited_s = now - self._begun_at
        if self._pending is not None and self._is_in_vain(waited_s):
            self.drop()
            self._lose(f"unit {self.split.prefiller} gave no lease within {waited_s:.1f} s")
        elif self._lease is not None and waited_s > self._gate.settings.timeouts.answer_s:
            reason = f"unit {self._lease.unit} did not compute a prompt within {waited_s:.0f} s"
            self.failed(Failure(FailureKind.ANSWER_TIMEOUT, reason))

    def _is_in_vain(self, waited_s: float) -> bool:
        """Whether a lease is not waited for any longer."""
        if not self.split.together:
            return waited_s > _WAIT_S
        state = self._gate.board.units.get(self.split.prefiller)
        return state is None or not state.is_usable()

    def drop(self) -> None:
        """The request is over, or goes on without it: stop, and free the blocks."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._lease is not None:
            self._release(Outcome.CLIENT_LEFT)
        if self.handoff is not None and not self.settled:
            self.settled = True
            pair = self.split.prefiller, self.decoder.unit
            self._gate.orphans.adopt(pair, self.split.tokens, self.handoff.releasing(), self._head)

    def settle(self) -> None:
        """The decoder has the blocks."""
        self.settled = True
        if self._lease is not None:
            # It has not said so yet.
            self._commit(self._lease)
            self._release(Outcome.OK)

    # -- the prefiller's answer ----------------------------------------------------------------------------

    def answered(self, status: int, body: bytes) -> None:
        """The prefiller has answered."""
        guarded(self._owner, self._take, status, body)

    def failed(self, failure: Failure) -> None:
        """It gave no answer."""
        guarded(self._owner, self._fail, failure)

    def _take(self, status: int, body: bytes) -> None:
        lease, call, gate = self._lease, self._call, self._gate
        assert lease is not None
        assert call is not None
        assert call.reply_head is not None
        if isinstance(self._prompt, Rendezvous):
            self._met(lease, status, body)
            return
        if status >= 400:
            failure = failure_of(call.reply_head, lease.unit_state, gate.now())
            if failure is not None and failure.kind is not FailureKind.BUSY:
                self._fail(failure)
                return
            self._release(outcome_of(status))
            self._lose(f"unit {self.split.prefiller} answered {status} to a prompt")
            return
        handoff = self._prompt.handoff(body)
        self._commit(lease)
        self._release(Outcome.OK)
        if isinstance(handoff, str):
            gate.reports.split(self._step(LINK_FAILED, reason=handoff))
            self._owner.prefilled(None)
            return
        self.handoff = handoff
        gate.reports.split(self._step(PREFILLED, seconds=gate.now() - self._begun_at))
        self._owner.prefilled(handoff)

    def _met(self, lease: Lease, status: int, body: bytes) -> None:
        """The prefiller answers once the blocks have gone over, or could not."""
        unit = self.split.prefiller
        if status in (429, 503):
            self._release(Outcome.BUSY)
            self._lose(f"unit {unit} answered {status} to a prompt")
        elif status >= 500 or is_error(body):
            # The failure of either side, or of the way between them.
            said = f"answered {status}" if status >= 500 else f"reported {message_of(body)}"
            self._release(Outcome.EVICTED)
            self._owner.failed(Failure(FailureKind.TRANSFER_FAILED, f"unit {unit} {said}"))
        elif status >= 400:
            # The decoder answers the same to the client.
            self._release(outcome_of(status))
            self._gate.reports.split(
                self._step(LEG_LOST, reason=f"unit {unit} answered {status} to a prompt")
            )
        else:
            self._commit(lease)
            self._release(Outcome.OK)
            self._gate.reports.split(self._step(PREFILLED, seconds=self._gate.now() - self._begun_at))
            # From here on the silence of the decoder means something.
            self.decoder.paused = False
            self.decoder.unit_state.work_at = self._gate.now()

    def _commit(self, lease: Lease) -> None:
        """Its prompt is computed: its prefill rate is learnt as from the first token of a stream."""
        now = self._gate.now()
        lease.commit(now)
        lease.unit_state.life_at = max(lease.unit_state.life_at, now)
        self._gate.dispatcher.committed(lease, resumed=True)

    def _fail(self, failure: Failure) -> None:
        lease = self._lease
        assert lease is not None
        self._release(failure.kind.row.outcome)
        self._gate.dispatcher.blame(lease, failure, 0, 0)
        self._lose(failure.message)

    def _evicted(self) -> None:
        guarded(self._owner, self._fail, Failure(FailureKind.EVICTED, "it went down, or was paused"))

    def _release(self, outcome: Outcome) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        if self._call is not None:
            self._call.abandon()
        self._gate.dispatcher.released(lease, outcome)

    def _lose(self, reason: str) -> None:
        self._gate.reports.split(self._step(LEG_LOST, reason=reason))
        if self.split.together:
            self._owner.failed(Failure(FailureKind.PREFILL_LOST, reason))
        else:
            self._owner.prefilled(None)

    def _step(self, kind: str, *, seconds: float = 0.0, reason: str = "") -> SplitStep:
        return SplitStep(kind, self.split.prefiller, self.decoder.unit, self.split.tokens, seconds, reason)
