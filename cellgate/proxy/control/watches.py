"""Checks on each tick of the gate what depends on time: stalls, panic, outliers.

1. A unit that has work and makes no progress stalls: strong evidence, and its engine's counters are read at
   once.
2. A gate that lags counts no bad evidence for a while, because good evidence may not have been read yet.
3. The Board decides about panic and degraded units; this module reports them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from cellgate.probes.base import Fetch, FetchError, Reply
from cellgate.probes.canary import AWAKE_S, Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.engines import engine
from cellgate.probes.readiness import QuiescenceProbe
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.observe.events import Action, ActionKind, EventLog
from cellgate.proxy.observe.routing_metrics import PairTally
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.request.answer_shape import SHAPES
from cellgate.proxy.request.routes import find_route
from cellgate.router import health
from cellgate.router.board import Board, compare_speeds
from cellgate.router.health import Stall, find_rank_stall, find_stall, is_on, still_s
from cellgate.router.judge import STALL_SOURCE
from cellgate.router.nouns import (
    ORPHAN_S,
    ORPHANED,
    RELEASED,
    TRANSFERRED,
    Evidence,
    Hold,
    Quiescence,
    Sign,
    SplitStep,
    Strength,
    Verdict,
)
from cellgate.router.opinions import REFUSING_SOURCE, Refusing
from cellgate.router.outliers import COMPARE_S
from cellgate.router.prefill_decode import AVOID_S
from cellgate.router.unit_state import Lease, UnitState
from cellgate.router.uses import use_of

LAG_S = 0.25
"""A tick that is this late shows that the gate lags."""
DISTRUST_S = 1.0
QUIET_S = 0.25
"""After this time without a token, the engine's counters are read this often."""
BESIDE_S = 5.0
"""A unit gets a canary for a request that hangs at most this often."""

_REPORT_EVERY_S = 10.0
"""Faults of the gate are reported at most once in this time."""


