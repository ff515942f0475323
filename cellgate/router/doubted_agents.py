"""Doubted agents: evidence is weighed anew when agents say that most units of a fleet are gone. Pure.

One agent is believed at once. But what all agents have in common (a wrong name of a process, a bad release,
a shared file system) may speak from all of them, and a fleet is never emptied by agents alone: canaries
decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cellgate.router.nouns import AGENT, PANIC_SHARE, Evidence, Sign, Strength
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.router.board import Board

AGENTS_TOGETHER_S = 10.0
"""What agents have said within this time before is doubted as well, and what they say as soon after."""


def weighed(board: Board, evidence: Evidence) -> Evidence:
    """The evidence: a suspicion and no more, if agents now say so of too many units."""
    if evidence.source != AGENT or evidence.sign is not Sign.BAD or evidence.strength is not Strength.FATAL:
        return evidence
    state = board.units.get(evidence.unit)
    if state is None or not state.is_usable():
        return evidence
    said = 1 + sum(_is_out(other) for other in board)
    total = said - 1 + sum(other.is_usable() for other in board)
    are_doubted = evidence.at - board.agents_doubted_at <= AGENTS_TOGETHER_S
    if said <= PANIC_SHARE * total and not are_doubted:
        return evidence
    board.agents_doubted_at = evidence.at
    reason = f"{evidence.reason}; agents say so of most units, so a canary decides"
    return replace(evidence, strength=Strength.STRONG, reason=reason)


def taken_back(board: Board, now: float) -> Iterator[Evidence]:
    """What agents have just said of other units, once they are doubted: canaries decide of these too."""
    for state in list(board):
        if _is_out(state):
            for node, source in sorted(state.case.faults):
                said = state.last_evidence.get((node, source))
                if said is not None and now - said.at <= AGENTS_TOGETHER_S:
                    reason = "doubted, because agents say the same of most units; a canary decides"
                    yield Evidence(
                        state.unit.name, Sign.GOOD, Strength.WEAK, AGENT, reason, now, node=node or None
                    )


def _is_out(state: UnitState) -> bool:
    """Whether agents alone keep it out."""
    faults = state.case.faults
    return bool(faults) and not state.is_usable() and all(source == AGENT for _, source in faults)
