"""The judge: applies one piece of evidence to a case, and may request a canary.

Pure: no clock, no I/O. Rules:
1. The first reading of an epoch is only recorded; a changed one means another incarnation: STARTING again.
2. Neutral evidence never counts. Weak evidence counts as a rate in a window, never as a streak.
3. One bad node is a bad unit: while a fatal fault of a node is open, no canary brings its unit back. The same
   holds for wrong answers, which no ordinary canary can disprove.
4. What follows from a signal is in TRANSITIONS and nowhere else; pairs that are not there change nothing.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from cellgate.router.nouns import Case, Evidence, Rules, Sign, Strength, Verdict
from cellgate.router.opinions import REFUSING_SOURCE

ANSWER_SOURCE = "known_answer"
CANARY_SOURCE = "canary"
READINESS_SOURCE = "readiness"
"""What a unit says of itself: it can raise a suspicion, and is not believed against canaries that pass."""
STALL_SOURCE = "progress"
FAULT_SOURCE = "fault_status"
_OF_ANSWERS = frozenset({ANSWER_SOURCE, REFUSING_SOURCE})
_HOLDING = _OF_ANSWERS | {FAULT_SOURCE}
"""Sources about a unit as a whole whose fatal evidence is an open fault, as that of a node is."""
ECHO_S = 3.0
"""Changed epochs from other readers this soon after the first mean the same incarnation."""
CLEARED_S = 60.0
"""After a canary has cleared a suspicion that is weak, or by readiness, the same source cannot raise it again
for this long.
"""
_WINDOW_MAX = 64


def judge(case: Case, evidence: Evidence, rules: Rules) -> Judgement:
    """Apply `evidence` to `case`."""
    faults = _faults(case.faults, evidence)
    if evidence.epoch is not None:
        case, is_restarted = _read(case, evidence)
        if is_restarted:
            fresh = Case(_STARTING, evidence.at, case.epochs, case.restarted, faults=faults, because=evidence)
            return Judgement(fresh, not faults)
    if evidence.sign is Sign.NEUTRAL or _is_no_news(case, evidence):
        return Judgement(case, False)
    window = _recent(case.window, evidence, rules)
    signal = _signal(window, evidence, rules)
    if case.faults:
        if signal in (Signal.CANARY_PASSED, Signal.READY):
            signal = None
        if not faults:
            signal = Signal.NODES_BACK
    if signal is Signal.WEAK and _is_cleared(case, evidence):
        signal = None
    if signal is None and _is_refuted(case, evidence):
        signal = Signal.CANARY_PASSED
    case = _seen(case, window, faults)
    if signal is Signal.STRONG and evidence.source == READINESS_SOURCE:
        if case.verdict is _PROBATION:
            signal = None
        elif case.verdict is _UP and _is_cleared(case, evidence):
            # It generates, whatever it says. A canary shows whether that is still so.
            return Judgement(replace(case, cleared=(None, evidence.source, evidence.at)), True)
    if signal is None or (case.verdict, signal) not in TRANSITIONS:
        return Judgement(_with_present_reason(case, signal, evidence), False)
    return _move(case, signal, evidence, rules)


class Signal(Enum):
    """The effect of a piece of evidence."""

    FATAL = "fatal"
    CANARY_FAILED = "canary failed"
    CANARY_PASSED = "canary passed"
    STRONG = "strong"
    UNSEEN = "node unseen"
    WEAK = "weak rate"
    READY = "ready"
    NODES_BACK = "every node is back"


class Judgement(NamedTuple):
    """The new case, and whether the judge requests a canary now."""

    case: Case
    wants_canary: bool


_STARTING, _UP, _SUSPECT = Verdict.STARTING, Verdict.UP, Verdict.SUSPECT
_DOWN, _PROBATION = Verdict.DOWN, Verdict.PROBATION

_AGAINST = (Signal.FATAL, Signal.CANARY_FAILED, Signal.STRONG)

# (verdict, signal) -> (next verdict, wants a canary now)
TRANSITIONS: dict[tuple[Verdict, Signal], tuple[Verdict, bool]] = {
    (_STARTING, Signal.READY): (_STARTING, True),
    (_STARTING, Signal.NODES_BACK): (_STARTING, True),
    (_STARTING, Signal.CANARY_PASSED): (_UP, False),
    (_STARTING, Signal.CANARY_FAILED): (_DOWN, False),
    (_STARTING, Signal.FATAL): (_DOWN, False),
    (_UP, Signal.CANARY_FAILED): (_SUSPECT, True),
    (_UP, Signal.STRONG): (_SUSPECT, True),
    (_UP, Signal.UNSEEN): (_SUSPECT, True),
    (_UP, Signal.WEAK): (_SUSPECT, True),
    (_UP, Signal.FATAL): (_DOWN, False),
    (_SUSPECT, Signal.CANARY_PASSED): (_UP, False),
    (_SUSPECT, Signal.CANARY_FAILED): (_DOWN, False),
    (_SUSPECT, Signal.STRONG): (_SUSPECT, True),
    (_SUSPECT, Signal.UNSEEN): (_SUSPECT, True),
    (_SUSPECT, Signal.FATAL): (_DOWN, False),
    (_DOWN, Signal.READY): (_DOWN, True),
    (_DOWN, Signal.NODES_BACK): (_DOWN, True),
    (_DOWN, Signal.CANARY_PASSED): (_PROBATION, True),
    (_PROBATION, Signal.CANARY_PASSED): (_PROBATION, True),
    (_PROBATION, Signal.CANARY_FAILED): (_DOWN, False),
    (_PROBATION, Signal.STRONG): (_DOWN, False),
    (_PROBATION, Signal.FATAL): (_DOWN, False),
}


def open_case(now: float) -> Case:
    """The case of a unit without evidence."""
    return Case(Verdict.STARTING, now)


def ignores_good_evidence(case: Case) -> bool:
    """True when good evidence would change nothing: the unit is UP without recent bad evidence."""
    if case.verdict is not _UP or case.faults:
        return False
    # A generator would cost more than all else that is done with good evidence.
    for known in case.window:  # noqa: SIM110
        if known.sign is Sign.BAD:
            return False
    return True


def said_again(case: Case, evidence: Evidence, rules: Rules) -> Case:
    """As `judge`, for weak good evidence of a unit as a whole where that changes nothing: only the rate of
    bad evidence later is another one.
    """
    return _seen(case, _recent(case.window, evidence, rules), case.faults)


def _seen(case: Case, window: tuple[Evidence, ...], faults: frozenset[tuple[str, str]]) -> Case:
    """The same case with other evidence. As `replace`, which would cost more than all else that is done with
    good evidence.
    """
    return Case(
        case.verdict,
        case.since,
        case.epochs,
        case.restarted,
        window,
        case.passes,
        faults,
        case.because,
        case.cleared,
    )


def _with_present_reason(case: Case, signal: Signal | None, evidence: Evidence) -> Case:
    """The case of a unit that stays DOWN, by what speaks against it now, which may be something new."""
    if case.verdict is not _DOWN or case.faults or signal not in _AGAINST or case.because is None:
        return case
    before = case.because
    outweighs = evidence.source in (CANARY_SOURCE, before.source) or before.strength is Strength.FATAL
    return replace(case, because=evidence) if outweighs else case


def _read(case: Case, evidence: Evidence) -> tuple[Case, bool]:
    """The case with a reading of the epoch recorded, and whether it means another incarnation."""
    assert evidence.epoch is not None
    reader = f"{evidence.source} {evidence.node}" if evidence.node else evidence.source
    readings = dict(case.epochs)
    known = readings.get(reader)
    if known == evidence.epoch:
        return case, False
    readings[reader] = evidence.epoch
    case = replace(case, epochs=tuple(readings.items()))
    first, at = case.restarted or (reader, -ECHO_S)
    # After the restart of a whole unit several readers see the same new incarnation, one after another.
    if known is None or (reader != first and evidence.at - at < ECHO_S):
        return case, False
    return replace(case, restarted=(reader, evidence.at)), True


def _is_no_news(case: Case, evidence: Evidence) -> bool:
    """A healthy node reports that all the time; it counts only after bad evidence about that node."""
    if evidence.node is None or evidence.sign is not Sign.GOOD or case.faults:
        return False
    # A generator would cost more than all else that is done with the evidence of a node in good order.
    for known in case.window:  # noqa: SIM110
        if known.sign is Sign.BAD and known.node == evidence.node:
            return False
    return True


def _faults(faults: frozenset[tuple[str, str]], evidence: Evidence) -> frozenset[tuple[str, str]]:
    """The open faults after `evidence`.

    Only its source can clear a fault: by good evidence, or when it cannot reach the node any more.
    """
    if evidence.node is None and evidence.source not in _HOLDING:
        return faults
    fault = (evidence.node or "", evidence.source)
    if evidence.sign is Sign.BAD and evidence.strength is Strength.FATAL:
        return faults | {fault}
    lost_sight = evidence.sign is Sign.BAD and evidence.strength is Strength.STRONG
    return faults - {fault} if faults and (evidence.sign is Sign.GOOD or lost_sight) else faults


def _move(case: Case, signal: Signal, evidence: Evidence, rules: Rules) -> Judgement:
    verdict, wants_canary = TRANSITIONS[case.verdict, signal]
    passes = case.passes + 1 if signal is Signal.CANARY_PASSED else 0
    if verdict is _PROBATION and passes >= rules.passes:
        verdict, wants_canary = _UP, False
    if verdict is case.verdict:
        return Judgement(replace(case, passes=passes), wants_canary)
    # Earlier evidence against the unit is obsolete.
    window = () if verdict is _UP else case.window
    if case.verdict is _SUSPECT and verdict is _UP and case.because is not None:
        case = replace(case, cleared=(case.because.node, case.because.source, evidence.at))
    moved = replace(case, verdict=verdict, since=evidence.at, window=window, passes=passes, because=evidence)
    return Judgement(moved, wants_canary)


def _recent(window: tuple[Evidence, ...], evidence: Evidence, rules: Rules) -> tuple[Evidence, ...]:
    oldest, first = evidence.at - rules.weak_window_s, max(0, len(window) - _WINDOW_MAX + 1)
    while first < len(window) and window[first].at < oldest:
        first += 1
    return (*window[first:], evidence)


def _signal(window: tuple[Evidence, ...], evidence: Evidence, rules: Rules) -> Signal | None:
    if evidence.sign is Sign.GOOD:
        if evidence.source == CANARY_SOURCE:
            return Signal.CANARY_PASSED
        # A healthy node proves nothing about the engine.
        return Signal.READY if evidence.strength is Strength.WEAK and evidence.node is None else None
    if evidence.strength is Strength.FATAL:
        return Signal.FATAL
    if evidence.strength is Strength.STRONG:
        if evidence.source == CANARY_SOURCE:
            return Signal.CANARY_FAILED
        # A node that cannot be reached is only a suspicion, because the unit may work.
        return Signal.STRONG if evidence.node is None else Signal.UNSEEN
    # The rate of one node must not be diluted by good evidence of others, nor that of one probe by another.
    own = [e.sign is Sign.BAD for e in window if _is_of_one_rate(e, evidence)]
    bad = sum(own)
    return Signal.WEAK if bad >= rules.weak_min and bad >= rules.weak_rate * len(own) else None


def _is_refuted(case: Case, evidence: Evidence) -> bool:
    """A unit that was suspected of standing still has finished a generation: that is more than a canary."""
    is_work = evidence.sign is Sign.GOOD and evidence.strength is Strength.STRONG and evidence.node is None
    is_stall = case.verdict is _SUSPECT and case.because is not None and case.because.source == STALL_SOURCE
    return is_work and is_stall and evidence.source not in _HOLDING


def works_though_out(case: Case) -> bool:
    """Whether the unit is out for what it answers: it works, so that no request has ended it."""
    return any(source in _OF_ANSWERS for _, source in case.faults)


def _is_of_one_rate(one: Evidence, other: Evidence) -> bool:
    return one.node == other.node and (one.node is None or one.source == other.source)


def _is_cleared(case: Case, evidence: Evidence) -> bool:
    """A node with a constant weak fault must not make its working unit suspect every few seconds."""
    node, source, at = case.cleared
    return (node, source) == (evidence.node, evidence.source) and evidence.at - at < CLEARED_S