class StallWatch:
    """The checks of one gate."""

    def __init__(self, board: Board, watch: Prober, events: EventLog, now: Callable[[], float]) -> None:
        self._board = board
        self._prober = watch
        self._events = events
        self._now = now
        self.gate_faults = 0
        """How many connections the gate could not open by its own fault."""
        self._asked_at: dict[str, float] = {}
        """When a unit was last sent a canary beside its requests."""
        self._compare_at = 0.0
        self._panic_at: float | None = None
        self._lag_reported_at = -_REPORT_EVERY_S
        self._fault_reported_at = -_REPORT_EVERY_S

    def tick(self, now: float, lag_s: float) -> None:
        """Check every unit; `lag_s` is how late this tick is."""
        if lag_s > LAG_S:
            self._report_lag(lag_s, now)
        for state in self._board:
            if state.leases or state.costs.last_plain is not None:
                self._board.uses.note(state, now)
        self._board.tick(now)
        for state in self._board:
            if state.case.verdict is Verdict.UP and not is_on(state.hold):
                if state.leases:
                    self._ask_beside(state, now)
                elif state.is_unreachable(now):
                    self._ask_mute(state, now)
            if state.leases and now - state.quiet_since >= QUIET_S and not is_on(state.hold):
                self._check_stall(state, now)
            elif state.leases and state.ranks.count:
                self._check_ranks(state, now)
        if self._board.panic_at != self._panic_at:
            self._report_panic(now)
        if now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            for state in compare_speeds(self._board.units.values(), self._board.rules):
                self._report_outlier(state)

    def gate_fault(self, reason: str) -> None:
        """The gate could not open a connection: no file descriptors, no ports, or no resolver."""
        self.gate_faults += 1
        if self._now() - self._fault_reported_at > _REPORT_EVERY_S:
            self._fault_reported_at = self._now()
            self._report(
                "gate_fault",
                None,
                f"{reason}; no unit is blamed; check the gate's file descriptor limit and its resolver",
            )

    def _check_stall(self, state: UnitState, now: float) -> None:
        # The counters show whether the engine works on requests of others.
        if state.counters_at:
            self._prober.look_now(state.unit.name, EngineMetrics.name)
        state.is_alone = self._board.is_alone(state)
        state.record_stall(still_s(state, now))
        found = find_stall(state, now, self._board.rules)
        if found is None:
            self._check_ranks(state, now)
        else:
            self._report_stall(state, found, "", now)

    def _check_ranks(self, state: UnitState, now: float) -> None:
        if state.ranks.count and (found := find_rank_stall(state, now, self._board.rules)) is not None:
            rank, stall = found
            self._report_stall(state, stall, f"data parallel rank {rank} ", now)

    def _ask_beside(self, state: UnitState, now: float) -> None:
        """Send a canary beside requests: to a unit that gets its first one after a while, and in the way of
        one that hangs while later ones are answered.
        """
        name, lease, asked_at = state.unit.name, None, self._asked_at.get(state.unit.name, -BESIDE_S)
        is_dark = now - state.life_at >= AWAKE_S and now - state.work_at >= QUIET_S
        if is_dark and asked_at < state.quiet_since:
            lease = next(iter(state.leases))
        elif now - asked_at >= BESIDE_S:
            lease = self._board.uses.hanging(state, now)
        if lease is not None:
            self._asked_at[name] = now
            state.asks_next = use_of(lease.ask)
            self._prober.look_now(name, Canary.name)

    def _ask_mute(self, state: UnitState, now: float) -> None:
        """Send a canary to an idle unit that does not answer probes any more, once."""
        name = state.unit.name
        if self._asked_at.get(name, -1.0) < max(state.heard_at, state.life_at):
            self._asked_at[name] = now
            self._prober.look_now(name, Canary.name)

    def _report_stall(self, state: UnitState, found: Stall, whose: str, now: float) -> None:
        if now - state.stall_reported_at < found.limit_s:
            return
        state.stall_reported_at = now
        reason = (
            f"{whose}stalled for {found.stalled_s:.1f} s with {found.waiting} requests in flight; "
            f"the limit is {found.limit_s:.1f} s"
        )
        self._prober.observe(Evidence(state.unit.name, Sign.BAD, Strength.STRONG, STALL_SOURCE, reason, now))

    def _report_lag(self, lag_s: float, now: float) -> None:
        self._prober.trust_from(now + DISTRUST_S)
        if now - self._lag_reported_at > _REPORT_EVERY_S:
            self._lag_reported_at = now
            self._report(
                "lag",
                None,
                f"a timer fired {lag_s:.2f} s late; evidence against units is not counted for "
                f"{DISTRUST_S:g} s; if this repeats, give the gate more CPU or less traffic",
            )

    def _report_panic(self, now: float) -> None:
        began_at, self._panic_at = self._panic_at, self._board.panic_at
        limit_s = self._board.rules.panic_max_s
        if began_at is None:
            mute = [
                state.unit.name for state in self._board if state.is_usable() and state.is_unreachable(now)
            ]
            self._report(
                "panic",
                None,
                f"{len(mute)} units do not answer at all ({', '.join(mute[:5])}); the gate assumes that its "
                f"own network is cut off and keeps them in rotation for up to {limit_s:g} s; check it",
            )
        else:
            held_s = now - began_at
            why = "which is the limit" if held_s >= limit_s else "until units answered again"
            self._report("panic_over", None, f"units were kept in rotation for {held_s:.1f} s, {why}")

    def _report_outlier(self, state: UnitState) -> None:
        degraded, name = state.outlier.degraded, state.unit.name
        if not degraded:
            self._report("recovered", name, "its tokens are as fast as those of the others")
            return
        self._report(
            "degraded",
            name,
            f"a token takes {1.0 / (1.0 - degraded):.1f} times as long there as on the other units of cell "
            f"{state.unit.cell}; its share of requests falls by {degraded:.0%}",
        )

    def _report(self, kind: ActionKind, unit: str | None, detail: str) -> None:
        self._events.add(Action(kind, "gate", unit, detail))


# Finds out when units stand still on purpose, and acts on it. router/health.py decides what a hold means.
#
# 1. An engine is asked before a suspicion counts: as soon as its requests, or a canary, get no answer.
# 2. When a hold begins, requests without a token move to units that can take them; all others stay.
# 3. When it ends, a canary is sent at once, and the unit gets requests when it shows work.


