"""The judge, held to its table; what a hold explains; why a unit went DOWN."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router import health
from cellgate.router.board import DownCause, down_cause
from cellgate.router.judge import (
    ANSWER_SOURCE,
    CANARY_SOURCE,
    READINESS_SOURCE,
    TRANSITIONS,
    Judgement,
    Signal,
    ignores_good_evidence,
    judge,
    open_case,
    said_again,
)
from cellgate.router.known_answers import ANSWER_FAULT
from cellgate.router.nouns import (
    Case,
    Cell,
    EnginePause,
    Evidence,
    Hold,
    HoldKind,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.opinions import REFUSING_SOURCE
from cellgate.router.unit_state import UnitState
from tests.unit.router.fleets import board_of

RULES = Rules(weak_window_s=10.0, weak_min=5, weak_rate=0.5, passes=2)
NOW = 100.0
BAD, GOOD, NEUTRAL = Sign.BAD, Sign.GOOD, Sign.NEUTRAL
law = settings(derandomize=True, deadline=None, max_examples=100)


def evidence(
    sign: Sign, strength: Strength, source: str = "request", at: float = NOW, epoch: str | None = None
) -> Evidence:
    """Evidence about the unit `u`."""
    return Evidence("u", sign, strength, source, "seen", at, epoch)


PASSED = evidence(GOOD, Strength.STRONG, CANARY_SOURCE)
FAILED = evidence(BAD, Strength.STRONG, CANARY_SOURCE)
WEAK = evidence(BAD, Strength.WEAK)
READY = evidence(GOOD, Strength.WEAK, "readiness")
EVIDENCE_FOR: dict[Signal, Evidence] = {
    Signal.FATAL: evidence(BAD, Strength.FATAL),
    Signal.CANARY_FAILED: FAILED,
    Signal.CANARY_PASSED: PASSED,
    Signal.STRONG: evidence(BAD, Strength.STRONG),
    Signal.UNSEEN: replace(evidence(BAD, Strength.STRONG, "agent"), node="n"),
    Signal.WEAK: WEAK,
    Signal.READY: READY,
    Signal.NODES_BACK: replace(READY, source="agent", node="n"),
}


def fold(case: Case, *pieces: Evidence, rules: Rules = RULES) -> Judgement:
    """The last judgement after several pieces of evidence."""
    judgement = Judgement(case, False)
    for piece in pieces:
        judgement = judge(judgement.case, piece, rules)
    return judgement


signs, strengths = st.sampled_from(Sign), st.sampled_from(Strength)
sources = st.sampled_from([CANARY_SOURCE, "readiness", "request"])
epochs = st.sampled_from([None, None, None, "1", "2"])


@st.composite
def histories(draw: st.DrawFn) -> list[Evidence]:
    """Any evidence, in order of time."""
    at, pieces = NOW, []
    for _ in range(draw(st.integers(0, 25))):
        at += draw(st.floats(0.0, 4.0))
        pieces.append(evidence(draw(signs), draw(strengths), draw(sources), at, draw(epochs)))
    return pieces


def reach(history: list[Evidence]) -> Case:
    """The case that a history leads to, from the beginning."""
    return fold(open_case(NOW), *history).case


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("verdict", Verdict)
def test_what_follows_from_a_signal_is_in_the_table_and_only_there(verdict: Verdict, signal: Signal) -> None:
    """A pair that is not listed changes nothing and wishes for nothing."""
    window = (WEAK,) * (RULES.weak_min - 1) if signal is Signal.WEAK else ()
    gone = frozenset({("n", "agent")}) if signal is Signal.NODES_BACK else frozenset()
    case = Case(verdict, 0.0, window=window, faults=gone)
    after = judge(case, EVIDENCE_FOR[signal], RULES)
    assert (after.case.verdict, after.wants_canary) == TRANSITIONS.get((verdict, signal), (verdict, False))


def test_the_table_lists_no_idle_pair_and_only_a_passed_canary_leads_to_up() -> None:
    """Each row moves the verdict, wishes for a canary or counts a pass; fatal evidence is always believed."""
    fatal = [TRANSITIONS.get((verdict, Signal.FATAL), (verdict,))[0] for verdict in Verdict]
    assert set(fatal) == {Verdict.DOWN}
    for (before, signal), (after, wants_canary) in TRANSITIONS.items():
        assert after is not before or wants_canary or signal is Signal.CANARY_PASSED
        assert not before is not after is Verdict.UP or signal is Signal.CANARY_PASSED


def test_a_verdict_that_stays_keeps_its_time_and_tells_the_present_reason() -> None:
    """A unit that refused connections and now turns canaries down is down for that; an open fault stays."""
    case = judge(Case(Verdict.UP, 0.0), EVIDENCE_FOR[Signal.FATAL], RULES).case
    assert (case.because, case.since) == (EVIDENCE_FOR[Signal.FATAL], NOW)
    now = replace(FAILED, at=NOW + 5.0, reason="the canary was refused: HTTP 401")
    later = judge(case, now, RULES).case
    assert (later.because, later.since) == (now, NOW)
    unready = replace(evidence(BAD, Strength.STRONG, READINESS_SOURCE), at=NOW + 6.0)
    assert judge(later, unready, RULES).case.because is now, "a canary proves more"
    assert fold(Case(Verdict.UP, 0.0), GONE, replace(FAILED, at=NOW + 1.0)).case.because is GONE


def test_a_unit_that_calls_itself_unready_and_passes_its_canaries_stays_up() -> None:
    """It is suspected once. After that each complaint asks for one canary, and changes no verdict."""
    case, verdicts, canaries = Case(Verdict.UP, 0.0), [], 0
    for i in range(300):
        unready = replace(evidence(BAD, Strength.STRONG, READINESS_SOURCE), at=NOW + i)
        case, wants_canary = judge(case, unready, RULES)
        verdicts.append(case.verdict)
        canaries += wants_canary
        if wants_canary:
            case = judge(case, replace(PASSED, at=NOW + i + 0.1), RULES).case
    assert verdicts == [Verdict.SUSPECT] + [Verdict.UP] * 299
    assert canaries == 300
    dead = fold(case, unready, FAILED, FAILED).case
    assert dead.verdict is Verdict.DOWN, "its canaries decide"
    assert fold(dead, unready, PASSED, unready, PASSED).case.verdict is Verdict.UP


def test_a_down_unit_comes_back_by_passes_in_a_row_with_a_clean_slate() -> None:
    """A failure in between starts the row again; old failures would make the next weak one a suspicion."""
    down = Case(Verdict.DOWN, 0.0)
    assert fold(down, PASSED).case.verdict is Verdict.PROBATION
    assert fold(down, PASSED).wants_canary
    assert fold(down, PASSED, PASSED).case.verdict is Verdict.UP
    assert fold(down, PASSED, FAILED, PASSED).case.verdict is Verdict.PROBATION
    assert fold(down, PASSED, rules=replace(RULES, passes=1)).case.verdict is Verdict.UP
    assert fold(down, PASSED, PASSED, rules=replace(RULES, passes=3)).case.verdict is Verdict.PROBATION
    up = fold(Case(Verdict.UP, 0.0), *[WEAK] * 5, PASSED).case
    assert (up.verdict, up.window) == (Verdict.UP, ())


@law
@given(histories(), st.integers(1, 4))
def test_down_is_never_terminal(history: list[Evidence], passes: int) -> None:
    """From wherever a unit may have got, passing canaries lead to UP."""
    rules = replace(RULES, passes=passes)
    case = fold(open_case(NOW), *history, rules=rules).case
    assert (
        fold(case, *[replace(PASSED, at=case.since + 1.0)] * (passes + 1), rules=rules).case.verdict
        is Verdict.UP
    )


@law
@given(histories(), strengths, sources)
def test_neutral_evidence_changes_nothing_and_the_first_reading_of_an_epoch_is_only_noted(
    history: list[Evidence], strength: Strength, source: str
) -> None:
    """The gate may have been started after the unit, and each reader has its own way to say it."""
    case = reach(history)
    neutral = evidence(NEUTRAL, strength, source, at=case.since + 1.0, epoch=dict(case.epochs).get(source))
    assert judge(case, neutral, RULES) == (case, False)
    assert judge(case, replace(neutral, epoch=None), RULES) == (case, False)
    case = replace(case, epochs=(("agent n", "7"),))
    noted = judge(case, replace(neutral, epoch="1"), RULES)
    assert noted == (replace(case, epochs=(("agent n", "7"), (source, "1"))), False)


@law
@given(histories(), signs, strengths, sources)
def test_a_new_epoch_is_another_incarnation(
    history: list[Evidence], sign: Sign, strength: Strength, source: str
) -> None:
    """It starts with a clean slate and a canary, by whatever evidence it is seen."""
    case = replace(reach(history), epochs=((source, "old"), ("another", "7")), restarted=None)
    seen = evidence(sign, strength, source, at=case.since + 1.0, epoch="new")
    readings = ((source, "new"), ("another", "7"))
    fresh = Case(Verdict.STARTING, seen.at, readings, (source, seen.at), because=seen)
    assert judge(case, seen, RULES) == (fresh, True)


GONE = replace(EVIDENCE_FOR[Signal.FATAL], source="agent", node="n")
BACK = replace(READY, source="agent", node="n")


def test_one_bad_node_is_a_bad_unit_until_its_own_source_takes_it_back() -> None:
    """The leader of a unit whose follower is gone may still answer a canary from what it has cached."""
    down = judge(Case(Verdict.UP, 0.0), GONE, RULES).case
    assert down.verdict is Verdict.DOWN
    others = (PASSED, READY, replace(BACK, node="m"), replace(BACK, source="http"))
    assert fold(down, *others).case.verdict is Verdict.DOWN
    assert not fold(down, *others).wants_canary
    back = fold(down, *others, BACK)
    assert (back.case.verdict, back.wants_canary) == (Verdict.DOWN, True)
    assert fold(back.case, PASSED, PASSED).case.verdict is Verdict.UP
    half = fold(down, replace(GONE, node="m"), BACK)
    assert (half.case.faults, half.wants_canary) == (frozenset({("m", "agent")}), False)
    assert fold(half.case, PASSED, PASSED).case.verdict is Verdict.DOWN, "another of its nodes is bad"


def test_a_new_incarnation_has_the_faults_of_the_nodes_that_are_still_gone() -> None:
    """The leader has come back before its follower: a canary would prove nothing."""
    case = Case(Verdict.UP, 0.0, (("agent n", "1"), ("engine_metrics", "1")))
    restarted = fold(case, GONE, evidence(NEUTRAL, Strength.WEAK, "engine_metrics", epoch="2"))
    assert (restarted.case.verdict, restarted.wants_canary) == (Verdict.STARTING, False)
    assert fold(restarted.case, PASSED).case.verdict is Verdict.STARTING
    back = fold(restarted.case, BACK)
    assert back.wants_canary
    assert fold(back.case, PASSED).case.verdict is Verdict.UP
    # An agent says with one word that its node is back and that it has restarted.
    node = fold(case, GONE, replace(BACK, epoch="2"))
    assert (node.case.verdict, node.wants_canary) == (Verdict.STARTING, True)
    assert (node.case.faults, dict(node.case.epochs)["agent n"]) == (frozenset(), "2")


def test_what_others_read_of_the_same_restart_is_its_echo() -> None:
    """The leader's metrics are read a second after its agent has spoken; a canary has passed in between."""
    case = Case(Verdict.UP, 0.0, (("agent n", "1"), ("engine_metrics", "1")))
    told = replace(BACK, epoch="2")
    up = fold(case, told, PASSED).case
    echo = evidence(NEUTRAL, Strength.WEAK, "engine_metrics", at=NOW + 1.0, epoch="2")
    assert fold(up, echo) == (replace(up, epochs=(("agent n", "2"), ("engine_metrics", "2"))), False)
    for again in (replace(told, at=NOW + 1.0, epoch="3"), replace(echo, at=NOW + 60.0)):
        assert fold(up, again).case.verdict is Verdict.STARTING


