"""One request's search for a unit: one after the other, or a place in the queue, until there is no other.

Which unit it is to be is for router/ to say, and whether there is to be another one for router/retry.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cellgate.proxy.control.containment import Held
from cellgate.proxy.wire.failure import Failure
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Outcome, Refusal, Verdict
from cellgate.router.retry import Attempts, Step, next_step

if TYPE_CHECKING:
    from cellgate.proxy.gate import Gate
    from cellgate.router.queue import Ticket

_NO_ASK, _NO_ATTEMPTS = Ask(), Attempts()

Tell = Callable[[Lease | Refusal], None]
"""Takes what came of a wait in the queue."""


class Search:
    """One request's, for `ask`, with a body of `size` bytes; `once`: it may be sent to one unit only.

    `history` has the units that failed, `failure` what the last of them did."""

    __slots__ = (
        "_draws",
        "_gate",
        "_moved",
        "_once",
        "_size",
        "_ticket",
        "_turned_away",
        "ask",
        "failure",
        "given",
        "history",
    )

    def __init__(self, gate: Gate, size: int, *, once: bool = False) -> None:
        self._gate = gate
        self._size = size
        self._once = once
        self._moved = self._draws = False
        self._ticket: Ticket | Held | None = None
        self._turned_away = 0
        self.ask = _NO_ASK
        self.failure: Failure | None = None
        self.given: Lease | Refusal | None = None
        """What the last pick, or the queue, has said, until something is made of it."""
        self.history = _NO_ATTEMPTS

    @property
    def queued_at(self) -> float | None:
        """Since when it has a place in the queue; None: it has none."""
        return self._ticket.entered_at if self._ticket is not None else None

    # -- which unit ----------------------------------------------------------------------------------------

    def pick(self, *, draws: bool = False, moved: bool = False) -> Lease | Refusal:
        """The next unit. `draws`: on the retry budget; `moved`: it lost one through no fault of its own."""
        self._moved, self._draws = self._moved or moved, draws
        self.given = answer = self._pick(self.history.tried, evicted=self._moved, draws=draws)
        return answer

    def pick_besides(self, unit: str, step: Step) -> Lease | Refusal:
        """Another one than `unit`, at once."""
        self._draws, tried = step.draws, (*self.history.tried, unit)
        self.given = answer = self._pick(tried, evicted=not step.draws, draws=step.draws)
        return answer

    def heed(self, answer: Lease | Refusal, tell: Tell) -> Lease | Failure | None:
        """What follows from what a pick, or later the queue, has to say: a unit, or that there is none.

        None: the ask waits, and `tell` is told what comes of that.
        """
        if self._ticket is None and isinstance(answer, Lease):
            return answer
        gate, ticket, self._ticket = self._gate, self._ticket, None
        if ticket is not None:
            gate.routing.waited(gate.now() - ticket.entered_at)
        if gate.containment.watchful and (answer is Refusal.POISON or self._is_barred(answer, ticket)):
            return gate.containment.failure(self.ask, self.history.tried)
        if isinstance(answer, Lease):
            return answer
        if ticket is None:
            waits = self._wait(answer, tell)
            if isinstance(waits, Lease):
                return waits
            answer = waits
        return None if self._ticket is not None else self.failure or gate.explain(answer, self.ask)

    def waits_again(self, tell: Tell) -> bool:
        """Whether an ask that its unit has no room for goes back to the queue until it may have."""
        if self._turned_away >= self._gate.board.rules.attempts - 1:
            return False
        self._wait(Refusal.FULL, tell, must_wait=True)
        if self._ticket is None:
            return False
        self._turned_away += 1
        return True

    def leave(self) -> None:
        """Nobody waits for a unit any more, nor takes the one that was given."""
        if self._ticket is not None:
            if isinstance(self._ticket, Held):
                self._gate.containment.leave(self._ticket)
            else:
                self._gate.router.waiting.remove(self._ticket)
            self._ticket = None
        self._give_back()

    def _give_back(self) -> None:
        given, self.given = self.given, None
        if isinstance(given, Lease) and not given.closed:
            self._gate.close(given, Outcome.GATE_ERROR)

    def _pick(self, tried: tuple[str, ...], *, evicted: bool, draws: bool) -> Lease | Refusal:
        gate = self._gate
        if gate.containment.watchful:
            return gate.containment.pick(self.ask, tried, evicted=evicted, retry=draws)
        return gate.router.pick(self.ask, gate.now(), tried, evicted=evicted, retry=draws)

    def _is_barred(self, answer: Lease | Refusal, ticket: Ticket | Held | None) -> bool:
        """Whether it may have none of the units any more; one that it got while it waited is given back."""
        gate = self._gate
        if ticket is None or not gate.containment.bars(self.ask, self.history.tried):
            return False
        if isinstance(answer, Lease):
            gate.close(answer, Outcome.GATE_ERROR)
        return True

    def _wait(self, answer: Refusal, tell: Tell, *, must_wait: bool = False) -> Lease | Refusal:
        """Queue the ask, where waiting may help; why not, if it does not; or a unit, if one has room.

        `must_wait`: not even then, for it was turned away just now.
        """
        if answer is Refusal.HELD:
            self._ticket = self._gate.containment.hold(self.ask, self.history.tried, tell)
            return Refusal.NO_UNIT
        gate, tried = self._gate, frozenset(self.history.tried)
        # It has lost its unit through no fault of its own, or the one there is answers in a moment.
        moved = self._moved or answer is Refusal.UNSURE
        may_wait = answer is Refusal.FULL or (moved and gate.board.could_serve(self.ask, tried))
        if not may_wait:
            return answer
        place = gate.router.wait(
            self.ask,
            gate.now(),
            tried,
            tell,
            size=self._size,
            moved=moved,
            retry=self._draws,
            # Who may be given what is then for containment to say.
            must_wait=must_wait or gate.containment.watchful,
        )
        if isinstance(place, Lease | Refusal):
            return place
        self._ticket = place
        gate.room()
        return answer

    # -- whether there is to be another one ----------------------------------------------------------------

    def next_step(self, lease: Lease, failure: Failure) -> Step:
        """What follows from the failure of an attempt that has shown nothing."""
        row, board = failure.kind.row, self._gate.board
        return next_step(
            self.history,
            retryable=row.retryable and not self._once,
            by_response=row.by_response and lease.desk.case.verdict is Verdict.UP,
            live=board.in_flight,
            paid_live=board.retries_in_flight + self._gate.router.waiting.retries,
            rules=board.rules,
        )

    def failed(self, unit: str, step: Step, failure: Failure) -> None:
        """Note that `unit` failed, and what follows."""
        self.history = self.history.after(unit, paid=step.draws)
        self.failure = failure
        if step.again:
            self._moved = self._moved or not step.draws
            self._gate.metrics.retry(unit)