MOVE_S = 1.0
"""Requests without a token leave a unit on hold after this time without progress: until then it may be
finishing them."""
WAITING_SHARE = 0.5
"""A unit that has had requests without a token for so much of the last seconds (some two in a row) may be
finishing what it has, and take no more."""


class HoldWatch:
    """The holds of one gate. `evict` is called with requests that are to move to other units, `changed`
    whenever a hold has begun or ended.
    """

    def __init__(
        self,
        board: Board,
        prober: Prober,
        events: EventLog,
        now: Callable[[], float],
        *,
        evict: Callable[[tuple[Lease, ...]], None],
        changed: Callable[[], None],
    ) -> None:
        self._board = board
        self._prober = prober
        self._events = events
        self._now = now
        self._evict = evict
        self._changed = changed

    def hear(self, state: UnitState, said: Quiescence) -> None:
        """An engine has said whether it stands still."""
        has_changed = health.hear(state, said)
        if state.hold is None:
            return
        if has_changed and not state.hold.ended_at:
            self._report_begin(state, state.hold)
        elif has_changed:
            self._report_end(state, state.hold)
        if state.hold.ended_at:
            self._prober.look_now(state.unit.name, Canary.name)

    def doubt(self, state: UnitState) -> None:
        """An engine has aborted a request: it may be paused, and gets no more of them before it says so or
        shows work.
        """
        if state.can_hold and state.hold is None:
            state.hold = health.doubt(self._now())
            self._changed()
        self._prober.look_now(state.unit.name, QuiescenceProbe.name)

    def ask(self, state: UnitState) -> None:
        """Its engine has been told to stand still: let it say so."""
        self._prober.look_now(state.unit.name, QuiescenceProbe.name)

    def prove(self, state: UnitState) -> None:
        """Its engine has been told to go on: the unit has to show work before it gets requests."""
        now = self._now()
        if health.is_on(state.hold):
            self.hear(state, Quiescence(state.unit.name, None, now))
        else:
            state.hold = health.doubt(now)
            self._prober.look_now(state.unit.name, Canary.name)

    def tick(self, now: float) -> None:
        """Ask the units that get silent; apply what depends on time."""
        for state in self._board:
            if state.hold is not None:
                self._pass_time(state, now)
            elif (state.leases or state.prefilling > WAITING_SHARE) and _is_silent(state, now):
                self._ask_if_it_can_say(state)
        for name in self._prober.unanswered(Canary.name, QUIET_S, now):
            found = self._board.units.get(name)
            if found is not None and found.hold is None:
                self._ask_if_it_can_say(found)

    def _ask_if_it_can_say(self, state: UnitState) -> None:
        if engine(state.engine).holds:
            self.ask(state)

    def _pass_time(self, state: UnitState, now: float) -> None:
        before = state.hold
        assert before is not None
        if health.pass_time(state, now, self._board.rules):
            self._report_end(state, before)
            self._prober.look_now(state.unit.name, Canary.name)
        elif state.hold is None:
            self._changed()
        elif health.is_on(state.hold) and now - max(state.life_at, before.since) > MOVE_S:
            self._move(state, now)

    def _move(self, state: UnitState, now: float) -> None:
        """Move the requests without a token that another unit could take now."""
        others = [other for other in self._board if other.is_usable() and other.has_room(now, 0.0)]
        moving = tuple(
            lease
            for lease in state.leases
            if not (lease.committed or lease.evicted) and any(other.serves(lease.ask) for other in others)
        )
        for lease in moving:
            lease.evicted = True
        if moving:
            self._evict(moving)

    def _report_begin(self, state: UnitState, began: Hold) -> None:
        detail = (
            f"its engine is {began.kind.value}; it gets no requests and is not judged, "
            f"for up to {self._board.rules.hold_limit_s:g} s; {state.in_flight} requests stay in flight there"
        )
        self._events.add(Action("hold", "its engine", state.unit.name, detail))
        self._changed()

    def _report_end(self, state: UnitState, ended: Hold) -> None:
        held_s = self._now() - ended.since
        why = f"it was {ended.kind.value} for {held_s:.1f} s"
        if state.is_hold_spent:
            why += ", which is the limit, and is judged again, whatever its engine says"
        self._events.add(Action("hold_over", "its engine", state.unit.name, f"{why}; a canary is sent"))
        self._changed()


