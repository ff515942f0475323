"""The exchange, which answers one request, and the selection of its units. What happens to it is in life.py,
what each event does in table.py.

In this order: `Selection`, `Exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cellgate.proxy.config.settings import secret_of
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.attempt import Attempt
from cellgate.proxy.request.continuation import StreamResume
from cellgate.proxy.request.life import ON_PREFILLED, PARSING, RequestLife, Table
from cellgate.proxy.request.placement import may_place, not_trusted, read_placement
from cellgate.proxy.request.ports import Forged, Observer, PickRequest, Retried, Waiter
from cellgate.proxy.request.response import Response
from cellgate.proxy.request.routes import UNLISTED, find_route
from cellgate.router.nouns import Ask, Outcome, Refusal, Verdict
from cellgate.router.retry import FINAL, Attempts, Returns, Step, free_step, next_step
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.http.client import ResponseClient
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.models import Naming
    from cellgate.proxy.request.ports import Charge, Pending
    from cellgate.proxy.request.prefill_decode import Handoff, PrefillLeg, Rendezvous
    from cellgate.proxy.request.response import Doubt, HeldAnswer
    from cellgate.proxy.request.services import Admission, Services
    from cellgate.router.opinions import Kind


_NO_ASK, _NO_ATTEMPTS = Ask(), Attempts()
_new = tuple.__new__


class Selection:
    """The selection of units for one request, with a body of `size` bytes: one after another, until there is
    none left. It keeps what the next choice depends on. The dispatcher chooses the unit; router/retry.py
    decides whether there is another attempt.

    `history` has the units that failed, `failure` what the last of them did; `avoid` are units that refuse
    such requests: they get it only where no other is there; `given` is what was found, until it is used. The
    other fields are those of PickRequest.
    """

    __slots__ = (
        "_draws",
        "_gate",
        "_loan",
        "_moved",
        "_observers",
        "_pending",
        "_size",
        "ask",
        "avoid",
        "charge",
        "explain_since",
        "failure",
        "given",
        "history",
        "units",
    )

    def __init__(
        self, gate: Services, size: int, observers: tuple[Observer, ...] = (), loan: int = 0
    ) -> None:
        self._observers = observers
        self._loan = loan
        self._gate = gate
        self._size = size
        self._moved = self._draws = False
        self._pending: Pending | None = None
        self.ask = _NO_ASK
        self.avoid: tuple[str, ...] = ()
        self.charge: Charge | None = None
        self.explain_since = 0.0
        self.failure: Failure | None = None
        self.given: Lease | Failure | None = None
        self.history = _NO_ATTEMPTS
        self.units: tuple[str | None, ...] | None = None

    def apply_placement(self, request: Request) -> Failure | None:
        """Apply the headers that name units or ask for an explanation; the failure if the request may not."""
        gate = self._gate
        settings = gate.settings
        if not may_place(request.fields, settings.admin_token, secret_of(settings), gate.own_url()):
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
        history = self.history
        request = self._request(history.tried, self._moved)
        request = request._replace(must_wait=True, waited_s=history.waited_s)
        found = self._gate.dispatcher.acquire(request, waiter)
        if isinstance(found, Lease | Failure):
            return False
        self._pending = found
        self.history = self.history.waiting()
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
        if pending is None or (since := pending.queued_at) is None:
            return
        until = at or self._gate.now()
        self.history = self.history._replace(waited_s=self.history.waited_s + until - since)
        for observer in self._observers:
            observer.waited(since, until)

    def _request(self, tried: tuple[str, ...], moved: bool) -> PickRequest:
        # In the order of its fields: with their names it takes twice as long.
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
            self._loan,
            0.0,
        )
        return _new(PickRequest, fields)

    # -- whether there is to be another one ----------------------------------------------------------------

    def next_step(self, lease: Lease, failure: Failure, *, once: bool) -> Step:
        """The step after an attempt that failed uncommitted; `once`: only one unit may get the request."""
        board, rule = self._gate.board, failure.kind.row.retry
        return next_step(
            self.history,
            FINAL if once else rule,
            board.rules,
            is_up=lease.unit_state.case.verdict is Verdict.UP,
            is_alone=rule.returns is Returns.IF_ALONE and self._is_alone(lease.unit),
            live=board.in_flight,
            paid_live=self._gate.dispatcher.paid_retries(),
        )

    def failed(self, unit: str, failure: Failure, step: Step | None = None) -> None:
        """Record that `unit` failed; returns the step after that. None: it moves on at nobody's expense."""
        if step is None:
            step = free_step(self.history, failure.kind.row.retry, self._gate.board.rules)
        self.history = self.history.after(unit, step)
        self.failure = failure
        if step.again:
            self._moved = self._moved or not step.draws
            self._gate.reports.send(Retried(unit))

    def _is_alone(self, unit: str) -> bool:
        """Whether no other unit could take the request now."""
        return next(self._gate.board.able(self.ask, (unit, *self.history.tried)), None) is None