def test_a_weak_suspicion_that_a_canary_has_answered_is_not_raised_at_once_again() -> None:
    """A page that is not what its probe expects is no reason to doubt a working unit every five seconds."""
    garbage = replace(WEAK, source="http", node="n")
    case, suspicions = Case(Verdict.UP, 0.0), 0
    for second in range(61):
        case = judge(case, replace(garbage, at=NOW + second), RULES).case
        if case.verdict is Verdict.SUSPECT:
            suspicions += 1
            case = judge(case, replace(PASSED, at=NOW + second), RULES).case
    assert suspicions == 1
    other = [replace(WEAK, at=NOW + 60.0 + i) for i in range(RULES.weak_min)]
    assert fold(case, *other).case.verdict is Verdict.SUSPECT


def test_the_good_news_of_other_nodes_does_not_dilute_the_bad_of_one() -> None:
    """Fifteen well followers must not hide one that times out."""
    late = replace(WEAK, source="http", node="n")
    others = [replace(BACK, node=f"m{i}") for i in range(15)]
    pieces = [piece for _ in range(RULES.weak_min) for piece in (*others, late)]
    assert fold(Case(Verdict.UP, 0.0), *pieces).case.verdict is Verdict.SUSPECT
    # A fault whose source has lost sight of the node is left to canaries: that may never come back.
    unseen = EVIDENCE_FOR[Signal.UNSEEN]
    case = fold(Case(Verdict.UP, 0.0), GONE, unseen)
    assert (case.case.verdict, case.wants_canary, case.case.faults) == (Verdict.DOWN, True, frozenset())
    assert fold(case.case, PASSED, unseen, PASSED).case.verdict is Verdict.UP