def _is_silent(state: UnitState, now: float) -> bool:
    """Whether its requests have had no answer for a moment; or new ones for a while, before it is known what
    its engine can say.
    """
    if state.leases and now - state.quiet_since >= QUIET_S:
        return True
    return state.prefilling > WAITING_SHARE and not state.can_hold


# Applies what becomes of split requests to the links of their pairs, and reports links that fail or
# recover.
#
# Counted in plain numbers, for proxy/observe/routing_metrics.py.


class LinkWatch:
    """The links of one gate. `steps` counts steps by pair and kind, `pairs` has what was transferred; both of
    units on the Board.
    """

    def __init__(self, board: Board, events: EventLog, now: Callable[[], float]) -> None:
        self._board = board
        self._events = events
        self._now = now
        self._orphaned_at: deque[float] = deque()
        self.steps: Counter[tuple[str, str, str]] = Counter()
        self.pairs: dict[tuple[str, str], PairTally] = {}
        self._units = board.units

    def apply(self, step: SplitStep) -> None:
        """A step was reported."""
        now, pair = self._now(), (step.prefiller, step.decoder)
        if self._units is not self._board.units:
            # It was configured since.
            self._forget_gone()
        self.steps[(*pair, step.kind)] += 1
        if step.kind == ORPHANED:
            self._orphaned_at.append(now)
            self.orphans()
            return
        if step.kind == RELEASED:
            if self._orphaned_at:
                self._orphaned_at.popleft()
            return
        was_failing = pair in self._board.pairs.links and self._board.pairs.links[pair].failures > 0
        has_failed = self._board.pairs.apply(step, now)
        who = f"link {step.prefiller} -> {step.decoder}"
        if has_failed:
            more = f"this pair is avoided for {AVOID_S:.0f} s at first, both units stay in rotation"
            detail = one_line(f"{who}: {step.reason}; {more}")
            self._events.add(Action("link_lost", "gate", step.decoder, detail))
        elif step.kind == TRANSFERRED:
            self.pairs.setdefault(pair, PairTally()).add(step.tokens, step.seconds)
            if was_failing:
                self._events.add(Action("link_back", "gate", step.decoder, who))

    def orphans(self) -> int:
        """Prompts whose blocks are held for nobody, as far as is known."""
        while self._orphaned_at and self._now() - self._orphaned_at[0] > ORPHAN_S:
            self._orphaned_at.popleft()
        return len(self._orphaned_at)

    def _forget_gone(self) -> None:
        units = self._units = self._board.units
        self.steps = Counter({key: n for key, n in self.steps.items() if {key[0], key[1]} <= units.keys()})
        self.pairs = {pair: tally for pair, tally in self.pairs.items() if set(pair) <= units.keys()}


# Units that refuse what others serve: takes them out, and back once they serve such a request.
#
# router/opinions.py decides that a unit refuses (nearly) all that is asked of it. It is then DOWN with an
# open
# fault, which no canary can disprove: those may pass all the time. One request that it refused is kept
# while
# the unit is out, and sent to it once a second, for a few tokens; a good answer ends the fault. It is sent
# to
# no other unit, and its client's headers are not kept.