class Exchange(RequestLife):
    """Answers one request of one client.

    `attempt` is the one in flight, `stream_resume` exists after a break of its stream, `was_stale` says
    whether a kept connection was stale (the lease, if its unit may have had the request); `stop_reading`
    stops the parsing of its body; `naming` has the names of its model, where the gate has names of its own,
    `admission` what its key may, where there are keys;
    `doubtful` are answers of units that were not shown, because others were asked; `kind` is what it asks
    for, once that matters;
    `leg` is that of its prompt, while another unit computes it. Its unit waits while the client `is_slow`,
    and while as much as may be `is_held` for a guardrail.
    """

    # From the naming of its model on, where the gate has names of its own.
    naming: Naming
    # From the first doubt on.
    kind: Kind
    # While a doubtful answer is held.
    held: HeldAnswer | None
    # Since when its stream, once begun, has shown events without work, and when that was last seen.
    idle: tuple[float, float]
    # Whether a unit has resumed its stream with nothing.
    is_doubted: bool
    was_stale: Lease | bool

    __slots__ = (
        "admission",
        "attempt",
        "client",
        "doubtful",
        "gate",
        "held",
        "idle",
        "is_doubted",
        "is_held",
        "is_slow",
        "kind",
        "leg",
        "naming",
        "request",
        "response",
        "route",
        "selection",
        "state",
        "stop_reading",
        "stream_resume",
        "table",
        "was_stale",
    )

    def __init__(
        self,
        table: Table,
        gate: Services,
        client: ResponseClient,
        request: Request,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.table = table
        self.state = PARSING
        self.gate = gate
        self.client = client
        self.request = request
        self.route = route = find_route(request.path)
        self.response = Response(gate, client, request, route.name, observers)
        self.selection = Selection(gate, request.body_size, observers, request.loan)
        self.admission: Admission | None = None
        self.attempt: Attempt | None = None
        self.doubtful: tuple[Doubt, ...] = ()
        self.stream_resume: StreamResume | None = None
        self.leg: PrefillLeg | None = None
        self.stop_reading: Callable[[], None] | None = None
        self.was_stale = self.is_slow = self.is_held = False

    # -- what happens to it: see RequestLife ---------------------------------------------------------------

    def on_result(self, found: Lease | Failure) -> None:
        self.resolve(self.selection.take(found))

    def prefilled(self, turn: Handoff | Rendezvous | None) -> None:
        """It is the turn of the unit of the lease: another one computes the prompt. None: it does not."""
        self.table[self.state, ON_PREFILLED].action(self, turn)

    def client_paused(self, paused: bool) -> None:
        """The client reads slower than its unit writes, or reads again. This does not change the state."""
        self.is_slow = paused
        self._mirror(paused=paused or self.is_held)

    def is_awaited(self) -> bool:
        """Whether others wait for the slot that it holds."""
        attempt = self.attempt
        return attempt is not None and self.gate.board.is_awaited(attempt.lease.unit_state)

    def buffer_full(self, held: bool) -> None:
        """A guardrail holds as much of the answer as may be held, or less again. The same."""
        self.is_held = held
        self._mirror(paused=held or self.is_slow)

    def _mirror(self, *, paused: bool) -> None:
        """Have the unit wait, or go on."""
        if paused is not self.response.paused:
            self.response.pause(paused=paused)
            if self.attempt is not None:
                self.attempt.pause(paused=paused)

    # -- the attempt in flight -----------------------------------------------------------------------------

    def in_flight(self) -> Attempt:
        """The attempt; there must be one."""
        assert self.attempt is not None
        return self.attempt

    def release(self, outcome: Outcome, at: float | None = None) -> None:
        """Give its lease back. `at`: when the attempt ended, if not now."""
        self._drop_leg()
        self.in_flight().release(outcome, at)
        self.attempt = None

    def abort(self, outcome: Outcome) -> None:
        """End it: close its connection, then release its lease."""
        self._drop_leg()
        if self.stream_resume is not None:
            self.stream_resume.abandon()
        self.in_flight().abort(outcome)
        self.attempt = None

    def fail(self, failure: Failure) -> None:
        """End it because of a fault of its unit."""
        self._drop_leg()
        if self.stream_resume is not None:
            self.stream_resume.abandon()
        self.in_flight().fail(failure, judged=self.route.kind is not UNLISTED)
        self.attempt = None

    def _drop_leg(self) -> None:
        """Nothing will be made of its prompt."""
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.drop()