@law
@given(histories())
def test_the_window_is_bounded_in_count_and_in_time(history: list[Evidence]) -> None:
    """And holds nothing neutral."""
    case = reach(history)
    assert all(e.sign is not NEUTRAL for e in case.window)
    if case.window:
        assert case.window[-1].at - case.window[0].at <= RULES.weak_window_s
    pieces = [replace(READY, at=case.since + i / 1000) for i in range(100)]
    case = fold(replace(case, verdict=Verdict.UP), *pieces).case
    assert len(case.window) == 64
    assert case.window[-1] is pieces[-1]


@law
@given(st.lists(st.booleans(), max_size=40), st.floats(0.0, 3.0))
def test_weak_evidence_counts_as_a_rate(are_bad: list[bool], step_s: float) -> None:
    """Suspicion comes exactly when enough of what is recent is bad, and enough in number."""
    case = Case(Verdict.UP, 0.0)
    seen: list[Evidence] = []
    for i, is_bad in enumerate(are_bad):
        piece = replace(WEAK if is_bad else READY, at=NOW + i * step_s)
        seen.append(piece)
        recent = [e for e in seen if e.at >= piece.at - RULES.weak_window_s]
        bad = sum(e.sign is BAD for e in recent)
        case = judge(case, piece, RULES).case
        if is_bad and bad >= RULES.weak_min and bad / len(recent) >= RULES.weak_rate:
            assert case.verdict is Verdict.SUSPECT
            return
        assert case.verdict is Verdict.UP


