"""Compares the answers of units to the known prompt, and takes those out that are proven wrong.

A few answers raise the question, more of them in pairs decide it (answer_pairs.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from prometheus_client import Metric

from cellgate.extras.answers.answer_pairs import AnswerPairs
from cellgate.extras.answers.known_answer import KnownAnswer
from cellgate.extras.answers.model_claims import ModelClaims
from cellgate.extras.answers.wrong_answers import (
    Doubted,
    alike,
    condemned,
    doubted,
    first_record,
    is_right,
    no_measure,
    outvoted,
    recorded,
    why_wrong,
)
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.families import counter
from cellgate.router.board import Board, Flip
from cellgate.router.judge import ANSWER_SOURCE
from cellgate.router.known_answers import AnswerRecord, AnswerTokens
from cellgate.router.nouns import Answered, Evidence, Sign, Strength, Urgency, Verdict
from cellgate.router.unit_state import UnitState

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane

CORRUPTED_EVERY_S = 60.0
"""Corrupted requests of a unit are reported at most once in this time."""
GROUPS_MAX = 256
"""Of so many groups of comparable units it is known who agrees."""
COMPARED_MAX = 64
"""Units whose answers are compared with each new one."""
COMPARE_AGAIN_S, COMPARE_AGAIN_MAX_S = 60.0, 3600.0
"""How soon a unit that was no worse than others is compared again: twice as late each time."""
_NEVER_COMPARED = (0.0, COMPARE_AGAIN_S)
_CHECK_TEXT_CHARS = 80


class AnswerCheck:
    """The comparison for one gate. `observe` takes evidence, `look_now` runs a probe of a unit, `pairs`
    asks one beside others.

    `counts` has the answers by unit and result.
    """

    def __init__(
        self,
        board: Board,
        events: EventLog,
        observe: Callable[[Evidence], object],
        look_now: Callable[[str, str], None],
        pairs: AnswerPairs,
    ) -> None:
        self._board = board
        self._events = events
        self._observe = observe
        self._look_now = look_now
        self._pairs = pairs
        self._comparisons: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, tuple[float, float]] = {}
        """Units that were no worse than others: when they may be compared again, and how long after that."""
        self.counts: dict[str, Counter[str]] = {}
        self._reported: set[str] = set()
        """Units that are reported to differ."""
        self._corrupted_at: dict[str, float] = {}
        self._latest: dict[tuple[str, str], dict[str, UnitState]] = {}
        """The units of a cell that have answered a question, the last one at the end."""
        self._wrong: dict[str, UnitState] = {}
        """Those that are out for their answers, and maybe others, as of so many changes of faults."""
        self._wrong_as_of = -1
        self._agreed: dict[_Comparable, set[AnswerTokens]] = {}
        """Answers with which all others agreed when they were compared, while nothing else is said."""

    def take(self, state: UnitState, answered: Answered) -> None:
        """A unit has answered the known prompt."""
        name = state.unit.name
        if state.answers is not None and state.held_until >= state.answers.at:
            # It stood still on purpose: new weights may have been put into it.
            state.answers = None
        if state.answers is None:
            self._reported.discard(name)
            if not answered.tokens:
                return
        latest = self._latest.setdefault((state.unit.cell, answered.question), {})
        if self._is_agreed(state, answered):
            latest.pop(name, None)
            latest[name] = state
            state.answers = (state.answers or first_record(answered))._replace(at=answered.at)
            self._count(name, state.answers)
            return
        group = self._group(state, answered.question)
        latest.pop(name, None)
        latest[name] = state
        records = _records(group)
        records[name] = state.answers = recorded(records, answered)
        group[name] = state
        for unit, record in outvoted(name, records).items():
            self._set(group[unit], record, group)
            records[unit] = record
        self._set(state, state.answers, group)
        self._count(name, state.answers)
        self._judge(group, records, answered)
        if len(alike(name, records)) == len(records):
            if len(self._agreed) >= GROUPS_MAX:
                self._agreed.clear()
            agreed = self._agreed.setdefault(_comparable(state, answered.question), set())
            if len(agreed) >= COMPARED_MAX:
                agreed.clear()
            agreed.add(answered.tokens)

    def ask_now(self, state: UnitState) -> None:
        """Ask a unit, even if it has requests."""
        self._ask(state, Urgency.NOW)

    def corrupted(self, state: UnitState, count: float) -> None:
        """An engine has counted `count` more requests whose numbers are none."""
        name, load = state.unit.name, state.load
        assert load is not None
        if state.answers is not None:
            state.answers = doubted(state.answers, load.at)
            for other in self._group(state, state.answers.question).values():
                self._ask(other, Urgency.SOON)
        self.ask_now(state)
        if load.at - self._corrupted_at.get(name, -CORRUPTED_EVERY_S) >= CORRUPTED_EVERY_S:
            self._corrupted_at[name] = load.at
            self._events.add(Action("corrupted", "gate", name, f"{count:.0f} more by its engine's count"))

    def forget(self, unit: str) -> None:
        self._reported.discard(unit)
        self._corrupted_at.pop(unit, None)
        self.counts.pop(unit, None)
        self._again.pop(unit, None)
        for latest in self._latest.values():
            latest.pop(unit, None)

    def close(self) -> None:
        for task in self._comparisons.values():
            task.cancel()

    def flipped(self, flip: Flip) -> None:
        """A verdict has changed. What fell may be another process when it comes back, even unnoticed."""
        state = self._board.units[flip.unit]
        if flip.after in (Verdict.DOWN, Verdict.STARTING) and flip.evidence.source != ANSWER_SOURCE:
            state.answers = None
        state.urgency = Urgency.SOON if state.is_out_for_answers() else Urgency.ROUTINE

    # -- inside --------------------------------------------------------------------------------------------

    def _is_agreed(self, state: UnitState, answered: Answered) -> bool:
        """Whether it says what all others agreed with, and has said nothing else. Nearly all do, each time:
        nothing follows.
        """
        record, tokens, key = state.answers, answered.tokens, _comparable(state, answered.question)
        agreed = self._agreed.get(key, ())
        if record is None:
            is_steady = tokens in agreed
        else:
            is_steady = record.question == answered.question and record.latest == tokens
        if not is_steady:
            self._agreed.pop(key, None)
            return False
        return (
            tokens in agreed
            and (record is None or (record.first == tokens and not record.differing))
            and state.urgency is Urgency.ROUTINE
            and state.is_usable()
            and not (state.unit.name in self._reported or self._out())
        )

    def _count(self, name: str, record: AnswerRecord) -> None:
        self.counts.setdefault(name, Counter())["differs" if record.differing else "same"] += 1

    def _set(self, state: UnitState, record: AnswerRecord, group: dict[str, UnitState]) -> None:
        """Take a record of a unit, and ask again where that must tell more."""
        state.answers = record
        waits = record.differing > 0 and not record.is_confirmed
        state.urgency = Urgency.SOON if waits or state.is_out_for_answers() else Urgency.ROUTINE
        if record.differing == 1:
            # What it and the others say from now on decides.
            for other in group.values():
                self._ask(other, Urgency.SOON)

    def _ask(self, state: UnitState, urgency: Urgency) -> None:
        state.urgency = max(state.urgency, urgency)
        self._look_now(state.unit.name, KnownAnswer.name)

    def _group(self, state: UnitState, question: str) -> dict[str, UnitState]:
        """The units that must give the same answer, and have answered: of one cell, engine and build. Of many
        those with the latest answers, and those that are out.
        """
        cell, found = state.unit.cell, list[UnitState]()
        wrong = [other for other in self._out() if other.unit.cell == cell]
        latest = self._latest.get((cell, question), {})
        for other in (*wrong, *reversed(latest.values())):
            if (
                other.answers is not None
                and other.answers.question == question
                and _are_comparable(state, other)
                and (other.is_usable() or other.is_out_for_answers())
                and self._board.units.get(other.unit.name) is other
            ):
                found.append(other)
            if len(found) >= COMPARED_MAX:
                break
        return {other.unit.name: other for other in found}

    def _out(self) -> list[UnitState]:
        """The units that are out for their answers."""
        if self._wrong_as_of != self._board.fault_changes:
            self._wrong_as_of = self._board.fault_changes
            self._wrong = {s.unit.name: s for s in self._board if s.is_out_for_answers()}
        return [state for state in self._wrong.values() if state.is_out_for_answers()]

    def _judge(
        self, group: dict[str, UnitState], records: dict[str, AnswerRecord], answered: Answered
    ) -> None:
        """Decide about each unit of a group, of which one has answered."""
        now, cell = answered.at, group[answered.unit].unit.cell
        out = {state.unit.name for state in self._out() if state.unit.cell == cell}
        for unit, state in group.items():
            record = records[unit]
            if not record.differing and unit not in out and unit not in self._reported:
                # As nearly all are, each time.
                continue
            if unit in out:
                if unit == answered.unit and is_right(unit, records, out):
                    self._clear(state, now)
            elif claim := why_wrong(unit, records, out):
                self._question(state, claim, now)
            elif record.is_confirmed and unit not in self._reported:
                self._reported.add(unit)
                self._report(unit, records)
            elif not record.differing and unit in self._reported:
                self._reported.discard(unit)
                self._events.add(Action("answers_agree", "gate", unit))

    # -- in pairs ------------------------------------------------------------------------------------------

    def _question(self, state: UnitState, claim: Doubted, now: float) -> None:
        """Ask it and others again, until chance does not explain that they differ."""
        name = state.unit.name
        if name in self._comparisons or now < self._again.get(name, _NEVER_COMPARED)[0]:
            return
        task = asyncio.get_running_loop().create_task(self._compare(state, claim, now))
        self._comparisons[name] = task
        task.add_done_callback(lambda _: self._comparisons.pop(name, None))

    async def _compare(self, state: UnitState, claim: Doubted, at: float) -> None:
        name = state.unit.name
        peers = [self._board.units[peer] for peer in claim.peers if peer in self._board.units]
        is_urgent = at - self._corrupted_at.get(name, -inf) < CORRUPTED_EVERY_S
        comparison = await self._pairs.compare(state, claim, peers, is_urgent=is_urgent)
        if comparison is None or state.answers is None or not self._pairs.is_there(state):
            return
        group, now = self._group(state, state.answers.question), self._pairs.now()
        if not comparison.is_worse:
            _, wait_s = self._again.get(name, _NEVER_COMPARED)
            self._again[name] = now + wait_s, min(2.0 * wait_s, COMPARE_AGAIN_MAX_S)
            state.answers = no_measure(state.answers, now)
            return
        self._again.pop(name, None)
        out = {other.unit.name for other in self._out() if other.unit.cell == state.unit.cell}
        # Meanwhile others may have gone: a minority may be out, and no more.
        still = why_wrong(name, _records(group), out) if name in group else None
        if still or not out:
            self._condemn(state, state.answers, (still or claim).reason, now)

    def _condemn(self, state: UnitState, record: AnswerRecord, why: str, now: float) -> None:
        state.answers = condemned(record)
        self._reported.discard(state.unit.name)
        self._wrong[state.unit.name] = state
        reason = f"wrong answers: {why}; it says {_text(record)}"
        self._observe(Evidence(state.unit.name, Sign.BAD, Strength.FATAL, ANSWER_SOURCE, reason, now))

    def _clear(self, state: UnitState, now: float) -> None:
        state.urgency = Urgency.ROUTINE
        reason = "its answer to the known prompt is right"
        self._observe(Evidence(state.unit.name, Sign.GOOD, Strength.STRONG, ANSWER_SOURCE, reason, now))

    def _report(self, unit: str, records: dict[str, AnswerRecord]) -> None:
        """Say loudly that nobody can tell whose answer is right."""
        record = records[unit]
        others = sorted(records.keys() - alike(unit, records))
        than = f"than {', '.join(others[:5])}" if others else "than before"
        detail = (
            f"it says {_text(record)} to the known prompt, {record.differing} times in a row, otherwise "
            f"{than}; nobody can tell which answer is right, so it stays; compare weights, or restart it"
        )
        self._events.add(Action("answers_differ", "gate", unit, detail))


_Comparable = tuple[str, str, str, str]
"""Cell, question, engine and build of units that must give the same answer."""


def _comparable(state: UnitState, question: str) -> _Comparable:
    return state.unit.cell, question, state.engine, state.build.key


def _are_comparable(one: UnitState, other: UnitState) -> bool:
    """Whether both run the same. After a restart that is unknown at first, and a unit that was wrong must not
    return because of that.
    """
    if one.engine == other.engine and one.build.key == other.build.key:
        return True
    engines, builds = {one.engine, other.engine}, {one.build.key, other.build.key}
    if one.is_out_for_answers() or other.is_out_for_answers():
        engines.discard("")
        builds.discard("")
    return len(engines) <= 1 and len(builds) <= 1


def _records(group: dict[str, UnitState]) -> dict[str, AnswerRecord]:
    return {unit: state.answers for unit, state in group.items() if state.answers is not None}


def _text(record: AnswerRecord) -> str:
    """The last answer, for a person to read."""
    text = "".join(token.token for token in record.latest[:8])[:_CHECK_TEXT_CHARS]
    return ascii(text) if text else "nothing"


_CHECK_RESULTS = ("same", "differs")


def answer_metrics(board: Board, check: AnswerCheck) -> Iterator[Metric]:
    """Whether units say the same."""
    counts, none = check.counts, Counter[str]()
    yield counter(
        "known_answers",
        "Answers of a unit to the known prompt, by result.",
        ("unit", "result"),
        (
            ((s.unit.name, result), count)
            for s in board
            for result in _CHECK_RESULTS
            if (count := counts.get(s.unit.name, none)[result])
        ),
    )


def attend(plane: Plane) -> AnswerCheck:
    """Begin to ask the units of a control plane, and to compare what they say and claim to serve."""
    prober, board = plane.prober, plane.board
    if every_s := plane.settings.known_answer.every_s:
        prober.add(KnownAnswer(every_s))
    pairs = AnswerPairs(board, plane.fetch_of, plane.now)
    check = AnswerCheck(board, plane.events, prober.observe, prober.look_now, pairs)
    claims = ModelClaims(board, plane.events, plane.fetch_of, plane.now)
    prober.on_answered, prober.on_corrupted, prober.on_models = check.take, check.corrupted, claims.take
    plane.on_flip.append(check.flipped)
    plane.on_gone += [check.forget, claims.forget]
    plane.on_close += [check.close, claims.close]
    plane.metrics.include(partial(answer_metrics, board, check))
    return check
