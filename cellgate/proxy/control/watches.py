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
from math import inf
from typing import Any, NamedTuple

import orjson

from cellgate.probes.base import Fetch, FetchError, Reply
from cellgate.probes.canary import AWAKE_S, Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.engines import APIS, at, engine
from cellgate.probes.readiness import QuiescenceProbe
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.observe.events import Action, ActionKind, EventLog
from cellgate.proxy.observe.routing_metrics import PairTally
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.request.answer_shape import ENDLESS, REPEATS, SHAPES, loops
from cellgate.proxy.request.routes import find_route
from cellgate.router import health
from cellgate.router.board import Board, compare_speeds, use_of
from cellgate.router.health import Stall, find_rank_stall, find_stall, is_on, still_s
from cellgate.router.judge import STALL_SOURCE
from cellgate.router.nouns import (
    ORPHAN_S,
    ORPHANED,
    RELEASED,
    TRANSFERRED,
    EnginePause,
    Evidence,
    Hold,
    Sign,
    SplitStep,
    Strength,
    Use,
    Verdict,
)
from cellgate.router.opinions import REFUSING_SOURCE, Refusing
from cellgate.router.outliers import COMPARE_S
from cellgate.router.prefill_decode import AVOID_S
from cellgate.router.unit_state import Lease, UnitState

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
        is_dark = now - state.progress_at >= AWAKE_S and now - state.work_at >= QUIET_S
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
        if self._asked_at.get(name, -1.0) < max(state.answered_at, state.progress_at):
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

    def hear(self, state: UnitState, said: EnginePause) -> None:
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
            self.hear(state, EnginePause(state.unit.name, None, now))
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
        elif health.is_on(state.hold) and now - max(state.progress_at, before.since) > MOVE_S:
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
            self.pairs.setdefault(pair, PairTally()).add(step.seconds)
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
# router/opinions.py finds that a unit refuses, or seems to refuse, what it is asked for. It is asked again:
# for that request, and for a plain one of each kind in use. One good answer shows that it lacks something,
# and no more. If none is good it is DOWN with an open fault, which no canary can disprove: those may pass all
# the time. While it is out it gets these requests one after the other, for a few tokens; a good answer ends
# the fault. What a client has sent is sent to no other unit, and its headers are not kept. A unit that says
# one token again and again gets a plain request alone, and so does another one: that may be their model.


TRY_EVERY_S = 1.0
"""How often a unit that is out is asked."""
CHECK_S = 2.0
"""So long the answers of a unit that is asked again are awaited."""
OTHERS_MAX, PEER_S = 3, 4.0
"""So many others are asked the same, where all may be alike, and that much longer."""
CHECK_EVERY_S = 5.0
"""How often a unit is asked again."""
PLAIN_MAX = 3
"""So many plain requests it is asked then."""
WITHOUT_S = 30.0
"""So long a unit is out which can be asked nothing."""
REFUSALS_MAX = 4
"""Kinds of requests that are kept of each unit which refuses them: the last ones."""
TOLD_EVERY_S = 60.0
"""What a unit refuses, while it serves other requests, is told at most so often."""
TIMEOUT_S = 60.0
SHORT_S = 3.0
"""The timeout beside one that takes long: a unit that hangs may be mended meanwhile."""
_TOKENS, _MORE_TOKENS = 24, 40
"""So many are asked for; and where they might all be the same."""
_ANSWER_BYTES = 256 << 10
_NEVER = -inf, False
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class _Asked(NamedTuple):
    """A request that shows whether a unit is well. `may_loop`: even if it says one token all the time."""

    target: str
    body: bytes
    may_loop: bool = True