@law
@given(histories(), strengths, sources)
def test_nothing_to_learn_means_that_good_news_change_no_verdict(
    history: list[Evidence], strength: Strength, source: str
) -> None:
    """So that finished requests may skip the judge."""
    case = reach(history)
    if ignores_good_evidence(case):
        after = judge(case, evidence(GOOD, strength, source, at=case.since + 1.0), RULES)
        assert (after.case.verdict, after.wants_canary) == (Verdict.UP, False)
        assert ignores_good_evidence(after.case)


@law
@given(st.lists(st.tuples(strengths, sources, st.floats(0.0, 4.0)), max_size=80), st.floats(0.0, 20.0))
def test_a_unit_that_says_again_that_it_is_well_is_judged_as_always(
    history: list[tuple[Strength, str, float]], later_s: float
) -> None:
    """So that what it says again and again may skip the judge."""
    case, at = fold(open_case(NOW), PASSED).case, NOW
    for strength, source, pause_s in history:
        at += pause_s
        case = fold(case, evidence(GOOD, strength, source, at)).case
    assert ignores_good_evidence(case)
    again = evidence(GOOD, Strength.WEAK, READINESS_SOURCE, at + later_s)
    assert judge(case, again, RULES) == (said_again(case, again, RULES), False)


def test_wrong_answers_hold_a_unit_down_until_their_source_takes_them_back() -> None:
    """No canary of one token disproves them, nor does a new incarnation."""
    wrong = evidence(BAD, Strength.FATAL, ANSWER_SOURCE, 1.0)
    right = evidence(GOOD, Strength.STRONG, ANSWER_SOURCE, 4.0)
    canary = replace(PASSED, at=2.0)
    case = fold(open_case(0.0), canary, wrong).case
    assert (case.verdict, case.faults) == (Verdict.DOWN, frozenset({ANSWER_FAULT}))
    assert fold(case, canary).case.verdict is Verdict.DOWN
    born = [evidence(NEUTRAL, Strength.STRONG, "x", at, epoch) for at, epoch in ((2.0, "1"), (3.0, "2"))]
    restarted = fold(case, *born).case
    assert (restarted.verdict, restarted.faults) == (Verdict.STARTING, frozenset({ANSWER_FAULT}))
    assert fold(restarted, canary).case.verdict is Verdict.STARTING
    cleared = fold(restarted, right)
    assert (cleared.case.faults, cleared.wants_canary) == (frozenset(), True)
    assert fold(cleared.case, replace(canary, at=5.0)).case.verdict is Verdict.UP


