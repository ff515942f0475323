"""The dispatcher of a control plane in this process: finds units for requests and records their results.

router/ chooses the unit; containment.py does for prompts that may end units.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cellgate.probes.base import shuts_down
from cellgate.probes.canary import Canary
from cellgate.proxy.control.containment import HeldRequest
from cellgate.proxy.control.explain import header_line
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.defects import guarded
from cellgate.proxy.request.ports import (
    FAILED_ALREADY,
    NOT_QUEUED,
    Forged,
    GateFault,
    Generated,
    ImpossibleUsage,
    Left,
    Pending,
    PickRequest,
    Refuses,
    Report,
    Resumed,
    Retried,
    TracedRequest,
    Waiter,
)
from cellgate.router.backlog import Abandoned
from cellgate.router.cost_model import Usage
from cellgate.router.error_share import ALSO_OF_OTHERS_S
from cellgate.router.nouns import Ask, Evidence, Outcome, Refusal, Sign, SplitStep, Strength
from cellgate.router.queue import Ticket
from cellgate.router.shares import left_to_read
from cellgate.router.unit_state import Lease, UnitState

COOL_S = 1.0
"""A unit that answered with an error, as others do not, gets no requests for this long, if there is another.
"""
ERRORS_IN_A_ROW = 2
"""After so many errors in a row a canary shows whether a unit takes anything new."""
_FAILED_MAX = 64
_BUSY, _LEFT = Outcome.BUSY, Outcome.CLIENT_LEFT
TAKEN = Failure(
    FailureKind.RESPONSE_TAKEN, "a stored response has this id; send another one, or none", param="request_id"
)
_REFUSES_ALL = (FailureKind.UNIT_ERROR, FailureKind.BUSY, FailureKind.FALSE_BUSY)
"""So answers an engine that takes nothing new, as long as it runs."""
_ONE_IS_NONE = {FailureKind.UNIT_ERROR: Strength.WEAK, FailureKind.CLOSED_EARLY: None}
"""Strong evidence only one after the other; and what one is alone. When a connection is closed a restart
is suspected already, and a canary is sent."""
_EQUALS_FAIL_SO = (
    FailureKind.CLOSED_EARLY,
    FailureKind.GARBAGE,
    FailureKind.UNIT_ERROR,
    FailureKind.FIRST_EVENT_ERROR,
    FailureKind.STREAM_ERROR,
    FailureKind.TRUNCATED,
)
"""So equals may fail that work: at what they are asked, or by chance."""


class LocalDispatcher:
    """The dispatcher of one control plane."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        """Used for room that has appeared, refusals and evidence."""
        self._board = plane.board
        self._containment = plane.containment
        self._router = plane.router
        self._routing = plane.routing
        self._answered = plane.last_requests.answered.append
        self._metrics = plane.metrics
        self._now = plane.now
        self._errors: dict[str, tuple[float, int]] = {}
        """Since when units have answered new requests with errors alone, and how many."""
        self._failed: dict[FailureKind, dict[str, float]] = {}
        """When units last failed so: the last one at the end."""

    # -- units for requests --------------------------------------------------------------------------------

    def acquire(self, request: PickRequest, waiter: Waiter) -> Lease | Failure | Pending:
        """A lease, or why there is none. Pending: the waiter gets the result later, once."""
        if request.ask.follows is not None or request.ask.wanted_id is not None:
            bound = self._bound(request)
            if bound is None:
                acquire = partial(self._acquire_found, request, waiter)
                search = self._plane.search.begin(request.ask, waiter, acquire, self.released)
                return self._plane.stored.unknown(request.ask) if search is None else search
            if isinstance(bound, Failure):
                return bound
            request = bound
        return self._acquire(request, waiter)

    def _acquire_found(self, request: PickRequest, waiter: Waiter) -> Lease | Failure | Pending:
        """The same for what was searched for."""
        bound = self._bound(request)
        if bound is None:
            return self._plane.stored.unknown(request.ask)
        return bound if isinstance(bound, Failure) else self._acquire(bound, waiter)

    def _acquire(self, request: PickRequest, waiter: Waiter) -> Lease | Failure | Pending:
        if request.must_wait:
            found: Lease | Refusal = Refusal.FULL
        elif request.units is not None or self._containment.watchful:
            found = self._pick(request)
        else:
            found = self._router.pick(
                request.ask, self._now(), request.tried, evicted=request.moved, retry=request.draws
            )
        if isinstance(found, Lease):
            if request.explain_since:
                self._explain(found, request)
            return found
        if found is Refusal.POISON:
            return self._containment.failure(request.ask, request.tried)
        place = self._wait(request, found, waiter)
        if isinstance(place, Lease):
            if request.explain_since:
                self._explain(place, request)
            return place
        if not isinstance(place, Refusal):
            return place
        return NOT_QUEUED if request.must_wait else self._refused(request, place)

    def acquire_other(self, request: PickRequest, _waiter: Waiter) -> Lease | Refusal:
        """Another unit for a request whose unit answered with a failure: at once, or not at all."""
        bound = self._bound(request)
        if bound is None or isinstance(bound, Failure):
            return Refusal.NO_UNIT
        found = self._pick(bound)
        if request.explain_since and isinstance(found, Lease):
            self._explain(found, request)
        return found

    def paid_retries(self) -> int:
        """How many requests, in flight or waiting, draw on the retry budget."""
        return self._board.retries_in_flight + self._router.queue.retries

    def _bound(self, request: PickRequest) -> PickRequest | Failure | None:
        """The request, bound to the unit that made the response it follows. None: that is not known here."""
        if rivals := self._plane.stored.rivals(request.ask):
            request = request._replace(tried=(*request.tried, *rivals))
            if self._board.units.keys() <= set(request.tried):
                return TAKEN
        ask = self._plane.stored.bind(request.ask)
        if not isinstance(ask, Ask):
            if request.units is None:
                if ask is not None:
                    self._plane.on_lost_response(request.ask)
                return ask
            # Who chose the unit has the token: a gate that knows which one made the response, and for whom.
            ask = request.ask._replace(unit=None)
        return request._replace(ask=ask)

    def _pick(self, request: PickRequest) -> Lease | Refusal:
        """A unit with room, now."""
        if request.units is not None:
            return self._pick_in_order(request, request.units)
        ask, tried = request.ask, request.tried
        if self._containment.watchful:
            return self._containment.pick(ask, tried, evicted=request.moved, retry=request.draws)
        return self._router.pick(ask, self._now(), tried, evicted=request.moved, retry=request.draws)

    def _pick_in_order(self, request: PickRequest, units: tuple[str | None, ...]) -> Lease | Refusal:
        found: Lease | Refusal = Refusal.NO_UNIT
        for unit in units:
            found = self._pick(request._replace(ask=_placed(request.ask, unit), units=None))
            if isinstance(found, Lease):
                break
        return found

    def _wait(self, request: PickRequest, why: Refusal, waiter: Waiter) -> Lease | Refusal | QueuedRequest:
        """A place in the queue, if waiting may help; else why not; or a lease on a unit that has room."""
        ask, tried = request.ask, frozenset(request.tried)
        if request.units is not None:
            if why is Refusal.FULL:
                # The client that chose the unit may choose another one with room instead of waiting.
                return why
            ask = _placed(ask, request.units[-1])
        queue = QueuedRequest(self, request, waiter, self._now())
        if why is Refusal.HELD:
            held = self._containment.hold(ask, request.tried, queue.on_result)
            if held is None:
                return Refusal.NO_UNIT
            queue.entry = held
            return queue
        # It lost its unit through no fault of its own, or the only unit waits for a canary, or all units for
        # another way to them.
        moved = request.moved or why is Refusal.UNSURE or self._board.is_changing
        may_wait = why in (Refusal.FULL, Refusal.ON_HOLD, Refusal.STALLED)
        if not may_wait and not (moved and self._board.could_serve(ask, tried)):
            return why
        place = self._router.wait(
            ask,
            queue.queued_at,
            tried,
            queue.on_result,
            size=request.size,
            moved=moved,
            retry=request.draws,
            # Containment then decides which request may get which unit.
            must_wait=request.must_wait or self._containment.watchful,
            loan=request.loan,
            waited_s=request.waited_s,
        )
        if isinstance(place, Lease | Refusal):
            return place
        queue.entry = place
        self._plane.room()
        return queue

    def resolve(self, queue: QueuedRequest, found: Lease | Refusal) -> None:
        """Pass the result on to the waiter."""
        request, containment = queue.request, self._containment
        waited_s = self._now() - queue.queued_at
        self._routing.waited(waited_s)
        if containment.watchful and (found is Refusal.POISON or containment.bars(request.ask, request.tried)):
            queue.give_back()
            queue.waiter.on_result(containment.failure(request.ask, request.tried))
        elif isinstance(found, Lease):
            self._plane.last_requests.waited.append(((found.unit, found.opened_at), waited_s))
            if request.explain_since:
                self._explain(found, request)
            queue.waiter.on_result(found)
        else:
            queue.waiter.on_result(self._refused(request, found))

    def leave(self, place: Ticket | HeldRequest) -> None:
        """Remove a request that waits no more."""
        if isinstance(place, HeldRequest):
            self._containment.leave(place)
        else:
            self._router.queue.remove(place)

    def _refused(self, request: PickRequest, why: Refusal) -> Failure:
        return FAILED_ALREADY if request.has_failure else self._plane.explain(why, request.ask)

    def _explain(self, lease: Lease, request: PickRequest) -> None:
        """Attach the explanation to a lease, at once: it describes the present state."""
        try:
            lease.lines = header_line(lease, lease.opened_at - request.explain_since)
        except Exception:
            # The exchange does not have the lease yet.
            self.released(lease, Outcome.GATE_ERROR)
            raise

    # -- what becomes of them ------------------------------------------------------------------------------

    def committed(self, lease: Lease, *, resumed: bool = False, response_id: str = "") -> None:
        self._board.prove(lease)
        if lease.ask.stream and not resumed:
            self._routing.shown(lease)
            if self._router.queue.size:
                # One prompt less to compute.
                self._plane.room()
        if response_id:
            self._plane.stored.made(response_id, lease.unit, lease.ask.payer)

    def completed(self, lease: Lease, events: int, usage: Usage | None, at: float | None = None) -> None:
        """A generation ended without a failure: it shows progress, and the cost model learns from it."""
        state, ask, job = lease.unit_state, lease.ask, lease.job
        now, costs, opened_at = self._now() if at is None else at, state.costs, lease.opened_at
        if now > state.progress_at:
            state.progress_at = now
        if costs.errors.counts:
            costs.errors.worked(now)
        tokens, is_stream = events, ask.stream
        if usage is not None:
            # Some engines put several tokens into an event.
            tokens = usage.answer_tokens
            costs.used(ask, job, usage)
            if is_stream:
                costs.rates.streamed(events, tokens)
            if costs.known is not None:
                costs.computed(ask, usage, opened_at, lease.first_at)
        elif is_stream:
            tokens = int(events * costs.rates.event_tokens.value)
        if is_stream or usage is not None:
            self._board.answer_lengths.learn(ask.model, tokens)
        if not is_stream:
            if usage is not None:
                state.step_times.answered(job.uncached_tokens, now - opened_at, usage.answer_tokens)
            costs.last_plain = lease, usage, now
        elif not lease.was_paused:
            costs.streamed(tokens - 1, now - lease.first_at, lease.beside)
        self._routing.completed(lease, usage, tokens)
        self._answered((opened_at, lease.first_at, now, job.uncached_tokens, lease.unit))
        if not state.is_healthy_unchanged:
            self._observe(state, Sign.GOOD, Strength.STRONG, "it finished a generation")

    def released(self, lease: Lease, outcome: Outcome, at: float | None = None) -> None:
        """Close a lease and count the attempt. `at`: when it ended, if not just now."""
        now = self._now() if at is None else at
        if outcome is _LEFT and not lease.committed:
            # Closed, it no longer tells what is only awaited.
            lease.unit_state.unread.leave(
                Abandoned(lease.opened_at, now, lease.ask.payer, left_to_read(lease))
            )
        self._board.close(lease, now)
        if outcome is _BUSY:
            lease.unit_state.lower_limit(now)
        self._metrics.attempt(lease.unit, outcome)
        if self._containment.watchful:
            self._containment.closed(lease, outcome)
        if self._router.queue.size:
            self._plane.room()

    def adopt(self, unit: str, ask: Ask, at: float, *, retry: bool) -> Lease | None:
        """Open a lease that the previous control process gave; None: the unit is not known."""
        return self._board.open(unit, ask, at, retry=retry) if unit in self._board.units else None

    def withdrawn(self, lease: Lease) -> None:
        """Close a lease that was not used."""
        self._board.close(lease, self._now())
        self._plane.room()

    def blame(self, lease: Lease, failure: Failure, tokens: int, shown: int, *, judged: bool = True) -> None:
        """An attempt has failed: evidence, if its unit is at fault; its prompt may have ended the unit."""
        if judged:
            self._judge(lease, failure)
        if failure.kind is FailureKind.ABORTED:
            self._plane.hold_watch.doubt(lease.unit_state)
        self._containment.broke(lease, failure.kind, tokens, shown)

    def _judge(self, lease: Lease, failure: Failure) -> None:
        row, now = failure.kind.row, self._now()
        if failure.kind is FailureKind.MODEL_GONE:
            self._plane.ask_for_models()
            return
        errors = lease.unit_state.costs.errors
        if row.strength is not None:
            errors.failed(now)
        is_like_others = row.strength is not None and errors.is_by_chance(now)
        if row.retry.cools and not (is_like_others or lease.unit_state.retired):
            self._board.cool_down(lease.unit, now + COOL_S)
        strength = row.strength
        if failure.kind in _REFUSES_ALL and shuts_down(failure.message.partition(" answered ")[2]):
            # A client may have made it say so, but not to a canary.
            self._plane.prober.look_now(lease.unit, Canary.name)
        elif failure.kind is FailureKind.UNIT_ERROR:
            self._look_into_errors(lease.unit_state, now)
        state = lease.unit_state
        if failure.kind in _ONE_IS_NONE:
            # One end of several requests is one event.
            is_later = lease.opened_at >= state.last_error_at
            has_only_errors = state.has_only_errors(now)
            strength = Strength.STRONG if has_only_errors and is_later else _ONE_IS_NONE[failure.kind]
        if (
            failure.kind in _EQUALS_FAIL_SO
            and self._is_shared(lease, failure.kind, now)
            and strength is not None
        ):
            # Nobody is suspected for what others do as well: its canary alone decides.
            self._plane.prober.look_now(lease.unit, Canary.name)
            strength = None
        if strength is not None:
            self._observe(lease.unit_state, Sign.BAD, strength, failure.message)

    def _is_shared(self, lease: Lease, kind: FailureKind, now: float) -> bool:
        """Record a failure; whether another unit that could have had the request has lately failed so."""
        failed = self._failed.setdefault(kind, {})
        failed.pop(lease.unit, None)
        is_shared = False
        for name, at in reversed(failed.items()):
            if now - at > ALSO_OF_OTHERS_S:
                break
            peer = self._board.units.get(name)
            if peer is not None and peer.serves_model(lease.ask.model):
                is_shared = True
                break
        failed[lease.unit] = now
        if len(failed) > _FAILED_MAX:
            del failed[next(iter(failed))]
        return is_shared

    def _look_into_errors(self, state: UnitState, now: float) -> None:
        """Send a canary at once to a unit that has answered a request with an error and has nothing else to
        do, or nothing but errors for several in a row: one that shuts down goes on with what it has.
        """
        since, count = self._errors.get(state.unit.name, (0.0, 0))
        if state.unread.until > since:
            # It has begun to answer a request that came later.
            since, count = now, 0
        self._errors[state.unit.name] = since, count + 1
        if state.in_flight <= 1 or (count + 1) % ERRORS_IN_A_ROW == 0:
            self._plane.prober.look_now(state.unit.name, Canary.name)

    def _observe(self, state: UnitState, sign: Sign, strength: Strength, reason: str) -> None:
        # A new unit under the same name is not responsible for the old one's requests.
        if not state.retired:
            now = self._now()
            self._plane.prober.observe(Evidence(state.unit.name, sign, strength, "request", reason, now))


class QueuedRequest:
    """A request that waits: in the queue, or for containment."""

    __slots__ = ("_dispatcher", "_found", "entry", "queued_at", "request", "waiter")

    def __init__(
        self, dispatcher: LocalDispatcher, request: PickRequest, waiter: Waiter, queued_at: float
    ) -> None:
        self._dispatcher = dispatcher
        self._found: Lease | Refusal | None = None
        self.entry: Ticket | HeldRequest | None = None
        self.queued_at = queued_at
        self.request = request
        self.waiter = waiter

    def on_result(self, found: Lease | Refusal) -> None:
        """The result, from the queue or from containment."""
        self._found, self.entry = found, None
        guarded(self.waiter, self._dispatcher.resolve, self, found)

    def cancel(self) -> None:
        place, self.entry = self.entry, None
        if place is not None:
            self._dispatcher.leave(place)
        self.give_back()

    def give_back(self) -> None:
        """Close a lease that was found and is not used."""
        found, self._found = self._found, None
        if isinstance(found, Lease) and not found.closed:
            self._dispatcher.released(found, Outcome.GATE_ERROR)


def _placed(ask: Ask, unit: str | None) -> Ask:
    """The ask as one for that unit."""
    return ask if unit is None else ask._replace(unit=unit)


class LocalReports:
    """Reports to a control plane of this process, taken at once."""

    def __init__(self, plane: Plane) -> None:
        metrics = plane.metrics
        self.restart_suspected = plane.suspect_restart
        """A unit closed a connection unexpectedly."""
        self.finished = metrics.finished
        """A request is over. It is counted with one call."""
        self._takes: dict[type[Report], Callable[..., object]] = {
            TracedRequest: metrics.traced,
            Generated: plane.generations.answered,
            Retried: metrics.retry,
            Resumed: plane.continuations.record,
            Left: plane.events.became,
            SplitStep: lambda *step: plane.link_watch.apply(SplitStep(*step)),
            Refuses: plane.refused_watch.take,
            ImpossibleUsage: plane.impossible_usage,
            Forged: metrics.count_forged,
            GateFault: plane.gate_fault,
        }

    def send(self, report: Report) -> None:
        self._takes[type(report)](*report)