TRY_EVERY_S = 1.0
"""How often a unit that is out gets the request that was kept."""
WITHOUT_S = 30.0
"""So long a unit is out where no request could be kept."""
TOLD_EVERY_S = 60.0
"""What a unit refuses, while it serves other requests, is told at most so often."""
TIMEOUT_S = 60.0
SHORT_S = 3.0
"""The timeout beside one that takes long: a unit that hangs may be mended meanwhile."""
_TOKENS = 24
_ANSWER_BYTES = 256 << 10
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(slots=True)
class _Refused:
    """A unit that is out. `body` is the request that was kept; empty: none was."""

    state: UnitState
    target: str
    body: bytes
    since: float
    next_at: float
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class RefusedWatch:
    """Of one control plane. `observe` takes evidence."""

    def __init__(
        self,
        board: Board,
        events: EventLog,
        observe: Callable[[Evidence], object],
        fetch_of: Callable[[UnitState], Fetch],
        now: Callable[[], float],
    ) -> None:
        self._board = board
        self._events = events
        self._observe = observe
        self._fetch_of = fetch_of
        self._now = now
        self._out: dict[str, _Refused] = {}
        self._told: dict[str, float] = {}

    def take(self, found: Refusing, target: str, body: bytes) -> None:
        """A unit refuses what others serve; `body` is such a request."""
        state, now = self._board.units.get(found.unit), self._now()
        if state is None:
            return
        if not found.is_out:
            if now - self._told.get(found.unit, -TOLD_EVERY_S) >= TOLD_EVERY_S:
                self._told[found.unit] = now
                self._events.add(Action("refuses", "gate", found.unit, f"{found.reason}; others get these"))
            return
        if not self._has_others(state):
            # The one that served it has left meanwhile: any answer is better than none.
            return
        if found.unit not in self._out:
            self._out[found.unit] = _Refused(state, target, body and shortened(body), now, now + TRY_EVERY_S)
        self._tell(state, Sign.BAD, Strength.FATAL, found.reason)

    def tick(self, now: float) -> None:
        """Try the units that are out."""
        for name, refused in list(self._out.items()):
            state = refused.state
            if self._board.units.get(name) is not state:
                self._drop(name)
            elif not self._has_others(state):
                self._clear(name, "no other unit is there that could serve what it refuses")
            elif not refused.body and now - refused.since > WITHOUT_S:
                self._clear(name, f"it is tried again after {WITHOUT_S:.0f} s")
            elif refused.body and len(refused.tasks) < 2 and now >= refused.next_at:
                refused.next_at = now + TRY_EVERY_S
                timeout_s = SHORT_S if refused.tasks else TIMEOUT_S
                task = asyncio.get_running_loop().create_task(self._try(name, refused, timeout_s))
                refused.tasks.add(task)
                task.add_done_callback(refused.tasks.discard)

    def close(self) -> None:
        """Forget all."""
        for name in list(self._out):
            self._drop(name)

    async def _try(self, name: str, refused: _Refused, timeout_s: float) -> None:
        try:
            reply = await self._fetch_of(refused.state)(
                "POST", refused.target, body=refused.body, timeout_s=timeout_s, max_bytes=_ANSWER_BYTES
            )
        except FetchError:
            return
        if self._out.get(name) is refused and is_good(refused.target, refused.body, reply):
            self._clear(name, "it serves what it refused")

    def _clear(self, name: str, reason: str) -> None:
        state = self._out[name].state
        self._drop(name)
        self._tell(state, Sign.GOOD, Strength.STRONG, reason)

    def _drop(self, name: str) -> None:
        for task in self._out.pop(name).tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _tell(self, state: UnitState, sign: Sign, strength: Strength, reason: str) -> None:
        self._observe(Evidence(state.unit.name, sign, strength, REFUSING_SOURCE, reason, self._now()))

    def _has_others(self, state: UnitState) -> bool:
        """Whether another unit in rotation serves one of its models."""
        return any(
            other is not state
            and other.is_usable()
            and (not state.models or not other.models or not state.models.isdisjoint(other.models))
            for other in self._board
        )


def shortened(body: bytes) -> bytes:
    """The request for a few tokens; empty: it is no JSON object."""
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return b""
    if not isinstance(data, dict):
        return b""
    data.pop("min_tokens", None)
    for name in [name for name in _LIMITS if name in data]:
        data[name] = _TOKENS
    return orjson.dumps(data)


def is_good(target: str, body: bytes, reply: Reply) -> bool:
    """Whether this answers the request."""
    shape = SHAPES.get(find_route(target.partition("?")[0].encode()).name)
    if reply.status >= 300 or shape is None:
        return reply.status < 300
    content_type = reply.headers.get("content-type", "").encode()
    is_events = content_type.startswith(b"text/event-stream")
    streams = orjson.loads(body).get("stream") is True
    return not shape.why_doubtful(reply.body, is_events=is_events, streams=streams, content_type=content_type)