# What a hold explains, how long it is believed, and what follows its end.

HOLD_RULES = Rules(hold_limit_s=100.0)
PAUSED = Hold(HoldKind.PAUSED, 10.0, 10.0)


def make(verdict: Verdict = Verdict.UP) -> UnitState:
    return UnitState(Unit("u", "c", "http://u"), Cell("c"), replace(open_case(0.0), verdict=verdict))


def say(state: UnitState, kind: HoldKind | None, at: float) -> bool:
    return health.hear(state, EnginePause("u", kind, at))


def observed(strength: Strength, node: str | None = None, sign: Sign = Sign.BAD) -> Evidence:
    return Evidence("u", sign, strength, "canary", "no token", 11.0, node=node)


@pytest.mark.parametrize("strength", Strength)
def test_a_hold_explains_what_is_no_fact(strength: Strength) -> None:
    word = observed(strength)
    assert health.explains(PAUSED, word) is (strength is not Strength.FATAL)
    assert not health.explains(PAUSED, observed(strength, node="n"))
    assert not health.explains(PAUSED, observed(strength, sign=Sign.GOOD))
    assert not health.explains(replace(PAUSED, ended_at=11.0), word)
    assert not health.explains(None, word)


def test_it_lasts_while_the_engine_says_so_and_ends_with_a_proof_or_when_none_can_be_had() -> None:
    state, other = make(), make()
    assert say(state, HoldKind.PAUSED, 10.0)
    assert not say(state, HoldKind.PAUSED, 12.0)
    assert not health.pass_time(state, 13.0, HOLD_RULES)
    assert not state.is_usable()
    assert say(state, None, 14.0)
    assert (state.held_until, state.is_usable()) == (14.0, False)
    state.progress_at = 14.1
    health.pass_time(state, 14.25, HOLD_RULES)
    assert state.is_usable()
    say(other, HoldKind.PAUSED, 10.0)
    say(other, None, 20.0)
    health.pass_time(other, 20.1 + health.PROOF_S, HOLD_RULES)
    assert other.is_usable()


