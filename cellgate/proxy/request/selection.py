"""The selection of units for one request: one after another, until there is none left.

It keeps what the next choice depends on. The dispatcher chooses the unit; router/retry.py decides whether
there is another attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.ports import Forged, PickRequest, Retried, Waiter
from cellgate.proxy.request.routes import may_place, not_trusted, read_placement
from cellgate.router.nouns import Ask, Outcome, Refusal, Verdict
from cellgate.router.retry import Attempts, Step, next_step
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.ports import Charge, Observer, Pending
    from cellgate.proxy.request.services import Services

_NO_ASK, _NO_ATTEMPTS = Ask(), Attempts()
_new = tuple.__new__
_MAY_RETURN = (FailureKind.ABORTED, FailureKind.TRANSFER_FAILED, FailureKind.PREFILL_LOST)


class Selection:
    """The selection for one request, with a body of `size` bytes.

    `history` has the units that failed, `failure` what the last of them did; the other fields are those of
    PickRequest.
    """

    __slots__ = (
        "_draws",
        "_gate",
        "_moved",
        "_observers",
        "_pending",
        "_size",
        "_turned_away",
        "ask",
        "avoid",
        "charge",
        "explain_since",
        "failure",
        "given",
        "history",
        "units",
    )

    def __init__(self, gate: Services, size: int, observers: tuple[Observer, ...] = ()) -> None:
        self._observers = observers
        self._gate = gate
        self._size = size
        self._moved = self._draws = False
        self._pending: Pending | None = None
        self._turned_away = 0
        self.ask = _NO_ASK
        self.avoid: tuple[str, ...] = ()
        """Units that refuse such requests: they get it only where no other is there."""
        self.charge: Charge | None = None
        self.explain_since = 0.0
        self.failure: Failure | None = None
        self.given: Lease | Failure | None = None
        """What was found, until it is used."""
        self.history = _NO_ATTEMPTS
        self.units: tuple[str | None, ...] | None = None

    def apply_placement(self, request: Request) -> Failure | None:
        """Apply the headers that name units or ask for an explanation; the failure if the request may not."""
        gate = self._gate
        if not may_place(request.fields, gate.settings.admin_token):
            gate.reports.send(Forged())
            return not_trusted(is_placed=request.is_placed)
        if request.is_explained:
            self.explain_since = request.received_at
        if not request.is_placed:
            return None
        wanted = read_placement(request.fields, gate.board)
        if wanted.ordered:
            self.units = wanted.units or (None,)
        else:
            # All other units count as tried: no later decision can choose them.
            others = gate.board.units.keys() - set(wanted.units)
            self.units, self.history = (None,), Attempts(tried=tuple(others))
        if wanted.units:
            return None
        return Failure(FailureKind.NO_UNIT, "this gate has none of the units that the request names")

    @property
    def is_queued(self) -> bool:
        """Whether it waits for a unit. One in WAITING that does not waits for the gate itself."""
        return self._pending is not None

    # -- which unit ----------------------------------------------------------------------------------------

    def acquire(self, waiter: Waiter, draws: bool, moved: bool) -> Lease | Failure | None:
        """The next unit, or why there is none. None: it waits, and `waiter` gets the result later (see
        `take`).

        `draws`: on the retry budget; `moved`: it lost its unit through no fault of its own.
        """
        self._draws = draws
        if moved:
            self._moved = True
        tried = self.history.tried
        request = self._request((*tried, *self.avoid) if self.avoid else tried, self._moved)
        # A request is charged once, however many units it takes.
        self.charge = None
        found = self._gate.dispatcher.acquire(request, waiter)
        if isinstance(found, Lease):
            self.given = found
            return found if self.units is None else self.resolve(found)
        if isinstance(found, Failure):
            if self.avoid:
                self.avoid = ()
                return self.acquire(waiter, draws, moved)
            return self.resolve(found)
        self._pending = found
        return None

    def acquire_second(self, waiter: Waiter, unit: str) -> Lease | Refusal | None:
        """Another unit than `unit`, for a second opinion: at once or not at all, where there is room."""
        self._draws = False
        request = self._request((*self.history.tried, unit, *self.avoid), moved=False)
        return self._at_once(request, waiter)

    def acquire_other(self, waiter: Waiter, unit: str, step: Step) -> Lease | Refusal | None:
        """Another unit than `unit`, at once or not at all. None: the result comes later."""
        self._draws = step.draws
        request = self._request((*self.history.tried, unit), not step.draws)
        return self._at_once(request, waiter)

    def _at_once(self, request: PickRequest, waiter: Waiter) -> Lease | Refusal | None:
        found = self._gate.dispatcher.acquire_other(request, waiter)
        if isinstance(found, Refusal):
            return found
        if isinstance(found, Lease):
            self.given = found
            self.resolve(found)
            return found
        self._pending = found
        return None

    def waits_again(self, waiter: Waiter) -> bool:
        """Whether a request that its unit has refused as full waits in the queue again."""
        if self._turned_away >= self._gate.board.rules.attempts - 1:
            return False
        request = self._request(self.history.tried, self._moved)._replace(must_wait=True)
        found = self._gate.dispatcher.acquire(request, waiter)
        if isinstance(found, Lease | Failure):
            return False
        self._pending = found
        self._turned_away += 1
        return True

    def take(self, found: Lease | Failure) -> Lease | Failure:
        """Take the result of waiting."""
        self._end_wait(found.opened_at if isinstance(found, Lease) else None)
        self.given = found
        return self.resolve(found)

    def resolve(self, found: Lease | Failure) -> Lease | Failure:
        """The lease, or the failure that the client gets."""
        if isinstance(found, Lease):
            unit: str | None = found.unit
        else:
            unit = self.units[-1] if self.units is not None else None
            found = found if found.kind.row.is_final else self.failure or found
        if self.units is not None and self.units[-1] is not None:
            # From here on it is bound to that unit.
            self.ask = self.ask._replace(unit=unit)
        return found

    def cancel(self) -> None:
        """Stop waiting for a unit, and release one that was found."""
        pending = self._pending
        if pending is not None:
            self._end_wait()
            pending.cancel()
        given, self.given = self.given, None
        if isinstance(given, Lease) and not given.closed:
            self._gate.dispatcher.released(given, Outcome.GATE_ERROR)

    def _end_wait(self, at: float | None = None) -> None:
        pending, self._pending = self._pending, None
        if pending is None or not self._observers or (since := pending.queued_at) is None:
            return
        for observer in self._observers:
            observer.waited(since, at or self._gate.now())

    def _request(self, tried: tuple[str, ...], moved: bool) -> PickRequest:
        # The fields stand in their order.
        fields = (
            self.ask,
            self._size,
            tried,
            moved,
            self._draws,
            False,
            self.failure is not None,
            self.units,
            self.explain_since,
            self.charge,
        )
        return _new(PickRequest, fields)

    # -- whether there is to be another one ----------------------------------------------------------------

    def next_step(self, lease: Lease, failure: Failure, *, once: bool) -> Step:
        """The step after an attempt that failed before its commit; `once`: the request may be sent to one
        unit only.
        """
        row, board = failure.kind.row, self._gate.board
        return next_step(
            self.history,
            retryable=row.retryable and not once,
            by_response=row.by_response and lease.unit_state.case.verdict is Verdict.UP,
            live=board.in_flight,
            paid_live=self._gate.dispatcher.paid_retries(),
            rules=board.rules,
        )

    def failed(self, unit: str, step: Step, failure: Failure) -> bool:
        """Record that `unit` failed, and the step that follows. True: it may get this request again.

        A few times one may that aborted its requests, or whose pair failed, or to which the gate itself could
        not connect while no other is there.
        """
        is_alone = failure.kind is FailureKind.NO_RESOURCES and not self._has_other(unit)
        has_tries = self._turned_away < self._gate.board.rules.attempts - 1
        may_return = has_tries and (is_alone or failure.kind in _MAY_RETURN)
        if may_return:
            self._turned_away += 1
        else:
            self.history = self.history.after(unit, paid=step.draws)
        self.failure = failure
        if step.again:
            self._moved = self._moved or not step.draws
            self._gate.reports.send(Retried(unit))
        return may_return

    def _has_other(self, unit: str) -> bool:
        """Whether another unit could take the request now."""
        tried = {unit, *self.history.tried}
        states = [state for name, state in self._gate.board.pairs.decoders.items() if name not in tried]
        return any(state.is_usable() and state.serves(self.ask) for state in states)
