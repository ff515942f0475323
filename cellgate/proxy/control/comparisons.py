"""All that is found by comparing units: other builds or software, a place that failing units share, a rank
that is behind.

In this order: `Comparisons`, `DriftWatch`, `StackWatch`, `RankWatch`, `CommonCauseWatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import inf

from prometheus_client import Metric

from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.families import gauge
from cellgate.router.board import Board
from cellgate.router.comparisons import Stacks, conclusions, other_builds
from cellgate.router.health import shared_fates
from cellgate.router.nouns import Evidence, Place, Sign, Strength
from cellgate.router.unit_state import UnitState


class Comparisons:
    """The comparisons of one gate. `observe` takes evidence."""

    def __init__(self, board: Board, events: EventLog, observe: Callable[[Evidence], object]) -> None:
        self.metrics = partial(node_facts_metrics, board)
        self._watches = (
            DriftWatch(board, events),
            CommonCauseWatch(board, events),
            StackWatch(board, events, observe),
            RankWatch(board, events, observe),
        )

    def tick(self, now: float) -> None:
        for watch in self._watches:
            watch.tick(now)


# Reports units of one cell and model that run different builds (engine version or configuration).
#
# Such units may answer differently, so a stream that one of them began is not resumed on another.


DRIFT_PERIOD_S = 1.0
LARGE_PERIOD_S = 230.0
"""All units of a large fleet are compared so often: about as often as they take turns."""


class DriftWatch:
    """The comparison for one gate."""

    def __init__(self, board: Board, events: EventLog) -> None:
        self._board = board
        self._events = events
        self._compare_at = 0.0
        self._reported: dict[str, frozenset[str]] = {}
        """The builds of each cell in which they differ, as they were last reported."""

    def tick(self, now: float) -> None:
        """Compare the builds of all units, now and then."""
        if now < self._compare_at:
            return
        self._compare_at = now + (LARGE_PERIOD_S if self._board.attention.is_large else DRIFT_PERIOD_S)
        differing = other_builds(self._board)
        cells: dict[str, dict[str, str]] = {}
        for state in self._board:
            state.other_builds = differing.get(state.unit.name, ())
            if state.other_builds:
                # One unit stands for all of its build.
                cells.setdefault(state.unit.cell, {}).setdefault(state.build.key, state.unit.name)
        for cell in self._reported.keys() - cells.keys():
            self._events.add(Action("drift_over", "gate", cell=cell))
        for cell, units in cells.items():
            if self._reported.get(cell) != units.keys():
                self._report(cell, units)
        self._reported = {cell: frozenset(units) for cell, units in cells.items()}

    def _report(self, cell: str, units: dict[str, str]) -> None:
        each = ", ".join(f"{unit} runs {key}" for key, unit in list(units.items())[:5])
        detail = f"{each}; they may answer differently, and broken streams are not resumed across them"
        self._events.add(Action("drift", "gate", detail=detail, cell=cell))


# Reports nodes of one unit, and units of one cell, that run different software.
#
# Nodes of a unit that differ are weak evidence against it, once for each change: that takes no unit out of
# rotation.


STACK_SOURCE = "software"
STACK_PERIOD_S = 2.0
STEPS_A_TURN = 32
"""So many stacks are read or compared in one turn of the loop: about 5 ms at most with 60 flags each."""
STACK_AGAIN_S = 60.0
"""A unit whose reports keep changing is evidence, and an event, at most this often."""
_UNITS_NAMED = 3


class StackWatch:
    """The comparison for one gate. `observe` takes evidence."""

    def __init__(self, board: Board, events: EventLog, observe: Callable[[Evidence], object]) -> None:
        self._board = board
        self._events = events
        self._observe = observe
        self._stacks = Stacks()
        self._comparing: Iterator[None] | None = None
        self._compare_at = self._now = 0.0
        self._reported_at: dict[UnitState, float] = {}
        self._reported_cells: dict[str, tuple[str, float]] = {}
        """What was last reported of each cell, and when."""

    def tick(self, now: float) -> None:
        """Compare the stacks of all units, now and then, some of them in each turn."""
        self._now = now
        if self._comparing is None and now >= self._compare_at:
            is_large = len(self._board.units) > 10 * STEPS_A_TURN
            self._compare_at = now + (LARGE_PERIOD_S if is_large else STACK_PERIOD_S)
            self._comparing = self._compare()
        if (
            self._comparing is not None
            and sum(1 for _ in islice(self._comparing, STEPS_A_TURN)) < STEPS_A_TURN
        ):
            self._comparing = None

    def _compare(self) -> Iterator[None]:
        for state in list(self._board):
            has_read = False
            for _ in self._stacks.read(state):
                has_read = True
                yield
            self._compare_nodes(state, self._now)
            if not has_read:
                # To have looked is a step as well.
                yield
        self._stacks.keep(self._board)
        odd = {}
        for state, words in self._stacks.odd(self._board):
            odd[state] = words
            yield
        for state in self._board:
            state.facts.odd = odd.get(state, "")
        self._report(self._now)

    def _report(self, now: float) -> None:
        self._reported_at = {state: at for state, at in self._reported_at.items() if not state.retired}
        cells = {cell: list[UnitState]() for cell in self._reported_cells}
        for state in self._board:
            if state.facts.odd:
                cells.setdefault(state.unit.cell, []).append(state)
        for cell, states in cells.items():
            self._report_cell(cell, states, now)

    def _compare_nodes(self, state: UnitState, now: float) -> None:
        # A unit that is being restarted differs until all its nodes are new.
        before = state.facts.mixed
        state.facts.mixed = self._stacks.mixed(state) if state.is_usable() else ""
        name = state.unit.name
        if before and not state.facts.mixed:
            said = Evidence(
                name, Sign.NEUTRAL, Strength.WEAK, STACK_SOURCE, "its nodes run the same software", now
            )
            self._observe(said)
        elif state.facts.mixed != before and now - self._reported_at.get(state, -inf) >= STACK_AGAIN_S:
            self._reported_at[state] = now
            reason = f"its nodes run different software: {state.facts.mixed}"
            self._events.add(Action("stack_drift", "gate", name, reason))
            self._observe(Evidence(name, Sign.BAD, Strength.WEAK, STACK_SOURCE, reason, now))

    def _report_cell(self, cell: str, states: list[UnitState], now: float) -> None:
        reported = "; ".join(f"{state.unit.name} has {state.facts.odd}" for state in states[:_UNITS_NAMED])
        more = f"; and {len(states) - _UNITS_NAMED} more units" if len(states) > _UNITS_NAMED else ""
        before, at = self._reported_cells.get(cell, ("", -inf))
        if reported + more == before or (reported and now - at < STACK_AGAIN_S):
            return
        self._reported_cells[cell] = reported + more, now
        self._events.add(
            Action(
                "stack_drift" if reported else "stack_drift_over", "gate", detail=reported + more, cell=cell
            )
        )


RANK_SOURCE = "ranks"
RANK_PERIOD_S = 0.5
RANK_AGAIN_S = 10.0
"""A unit whose ranks keep saying something else is evidence at most this often: too rarely to be a rate."""


class RankWatch:
    """Reports what ranks of a unit in trouble say: an event and weak evidence (`observe`), never more."""

    def __init__(self, board: Board, events: EventLog, observe: Callable[[Evidence], object]) -> None:
        self._board = board
        self._events = events
        self._observe = observe
        self._look_at = 0.0
        self._reported_at: dict[UnitState, float] = {}

    def tick(self, now: float) -> None:
        """Look at the reports of all units, now and then."""
        if now < self._look_at:
            return
        self._look_at = now + RANK_PERIOD_S
        for state in self._board.attention.units:
            if state.facts.nodes:
                self._look(state, now)
        self._reported_at = {state: at for state, at in self._reported_at.items() if not state.retired}

    def _look(self, state: UnitState, now: float) -> None:
        before, state.facts.ranks = state.facts.ranks, conclusions(state.facts, now)
        if state.facts.ranks in ((), before) or now - self._reported_at.get(state, -inf) < RANK_AGAIN_S:
            return
        self._reported_at[state] = now
        name, reason = state.unit.name, "; ".join(state.facts.ranks)
        self._events.add(Action("ranks", "gate", name, reason))
        self._observe(Evidence(name, Sign.BAD, Strength.WEAK, RANK_SOURCE, reason, now))


def node_facts_metrics(board: Board) -> Iterator[Metric]:
    """Of units whose agents or engines report: whose software differs, whose ranks say something."""
    states = [state for state in board if state.facts.nodes]
    faulty = [state for state in board if state.facts.faults]
    yield gauge(
        "unit_stack_drift",
        "1 while the software differs: `unit`, of its own nodes; `cell`, from other units of its cell.",
        ("unit", "cell", "within"),
        (
            ((state.unit.name, state.unit.cell, within), bool(words))
            for state in states
            for within, words in (("unit", state.facts.mixed), ("cell", state.facts.odd))
        ),
    )
    yield gauge(
        "unit_rank_findings",
        "Findings of the agents on ranks, links and devices of the unit that are true now, at most 4.",
        ("unit", "cell"),
        (((state.unit.name, state.unit.cell), len(state.facts.ranks)) for state in states),
    )
    yield gauge(
        "unit_rank_fault",
        "1 for each rank that its engine says is not healthy, with the engine's word for it.",
        ("unit", "cell", "rank", "status"),
        (
            ((state.unit.name, state.unit.cell, fault.rank, fault.status), True)
            for state in faulty
            for fault in state.facts.faults
        ),
    )


COMMON_CAUSE_PERIOD_S = 1.0
SETTLE_S = 3.0
"""Units under a lost switch go DOWN one after the other: it is named once they are the same for so long."""


class CommonCauseWatch:
    """Reports units that are DOWN together because of a switch, a rack or a zone: one event for each."""

    def __init__(self, board: Board, events: EventLog) -> None:
        self._board = board
        self._events = events
        self._look_at = 0.0
        self._since: dict[tuple[Place, tuple[str, ...]], float] = {}
        """Since when a place and its units are as they are."""
        self._reported: set[Place] = set()

    def tick(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + COMMON_CAUSE_PERIOD_S
        all_well = self._board.room()[0] == len(self._board.units)
        fates = [] if all_well else shared_fates(self._board)
        keys = [(common_cause.place, common_cause.units) for common_cause in fates]
        self._since = {key: self._since.get(key, now) for key in keys}
        self._reported &= {common_cause.place for common_cause in fates}
        for common_cause in fates:
            is_settled = now - self._since[(common_cause.place, common_cause.units)] >= SETTLE_S
            if is_settled and common_cause.place not in self._reported:
                self._reported.add(common_cause.place)
                detail = f"{common_cause.in_words()}; look at it first, the units may be well"
                self._events.add(Action("shared_fate", "gate", detail=detail))
