"""A change of verdict, and why a unit went DOWN, in one word for alerts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cellgate.router.known_answers import ANSWER_SOURCE
from cellgate.router.nouns import Case, Evidence, Sign, Strength, Verdict
from cellgate.router.unit_state import UnitState

HEALTH_SOURCE = "readiness"
"""The source of evidence about the engine's own health check (probes/readiness.py)."""


class DownCause(Enum):
    """Label of `cellgate_unit_downs_total`."""

    WEDGED = "wedged"
    """Its health check was good all the while, and it generated nothing."""
    REFUSED = "refused"
    """Nothing accepts connections at its address, or its engine says that it is dead."""
    NODE = "node"
    """An agent or a source of units reported that one of its nodes is gone or stands still."""
    UNHEALTHY = "unhealthy"
    """Its health check failed as well, or gave no answer."""
    WRONG_ANSWERS = "wrong_answers"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of verdict, with its reason: what /events and the log show. `cause` is of one to DOWN."""

    unit: str
    cell: str
    before: Verdict
    after: Verdict
    at: float
    evidence: Evidence
    cause: DownCause | None = None


def flip_of(state: UnitState, before: Case, evidence: Evidence) -> Flip:
    """What `evidence` has made of the case `before` of a unit."""
    after, cause = state.case.verdict, None
    if after is Verdict.DOWN:
        cause = down_cause(before, evidence, state.last_evidence.get((None, HEALTH_SOURCE)))
    return Flip(state.unit.name, state.unit.cell, before.verdict, after, evidence.at, evidence, cause)


def down_cause(before: Case, evidence: Evidence, health: Evidence | None) -> DownCause:
    """Why `evidence` moved the case `before` to DOWN; `health` is the last evidence of the health check.

    A health check that has said nothing since the suspicion began proves nothing: a leader that was killed
    was healthy a second ago as well.
    """
    if evidence.source == ANSWER_SOURCE:
        return DownCause.WRONG_ANSWERS
    if evidence.node is not None:
        return DownCause.NODE
    if evidence.strength is Strength.FATAL:
        return DownCause.REFUSED
    is_healthy = health is not None and health.sign is Sign.GOOD and health.at >= before.since
    return DownCause.WEDGED if is_healthy else DownCause.UNHEALTHY