@dataclass(slots=True)
class _Refused:
    """A unit that is out, and what it is asked."""

    state: UnitState
    found: Refusing
    target: str
    body: bytes
    since: float
    next_at: float
    turn: int = 0
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
        self._checked: dict[str, tuple[float, bool]] = {}
        """When a unit was last asked again, and whether it showed that it serves others."""
        self._checks: dict[str, asyncio.Task[None]] = {}

    def take(self, found: Refusing, target: str, body: bytes) -> None:
        """A unit refuses what others serve; `body` is such a request, or empty."""
        state, now = self._board.units.get(found.unit), self._now()
        if state is None or found.unit in self._out:
            return
        if not found.is_out:
            self._tell_of(state, found)
        elif not self._others(state):
            # The one that served it has left meanwhile: any answer is better than none.
            return
        elif state.meets or (found.is_sure and found.what == REPEATS):
            # Half of a pair can be asked nothing alone.
            if found.is_sure:
                self._take_out(state, found, target, body)
        elif found.unit in self._checks:
            return
        elif now - (checked := self._checked.get(found.unit, _NEVER))[0] >= CHECK_EVERY_S:
            task = asyncio.get_running_loop().create_task(self._check(state, found, target, body))
            self._checks[found.unit] = task
            task.add_done_callback(lambda _: self._checks.pop(found.unit, None))
        elif found.is_sure and checked[1]:
            self._tell_of(state, found)
        elif found.is_sure:
            self._take_out(state, found, target, body)

    def tick(self, now: float) -> None:
        """Try the units that are out."""
        for name, refused in list(self._out.items()):
            state = refused.state
            if self._board.units.get(name) is not state:
                self._drop(name)
            elif not self._others(state):
                self._clear(name, "no other unit is there that could serve what it refuses")
            elif len(refused.tasks) < 2 and now >= refused.next_at:
                refused.next_at = now + TRY_EVERY_S
                self._try_soon(name, refused, now)

    def close(self) -> None:
        """Forget all."""
        for task in self._checks.values():
            task.cancel()
        for name in list(self._out):
            self._drop(name)

    # -- asked again ---------------------------------------------------------------------------------------

    async def _check(self, state: UnitState, found: Refusing, target: str, body: bytes) -> None:
        asked = self._asked(state, found.what, target, body)
        # What it says again and again may be its model: then others do so as well.
        others = self._others(state)[:OTHERS_MAX] if found.what == REPEATS else []
        answers, theirs = await asyncio.gather(
            asyncio.gather(*(self._ask(state, each, CHECK_S) for each in asked)),
            asyncio.gather(*(self._ask(other, each, PEER_S) for other in others for each in asked)),
        )
        self._checked[found.unit] = self._now(), found.what == REPEATS or True in answers
        if found.what == REPEATS and 2 * theirs.count(True) < max(1, len(theirs)):
            return
        if self._board.units.get(found.unit) is not state or not self._others(state):
            return
        if True in answers:
            if found.is_sure:
                self._tell_of(state, found)
            return
        # An answer that never ends is what it may be out for; but it may also be waiting.
        is_endless = found.what in ENDLESS and not (state.load is not None and state.load.waiting)
        bad = len(answers) if is_endless else answers.count(False)
        if found.is_sure:
            self._take_out(state, found, target, body)
        elif bad and bad == len(answers):
            self._take_out(state, found._replace(against=bad + 1, total=bad + 1), target, body)

    def _asked(self, state: UnitState, what: str, target: str, body: bytes) -> list[_Asked]:
        """What shows whether a unit is well: the request that was kept, and plain ones of its kind and of the
        last kinds in use that the unit serves.
        """
        if state.meets:
            return []
        kept = read_object(body)
        model = kept.get("model")
        route = find_route(target.partition("?")[0].encode()).name
        own = Use(route, kept.get("stream") is True, model if isinstance(model, str) else "")
        if what == REPEATS:
            return [] if (plain := plain_request(own, _MORE_TOKENS)) is None else [plain]
        uses = [own, *(use for use in self._board.uses.of(state, self._now()) if use != own)]
        found = [plain for use in uses[:PLAIN_MAX] if (plain := plain_request(use, _TOKENS)) is not None]
        return [_Asked(target, shortened(kept)), *found] if kept else found

    async def _ask(self, state: UnitState, asked: _Asked, timeout_s: float) -> bool | None:
        """Whether the answer of a unit is good; None: it has none that could be judged."""
        try:
            reply = await self._fetch_of(state)(
                "POST", asked.target, body=asked.body, timeout_s=timeout_s, max_bytes=_ANSWER_BYTES
            )
        except FetchError:
            return None
        return None if reply.status == 429 or reply.status >= 500 else is_good(asked, reply)

    # -- out, and back -------------------------------------------------------------------------------------

    def _tell_of(self, state: UnitState, found: Refusing) -> None:
        now, reason = self._now(), found._replace(is_out=False).reason
        state.refusals.pop(found.of, None)
        state.refusals[found.of] = reason, now
        if len(state.refusals) > REFUSALS_MAX:
            del state.refusals[next(iter(state.refusals))]
        if now - self._told.get(found.unit, -TOLD_EVERY_S) >= TOLD_EVERY_S:
            self._told[found.unit] = now
            self._events.add(Action("refuses", "gate", found.unit, f"{reason}; others get these"))

    def _take_out(self, state: UnitState, found: Refusing, target: str, body: bytes) -> None:
        now = self._now()
        self._out[found.unit] = _Refused(state, found, target, body, now, now + TRY_EVERY_S)
        self._tell(state, Sign.BAD, Strength.FATAL, found.reason)

    def _try_soon(self, name: str, refused: _Refused, now: float) -> None:
        asked = self._asked(refused.state, refused.found.what, refused.target, refused.body)
        if asked:
            timeout_s = SHORT_S if refused.tasks else TIMEOUT_S
            work = self._try(name, refused, asked[refused.turn % len(asked)], timeout_s)
            refused.turn += 1
            task = asyncio.get_running_loop().create_task(work)
            refused.tasks.add(task)
            task.add_done_callback(refused.tasks.discard)
        elif now - refused.since > WITHOUT_S:
            self._clear(name, f"it is tried again after {WITHOUT_S:.0f} s")

    async def _try(self, name: str, refused: _Refused, asked: _Asked, timeout_s: float) -> None:
        is_served = await self._ask(refused.state, asked, timeout_s)
        if is_served and self._out.get(name) is refused:
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

    def _others(self, state: UnitState) -> list[UnitState]:
        """The other units in rotation that serve one of its models."""
        return [
            other
            for other in self._board
            if other is not state
            and other.is_usable()
            and (not state.models or not other.models or not state.models.isdisjoint(other.models))
        ]


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; empty: it is none."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def shortened(request: dict[str, Any]) -> bytes:
    """The request for a few tokens."""
    limits = {name: _TOKENS for name in _LIMITS if name in request}
    return orjson.dumps({name: value for name, value in request.items() if name != "min_tokens"} | limits)


def plain_request(use: Use, tokens: int) -> _Asked | None:
    """A request of this kind that any unit serves; None: there is none."""
    api = APIS.get(use.route)
    if api is None or api.is_costly or api.is_form or api.about:
        return None
    fields = api.body(use.model, "What is the capital of France?", None) or {}
    limits = {name: tokens for name in _LIMITS if name in fields}
    stream = {"stream": True} if use.stream and api.streams else {}
    return _Asked(at(api.path, use.model), orjson.dumps(fields | limits | stream), tokens == _TOKENS)


def is_good(asked: _Asked, reply: Reply) -> bool:
    """Whether this answers the request."""
    shape = SHAPES.get(find_route(asked.target.partition("?")[0].encode()).name)
    if reply.status >= 300 or shape is None:
        return reply.status < 300
    content_type = reply.headers.get("content-type", "").encode()
    is_events = content_type.startswith(b"text/event-stream")
    streams = orjson.loads(asked.body).get("stream") is True
    wrong = shape.why_doubtful(reply.body, is_events=is_events, streams=streams, content_type=content_type)
    return not wrong and (asked.may_loop or not loops(reply.body))
