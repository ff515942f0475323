"""Canaries that are refused (401, 403, 404, 429) speak of the gate's own request first: its key, its model.

A unit is to blame only while others answer canaries, and while it does no work: users' requests that are
served there, or all units that refuse alike, say that the gate is. Then it is told, and takes no unit out.
A canary that is answered with nothing speaks of its model: it raises the question whether the unit answers
worse than others (refused_watch.py), and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from cellgate.probes.engines import NOTHING_GENERATED
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.router.board import Board
from cellgate.router.judge import CANARY_SOURCE
from cellgate.router.nouns import Evidence, Sign, Use
from cellgate.router.opinions import Refusing
from cellgate.router.unit_state import UnitState

WORKS_S = 10.0
"""A unit works for users that has done so within this time, and since its last canary was answered."""
REPORTED_EVERY_S = 60.0


class RefusedCanaries:
    """Of one gate. `look_now` runs a probe of a unit, `compare` asks whether it answers as others do."""

    def __init__(
        self,
        board: Board,
        events: EventLog,
        look_now: Callable[[str, str], None],
        compare: Callable[[Refusing, Use], None],
    ) -> None:
        self._board = board
        self._events = events
        self._look_now = look_now
        self._compare = compare
        self._passed_at: dict[str, float] = {}
        self._refused_since: dict[str, float] = {}
        self._reported: dict[str, float] = {}

    def weighed(self, state: UnitState, evidence: Evidence) -> Evidence:
        """What a canary says of its unit; neutral where it speaks of the gate."""
        unit = evidence.unit
        if evidence.source != CANARY_SOURCE:
            return evidence
        if evidence.sign is Sign.GOOD:
            self._passed_at[unit] = evidence.at
            self._refused_since.pop(unit, None)
            state.canary_refused = ""
        if evidence.is_empty and evidence.sign is Sign.BAD and state.is_usable():
            usual = Use("chat", False, min(state.models, default=""))
            use = next(iter(self._board.uses.of(state, evidence.at)), usual)
            self._compare(Refusing(unit, NOTHING_GENERATED, " of canaries", 1, 1, is_apart=True), use)
            return replace(evidence, sign=Sign.NEUTRAL)
        if not (evidence.is_refusal and evidence.sign is Sign.BAD and state.is_usable()):
            return evidence
        since = self._refused_since.setdefault(unit, evidence.at)
        works_at = state.progress_at
        if works_at > self._passed_at.get(unit, -inf) + 0.1 and evidence.at - works_at < WORKS_S:
            return self._of_the_gate(state, evidence, "users' requests are served there")
        if not any(self._passed_at.get(other, -inf) > since for other in self._others(state)):
            for other in self._others(state):
                if other not in self._refused_since:
                    self._look_now(other, CANARY_SOURCE)
            return self._of_the_gate(state, evidence, "no other unit has answered one since")
        return evidence

    def _others(self, state: UnitState) -> Iterator[str]:
        for other in self._board:
            alike = not state.models or not other.models or not state.models.isdisjoint(other.models)
            if other is not state and other.is_usable() and alike:
                yield other.unit.name

    def _of_the_gate(self, state: UnitState, evidence: Evidence, why: str) -> Evidence:
        unit = evidence.unit
        reason = f"{evidence.reason}; not counted, because {why}: the gate's own key or model may be wrong"
        state.canary_refused = reason
        if evidence.at - self._reported.get(unit, -inf) >= REPORTED_EVERY_S:
            self._reported[unit] = evidence.at
            self._events.add(Action("canary_refused", "gate", unit, reason))
        return replace(evidence, sign=Sign.NEUTRAL, reason=reason)
