"""Units on hold: an engine that is paused, asleep or scaling stands still on purpose and is not sick. Pure.

Rules:
1. A hold is beside the verdict and never changes it. While it lasts, evidence that it explains is neutral, no
   canary is sent, the unit gets no new requests, and clocks for stalls stand still.
2. Facts are not explained: a refused connection, a process that is gone, the fault of a node.
3. An engine is believed for `hold_limit_s` in a row, and only while it repeats what it says. A hold that
   comes back before the unit has shown work continues the one before.
4. When a hold ends, the unit has to show work before it gets requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cellgate.router.hold_nouns import Hold, HoldKind, Quiescence
from cellgate.router.nouns import Evidence, Rules, Sign, Strength, Verdict

if TYPE_CHECKING:
    from cellgate.router.unit_state import UnitState

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


def hear(state: UnitState, said: Quiescence) -> bool:
    """Apply what an engine says of itself; whether a hold began or ended."""
    hold, was_on = state.hold, is_on(state.hold)
    state.can_hold = True
    if said.kind is None:
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
        if state.life_at > hold.ended_at or now - hold.ended_at > PROOF_S or not _may_return(state):
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