def test_an_engine_that_stops_saying_so_or_has_a_fact_against_it_is_not_believed() -> None:
    state, down, hurt = make(), make(Verdict.DOWN), make()
    say(state, HoldKind.ASLEEP, 10.0)
    assert not health.pass_time(state, 10.0 + health.SAID_S, HOLD_RULES)
    assert health.pass_time(state, 10.1 + health.SAID_S, HOLD_RULES)
    assert not state.is_hold_spent
    down.case = replace(down.case, because=observed(Strength.FATAL))
    hurt.case = replace(hurt.case, faults=frozenset({("n", "agent")}))
    for state in (down, hurt):
        assert not say(state, HoldKind.PAUSED, 10.0)
        assert state.hold is None


def test_after_the_limit_it_is_ignored_until_the_engine_says_that_it_goes_on() -> None:
    """One that returns without work in between goes on from where it began."""
    state = make()
    for at in range(10, 50):
        say(state, HoldKind.PAUSED, float(at))
    say(state, None, 50.0)
    for at in range(51, 111):
        say(state, HoldKind.PAUSED, float(at))
    assert state.hold == Hold(HoldKind.PAUSED, 10.0, 110.0)
    assert health.pass_time(state, 110.0, HOLD_RULES)
    assert not say(state, HoldKind.PAUSED, 111.0)
    assert not health.is_on(state.hold)
    say(state, None, 112.0)
    assert say(state, HoldKind.PAUSED, 113.0)


# Why a unit went DOWN: a wedge is what answers its health check and generates nothing.

SUSPECT = Case(Verdict.SUSPECT, 10.0)
NO_TOKEN = Evidence("a1", Sign.BAD, Strength.STRONG, "canary", "no token in 2 s", 12.0)
REFUSED = replace(NO_TOKEN, strength=Strength.FATAL, reason="connection refused")
HEALTHY = Evidence("a1", Sign.GOOD, Strength.WEAK, "readiness", "HTTP 200", 11.0)


@pytest.mark.parametrize(
    ("evidence", "health", "cause"),
    [
        (NO_TOKEN, HEALTHY, DownCause.WEDGED),
        (replace(NO_TOKEN, source=REFUSING_SOURCE), HEALTHY, DownCause.REFUSES_REQUESTS),
        *((NO_TOKEN, at, DownCause.UNHEALTHY) for at in (None, replace(HEALTHY, at=9.0))),
        (NO_TOKEN, replace(HEALTHY, sign=Sign.BAD), DownCause.UNHEALTHY),
        (REFUSED, HEALTHY, DownCause.REFUSED),
        (replace(REFUSED, source="agent", node="a1-1"), HEALTHY, DownCause.NODE),
        (replace(REFUSED, source=ANSWER_SOURCE), HEALTHY, DownCause.WRONG_ANSWERS),
    ],
)
def test_the_cause_is_what_was_seen(evidence: Evidence, health: Evidence | None, cause: DownCause) -> None:
    assert down_cause(SUSPECT, evidence, health) is cause


def test_a_flip_to_down_has_a_cause_and_no_other_flip_has() -> None:
    board = board_of(Unit("a1", "a", "http://127.0.0.1:8101"))
    told = (replace(NO_TOKEN, sign=Sign.GOOD, at=1.0), NO_TOKEN, replace(HEALTHY, at=13.0))
    flips = [board.observe(evidence).flip for evidence in (*told, replace(NO_TOKEN, at=14.0))]
    causes = {flip.after: flip.cause for flip in flips if flip is not None}
    assert causes == {Verdict.UP: None, Verdict.SUSPECT: None, Verdict.DOWN: DownCause.WEDGED}
