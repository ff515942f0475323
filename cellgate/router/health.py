"""Whether a unit stalls: it has requests and makes no progress; and whether work explains that. Pure.

Rules:
1. Progress is work: tokens of this gate's streams, finished generations, step and token counters of the
   engine.
2. A stall may last `stall_limit_s`: four steps of the slowest kind, but at most 1.5 times the longest recent
   stall from which the unit recovered by itself; or 1.5 times the prefill of the prompts it has to compute.
3. Requests without visible progress prove nothing: their client does not read; an engine that does not count
   its steps may have queued them; a canary has passed while they stalled.
4. Busy is not sick: a canary that runs out of time proves nothing as long as requests that were there before
   it may keep the unit busy (`hides_work`).
5. Nor does it while the unit has been silent for no longer than it, or a peer, has lately been before it went
   on by itself (`borne_until`); nor, for a while, where no peer does better (`Board.is_alone`).

In this order: `Stall`, `spoken`, `CommonCause`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from cellgate.router.learning import ANSWERS, JOINED_S, LARGE_TOKENS, SLOWEST_STEP_S
from cellgate.router.nouns import (
    USABLE,
    EnginePause,
    Evidence,
    Hold,
    HoldKind,
    Place,
    Rules,
    Sign,
    Strength,
    Verdict,
)
from cellgate.router.pauses import STILL_WAITS_MAX_S
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.router.unit_state import Lease

STEPS = 4.0
STALLS = 1.5
WAITED_TOKENS = 2048
"""The prefill of so many tokens takes no longer than waits that have nothing to do with work, where there are
such; that of more tokens may.
"""
PREFILLS = 1.5
COUNTERS_FRESH_S = 1.0
"""Older counters cannot show whether the engine makes progress."""
STALL_LATE_S = 0.5
"""The counters of a suspect are read this often."""
CLEARED_S = 30.0
"""A canary that passes while requests stall clears the unit of them for this long: it has lost them."""
UNSEEN_S = 8.0
"""A stall is believed to be work for this long where nothing but a time-out of ours speaks against it: of a
stream on an engine that may serve one request at a time; and of a unit while no other of its pool does
better, even if its counters stand still."""
ALL_STILL_S = 0.5
"""All stand still now, if they did so at the last look, on a tick."""
STALL_FIRST_S = 0.5
"""A unit under work is borne for so much longer than it takes to notice a stall and to wait for a canary: a
pause of garbage collection, or of a kernel that is compiled, may be as long."""
ENGINE_SEES_S = 5.0
"""A request that was sent so long before its engine says that it has none is not there."""


class Stall(NamedTuple):
    """The length of a stall, its limit, and the number of waiting requests."""

    stalled_s: float
    limit_s: float
    waiting: int


def stall_limit_s(state: UnitState, rules: Rules) -> float:
    """How long a unit may stall with its present work."""
    if not state.leases:
        return max(rules.silent_min_s, _steps_s(state))
    # A decoder may stand still while it connects to a prefiller for the first time.
    splits = [lease.split for lease in state.leases if lease.split is not None and not lease.committed]
    connect_s = max((split.limit_s for split in splits if split.is_first), default=0.0)
    return max(rules.silent_min_s, _steps_s(state), PREFILLS * _prefill_s(state), connect_s)


def _steps_s(state: UnitState) -> float:
    """How long nothing may move while only tokens are generated."""
    step_s = state.step_times.slowest_s(None if state.leases else state.last_lease_at)
    # One stream may stand still while others go on; what the unit came out of by itself tells more than that.
    return min(STEPS * step_s, STALLS * max(step_s, state.longest_stall_s()))


def _prefill_s(state: UnitState) -> float:
    """How long nothing may move while the prompts are computed of which nothing was shown yet.

    Those that came since the last progress wait for the next step. Where nothing shows a step, they may
    have come after one of which nothing was seen.
    """
    counts = state.counters_at > 0.0
    since = state.quiet_since + JOINED_S
    if not counts and any(not lease.ask.stream for lease in state.leases):
        since = inf
    prompts = [
        lease.ask.prompt_tokens
        for lease in state.leases
        if not (lease.committed or lease.evicted) and lease.opened_at <= since
    ]
    largest = max(prompts, default=0)
    if not largest:
        return 0.0
    beside = sum(prompts) - largest
    if counts:
        # What one step has in it is bounded, and the next one is counted.
        beside = min(beside, max(LARGE_TOKENS - largest, 0))
    prefill_s = state.step_times.prefill_s(largest, counts=counts, beside=beside)
    longest_s = state.step_times.longest_wait_s
    waits_s = 0.0 if counts else state.overtaken.at(state.quiet_since)
    # Others overtook one that waited as long as any: that was no work, and a canary would overtake as well.
    if waits_s and STALLS * waits_s >= longest_s and largest <= WAITED_TOKENS:
        return 0.0
    return prefill_s


def hides_work(state: UnitState, now: float, rules: Rules, asked_at: float = inf) -> bool:
    """Whether requests that the unit has, or a probe, may keep it busy with nothing to show for it; if so, a
    canary that was sent at `asked_at` and has run out of time proves nothing.
    """
    if min(now, asked_at) < state.occupied_until and not state.is_unreachable(now):
        return True
    doubted_at = state.case.since if state.case.verdict is Verdict.SUSPECT else inf
    if state.progress_at > doubted_at:
        doubted_at = inf
    # What came to a unit that was in doubt already, or after the canary, explains nothing.
    until = min(doubted_at, asked_at)
    leases = [lease for lease in state.leases if lease.opened_at <= until and not lease.evicted]
    if not leases or _has_lost(state, leases, now):
        return False
    return now - state.quiet_since < _believed_s(state, leases, rules)


def _believed_s(state: UnitState, leases: list[Lease], rules: Rules) -> float:
    """How long these requests may keep the unit busy with nothing to show for it."""
    if is_reported(state):
        return max(rules.silent_min_s, STALLS * state.step_times.slowest_s(None))
    believed_s = stall_limit_s(state, rules)
    alone_s = UNSEEN_S if state.is_alone else 0.0
    if state.counters_at or len(leases) <= state.slots_shown:
        # Its steps are counted, or a canary has a place beside these requests.
        return max(believed_s, alone_s)
    answers_s = max((answer_s(state, lease) for lease in leases if not lease.ask.stream), default=0.0)
    one_by_one_s = UNSEEN_S if state.costs.backlog.peak_batch < 2.0 else 0.0
    if not state.step_times.answer_token_s:
        # What was learnt has prompts in it, and the factors of both cover the sum.
        answers_s += believed_s
    return max(believed_s, answers_s, alone_s, one_by_one_s)


def borne_until(state: UnitState, now: float, rules: Rules) -> float:
    """Until when no time-out of ours speaks against a unit that has requests and shows nothing: pauses of
    this length are usual, or were lately shown by the unit or a peer, and ended by themselves. -inf: it is
    not silent.
    """
    if not state.leases or now - state.quiet_since < rules.silent_min_s or is_reported(state):
        return -inf
    least_s = rules.silent_min_s + rules.canary_timeout_s + STALL_FIRST_S
    until = state.quiet_since + max(least_s, STALLS * state.pauses.longest_s(state.quiet_since))
    if state.counters_at or any(lease.committed for lease in state.leases):
        return until
    # All that it has waits for a first token, and may be of those for which that takes long.
    first_at = next(lease.opened_at for lease in state.leases)
    known_s = STALLS * state.overtaken.at(state.quiet_since)
    return max(until, first_at + known_s, state.quiet_since + UNSEEN_S)


def borne_idle_s(state: UnitState, now: float) -> float:
    """How long an idle unit may be silent after it was asked for a token: as above."""
    wait_s = 0.0 if state.counters_at else state.overtaken.at(now)
    # Where all with work stand still, and none without has answered a canary since, it does so with them.
    unseen_s = UNSEEN_S if now - state.overtaken.still_at < ALL_STILL_S else 0.0
    return max(unseen_s, STALLS * max(state.pauses.longest_s(now), wait_s))


def record_canary(state: UnitState, late: int, waited_s: float, now: float) -> None:
    """A canary was answered; so many before it were late, of which the last had waited so long in vain."""
    name, waits = state.unit.name, state.overtaken
    # One that was out for late ones alone may have been well.
    if not (state.case.verdict in USABLE or state.fell_unseen):
        waits.forget(name)
    elif shows_nothing_else(state) or waits.has_late(name):
        overtaken_s = state.overtaken_s(now)
        # Requests that were there before the last late one wait still: they have not held it up.
        waits.answered(name, now, late if overtaken_s > waited_s else 0)
        if waited_s := max(min(waited_s, STILL_WAITS_MAX_S), overtaken_s):
            waits.add(waited_s, now)


def is_late_by_chance(
    state: UnitState, late: int, now: float, rules: Rules, *, is_young: bool, is_beside: bool
) -> bool:
    """So many canaries in a row were late, and nothing explains them: whether equals show that it is chance.
    Where more than canaries tells of the unit, only of those that later requests have overtaken
    (`is_beside`).
    """
    if not (is_beside or shows_nothing_else(state)):
        state.overtaken.forget(state.unit.name)
        return False
    least_s = 2.0 * rules.canary_timeout_s
    return state.case.verdict in USABLE and state.overtaken.is_chance(
        state.unit.name, late, now, least_s, is_young=is_young
    )


def shows_nothing_else(state: UnitState) -> bool:
    """Whether only canaries show that it works: it is idle, or all that it has waits for a first token."""
    return not state.counters_at and not any(lease.committed for lease in state.leases)


def is_reported(state: UnitState) -> bool:
    """Whether a node is the reason for a suspicion: an agent says that a process is stopped."""
    because = state.case.because
    is_node = because is not None and because.node is not None and not because.is_unseen
    return is_node and state.case.verdict is Verdict.SUSPECT


def answer_s(state: UnitState, lease: Lease) -> float:
    """How long the unit may decode a plain answer, of which nothing is seen before its end."""
    ask, step_times = lease.ask, state.step_times
    if not (ask.prompt_tokens or ask.fingerprint):
        return 0.0
    token_s = ANSWERS * step_times.answer_token_s or SLOWEST_STEP_S
    return token_s * ask.max_tokens if ask.max_tokens else inf


def _has_lost(state: UnitState, leases: list[Lease], now: float) -> bool:
    """Whether the engine says that it has no request while these are there."""
    load = state.load
    if load is None or load.at_engine or now - load.at > ENGINE_SEES_S:
        return False
    return all(load.at - lease.opened_at > ENGINE_SEES_S for lease in leases)


def still_s(state: UnitState, now: float) -> float:
    """For how long the unit has stalled, as far as visible.

    Counters are valid as of their reading; when the engine does not answer, only tokens count.
    """
    seen_until = state.counters_at if now - state.counters_at < COUNTERS_FRESH_S else now
    return max(0.0, seen_until - state.quiet_since)


def is_seen_still(state: UnitState, now: float) -> bool:
    """Whether its engine says that it has work, and counts no steps; or an agent that it is stopped."""
    if is_reported(state):
        return True
    load = state.load
    is_read = load is not None and load.sighted and now - load.at < COUNTERS_FRESH_S + STALL_LATE_S
    return is_read and load is not None and load.at_engine > 0 and load.at > state.progress_at


def find_stall(state: UnitState, now: float, rules: Rules) -> Stall | None:
    """The stall of a unit once it is longer than its limit, else None."""
    if now - state.quiet_since < rules.silent_min_s:
        return None
    sighted = now - state.counters_at < COUNTERS_FRESH_S
    cleared_at = state.cleared_at if now - state.cleared_at < CLEARED_S else -CLEARED_S
    counts = state.counters_at > 0.0
    opened = [
        lease.opened_at
        for lease in state.leases
        if lease.opened_at > cleared_at and _would_show(lease, counts=counts, sighted=sighted)
    ]
    if not opened:
        return None
    # Where each is refused after a while, none has waited for long; but those have whose clients left.
    waited_s = now - min(opened[0], state.unread.since)
    limit_s, silent_s = stall_limit_s(state, rules), min(still_s(state, now), waited_s)
    return Stall(silent_s, limit_s, len(opened)) if silent_s >= limit_s else None


def find_rank_stall(state: UnitState, now: float, rules: Rules) -> tuple[int, Stall] | None:
    """A data parallel rank that stalls while others work, whose steps hide it from the unit's clock.

    Only the engine's own counters show it, so it is as old as their last reading.
    """
    if now - state.counters_at >= COUNTERS_FRESH_S or now - state.cleared_at < CLEARED_S:
        return None
    found, limit_s = state.ranks.still_rank(state.counters_at), stall_limit_s(state, rules)
    if found is None or found.still_s < limit_s:
        return None
    own = [lease for lease in state.leases if lease.rank == found.rank]
    waiting = sum(_would_show(lease, counts=True, sighted=True) for lease in own)
    return (found.rank, Stall(found.still_s, limit_s, waiting)) if waiting else None


def _would_show(lease: Lease, *, counts: bool, sighted: bool) -> bool:
    """Whether this request would show progress if the unit worked.

    `counts`: its engine counts its steps; `sighted`: and they were read just now.
    """
    if lease.paused or lease.evicted:
        return False
    if lease.ask.stream:
        return lease.committed or counts
    return sighted and lease.ask.prompt_tokens > 0


# Units on hold: an engine that is paused, asleep or scaling stands still on purpose and is not sick. Pure.
#
# Rules:
# 1. A hold is beside the verdict and never changes it. While it lasts, evidence that it explains is neutral,
#    no canary is sent, the unit gets no new requests, and clocks for stalls stand still.
# 2. Facts are not explained: a refused connection, a process that is gone, the fault of a node.
# 3. An engine is believed for `hold_limit_s` in a row, and only while it repeats what it says. A hold that
# comes back before the unit has shown work continues the one before.
# 4. When a hold ends, the unit has to show work before it gets requests.


SAID_S = 5.0
"""An engine that has not repeated for this long that it stands still is no longer believed."""
PROOF_S = 5.0
"""A unit whose hold has ended gets requests after this time, even if no canary could prove anything."""


def spoken(hold: Hold) -> str:
    """A hold in a few words, for people."""
    return f"its engine {'was' if hold.ended_at else 'is'} {hold.kind.value}"


def is_on(hold: Hold | None) -> bool:
    """Whether a hold lasts."""
    return hold is not None and not hold.ended_at


def explains(hold: Hold | None, evidence: Evidence) -> bool:
    """Whether a hold is the reason for this bad evidence."""
    is_fact = evidence.strength is Strength.FATAL or evidence.node is not None
    return is_on(hold) and evidence.sign is Sign.BAD and not is_fact


def hear(state: UnitState, said: EnginePause) -> bool:
    """Apply what an engine says of itself; whether a hold began or ended."""
    hold, was_on = state.hold, is_on(state.hold)
    state.can_hold = True
    if said.kind is None:
        if hold is not None and (hold.kind is HoldKind.RECOVERING) is not said.is_of_faults:
            return False
        state.is_hold_spent = False
        if was_on:
            end(state, said.at)
    elif not (state.is_hold_spent or _is_lost(state)):
        since = hold.since if hold is not None else said.at
        state.hold = Hold(said.kind, since, said.at)
        if not was_on:
            _stop_clocks(state)
    return is_on(state.hold) is not was_on


def end(state: UnitState, at: float) -> None:
    """The hold of a unit ends: it has to show work, and nothing counts as stalled from before."""
    assert state.hold is not None
    state.hold = replace(state.hold, ended_at=at)
    state.held_until = at
    state.work_at = max(state.work_at, at)


def doubt(now: float) -> Hold:
    """The hold of a unit that may stand still, of which only work or its engine can say more."""
    return Hold(HoldKind.PAUSED, now, now, ended_at=now)


def pass_time(state: UnitState, now: float, rules: Rules) -> bool:
    """Apply what depends on time alone; whether the hold has ended."""
    hold = state.hold
    if hold is None:
        return False
    if hold.ended_at:
        if state.progress_at > hold.ended_at or now - hold.ended_at > PROOF_S or not _may_return(state):
            state.hold = None
        return False
    state.is_hold_spent = now - hold.since >= rules.hold_limit_s
    if state.is_hold_spent or now - hold.said_at > SAID_S:
        end(state, now)
        return True
    return False


def _is_lost(state: UnitState) -> bool:
    """Whether there is a fact against the unit, which no hold explains."""
    case, because = state.case, state.case.because
    is_fatal = because is not None and because.strength is Strength.FATAL
    return bool(case.faults) or (case.verdict is Verdict.DOWN and is_fatal)


def _may_return(state: UnitState) -> bool:
    """Whether work would put the unit back into rotation; else its verdict decides."""
    return state.case.verdict in (Verdict.UP, Verdict.SUSPECT)


def _stop_clocks(state: UnitState) -> None:
    """The times of these requests say nothing about the speed of the unit."""
    for lease in state.leases:
        lease.was_paused = True


# Units that fail together because of something that they share: a switch, a rack, a zone. Pure.
#
# A place is blamed when every unit with a node there is DOWN, and these are two units or more. Of the places
# that explain the same units, the narrowest is named; of those that explain some, the one that explains most.


LEAST_UNITS = 2


class CommonCause(NamedTuple):
    """A place under which all units are DOWN; they are in the order of their names."""

    place: Place
    units: tuple[str, ...]

    def in_words(self) -> str:
        """For people."""
        names = ", ".join(self.units)
        return f"all {len(self.units)} units with a node under {'/'.join(self.place)} are DOWN: {names}"


def shared_fates(states: Iterable[UnitState]) -> list[CommonCause]:
    """The places that are to blame now, those with most units first. No unit is in two of them."""
    under: dict[Place, set[str]] = defaultdict(set)
    down = set[str]()
    for state in states:
        if state.case.verdict is Verdict.DOWN:
            down.add(state.unit.name)
        for node in state.unit.nodes:
            for depth in range(1, len(node.place) + 1):
                under[node.place[:depth]].add(state.unit.name)
    blamed = [(place, units) for place, units in under.items() if len(units) >= LEAST_UNITS and units <= down]
    blamed.sort(key=lambda found: (-len(found[1]), -len(found[0]), found[0]))
    fates: list[CommonCause] = []
    explained = set[str]()
    for place, units in blamed:
        if not units & explained:
            fates.append(CommonCause(place, tuple(sorted(units))))
            explained |= units
    return fates
