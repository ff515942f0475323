"""Which units stand still, which are degraded, and when the gate takes itself to be cut off."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.backlog import Abandoned
from cellgate.router.board import Board, Consequence
from cellgate.router.health import (
    CLEARED_S,
    COUNTERS_FRESH_S,
    ENGINE_SEES_S,
    PREFILLS,
    STALLS,
    STEPS,
    UNSEEN_S,
    borne_until,
    find_stall,
    hides_work,
    stall_limit_s,
)
from cellgate.router.learning import ANSWERS, SLOWEST_STEP_S
from cellgate.router.nouns import Ask, Evidence, Fleet, Load, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.outliers import (
    STREAK,
    UNREACHABLE_S,
    Outlier,
    Speed,
    compare,
    is_cut_off,
    is_unreachable,
    slowdown,
)
from cellgate.router.unit_state import SHORTEST_STALL_S, Lease, UnitState
from tests.unit.router.fleets import board_of, board_up

RULES = Rules()
NOW = 100.0
STREAM = Ask("m", stream=True, prompt_tokens=10)
PLAIN = STREAM._replace(stream=False)
law = settings(derandomize=True, deadline=None, max_examples=50)


board = partial(board_of, Unit("a", "cell", "http://a"))


def working(
    ask: Ask = STREAM, *, sighted: bool = False, since: float = NOW
) -> tuple[UnitState, Lease, Board]:
    """A unit with one request, whose counters (if it has some) were read just now."""
    made = board()
    lease = made.open("a", ask, since, retry=False)
    if ask.stream:
        lease.commit(since)
    if sighted:
        made.report(Load("a", since, running=1, progress=7.0, sighted=True))
    return made.units["a"], lease, made


def test_a_stream_on_which_nothing_moves_is_silence_as_long_as_nothing_else_does() -> None:
    state, lease, made = working()
    assert find_stall(state, NOW + 0.99, RULES) is None
    assert find_stall(state, NOW + 1.0, RULES) == (1.0, 1.0, 1)
    state.progress_at = NOW + 5.0
    assert find_stall(state, NOW + 5.9, RULES) is None
    state.progress_at = NOW - 1000.0
    assert find_stall(state, NOW + 0.5, RULES) is None, "it counts from when there was work to do"
    made.close(lease, NOW)
    assert find_stall(state, NOW + 1000.0, RULES) is None, "there is none"
    for plain in (working(PLAIN)[0], working(PLAIN, sighted=True)[0]):
        assert find_stall(plain, NOW + 1000.0, RULES) is None, "without fresh counters nobody can tell"


@pytest.mark.parametrize("mark", ["paused", "evicted"])
def test_what_no_client_reads_and_what_has_been_taken_away_proves_nothing(mark: str) -> None:
    state, lease, made = working(sighted=True)
    setattr(lease, mark, True)
    assert find_stall(state, NOW + 30.0, RULES) is None
    made.open("a", STREAM, NOW, retry=False).commit(NOW)
    found = find_stall(state, NOW + 30.0, RULES)
    assert found is not None
    assert found.waiting == 1


def test_clients_that_leave_before_the_limit_do_not_hide_a_stall_and_refused_ones_do_not_make_one() -> None:
    for outcome in ("left", "refused"):
        state, lease, made = working(sighted=True)
        for number in range(1, 8):
            at = NOW + 0.6 * number
            following = made.open("a", STREAM, at, retry=False)
            if outcome == "left":
                state.unread.leave(Abandoned(lease.opened_at, at, "", 1.0))
            made.close(lease, at)
            lease = following
        made.report(Load("a", NOW + 4.5, running=1, progress=7.0, sighted=True))
        found = find_stall(state, NOW + 4.5, RULES)
        assert (found is not None) is (outcome == "left")


def test_requests_that_a_unit_has_lost_are_held_against_it_once() -> None:
    """A canary has passed while they stood still, and would pass again every second."""
    state, _, made = working()
    state.cleared_at = NOW + 2.0
    assert find_stall(state, NOW + 10.0, RULES) is None
    made.open("a", STREAM, NOW + 3.0, retry=False).commit(NOW + 3.5)
    found = find_stall(state, NOW + 10.0, RULES)
    assert found is not None
    assert found.waiting == 1
    assert find_stall(state, NOW + 2.0 + CLEARED_S, RULES) is not None


@pytest.mark.parametrize(
    ("ask", "was_paused", "tells"), [(STREAM, False, True), (STREAM, True, False), (PLAIN, False, False)]
)
def test_only_a_stream_that_was_read_throughout_tells_how_fast_its_prompt_was_computed(
    ask: Ask, was_paused: bool, tells: bool
) -> None:
    made = board()
    lease = made.open("a", ask._replace(prompt_bytes=400_000), NOW, retry=False)
    lease.was_paused = was_paused
    lease.commit(NOW + 1.0)
    assert (made.units["a"].costs.rates.prefill_tokens_s.seen > 0.0) is tells


def test_a_stream_that_has_yet_to_begin_may_stand_in_line_where_no_step_is_counted() -> None:
    """Behind what others have asked of the unit; where steps are counted, those would show."""
    for sighted, found in ((False, None), (True, (1.0, 1.0, 1))):
        state, lease, made = working(sighted=sighted)
        made.close(lease, NOW)
        made.open("a", STREAM, NOW, retry=False)
        assert find_stall(state, NOW + COUNTERS_FRESH_S, RULES) == found


def test_plain_answers_hide_what_a_unit_does_that_counts_no_steps() -> None:
    """For as long as the slowest engine may take; once one was answered, by what that took for each token."""
    state, _, made = working(PLAIN._replace(max_tokens=100))
    assert hides_work(state, NOW + 100 * SLOWEST_STEP_S, RULES)
    assert not hides_work(state, NOW + 110 * SLOWEST_STEP_S, RULES)
    state.step_times.answered(0, 10.0, 100)
    assert hides_work(state, NOW + ANSWERS * 10.0, RULES)
    assert not hides_work(state, NOW + ANSWERS * 10.0 + 2.0, RULES)
    made.report(Load("a", NOW + 2.0, running=1, progress=7.0, sighted=True))
    assert not hides_work(state, NOW + 2.0, RULES)
    assert hides_work(working(PLAIN)[0], NOW + 3600.0, RULES), "one that may have any length"


def test_a_canary_that_has_a_place_beside_plain_answers_is_not_excused_by_them() -> None:
    """Sent 20 ms before it, a request may come after it, to an engine whose slots are then full."""
    state, _, made = working(PLAIN)
    made.open("a", PLAIN, NOW + 0.98, retry=False)
    state.record_slots(NOW + 1.0)
    assert hides_work(state, NOW + 5.0, RULES)
    made.open("a", STREAM, NOW + 0.99, retry=False).commit(NOW + 1.1)
    state.record_slots(NOW + 1.0)
    assert state.slots_shown == 2, "its stream goes on beside it"
    state, _, _ = working(PLAIN)
    state.record_slots(NOW + 1.0)
    assert not hides_work(state, NOW + 5.0, RULES)


@pytest.mark.parametrize("is_unseen", [False, True])
def test_an_agent_that_says_so_ends_excuses_and_one_that_is_gone_does_not(is_unseen: bool) -> None:
    """Of a stream but for little more than the slowest step of its unit."""
    plain, stream = working(PLAIN)[0], working()[0]
    stream.gaps_ms[1_999] = 200
    reason = "agent unreachable" if is_unseen else "a process is stopped"
    said = Evidence("a", Sign.BAD, Strength.STRONG, "agent", reason, NOW, node="a", is_unseen=is_unseen)
    for state in (plain, stream):
        state.case = replace(state.case, verdict=Verdict.SUSPECT, since=NOW, because=said)
    assert hides_work(plain, NOW + 5.0, RULES) is is_unseen
    assert hides_work(stream, NOW + STALLS * 2.0 - 0.1, RULES)
    assert hides_work(stream, NOW + STALLS * 2.0, RULES) is is_unseen


def test_what_came_after_a_canary_or_a_suspicion_excuses_nothing() -> None:
    state, _, _ = working(PLAIN)
    assert hides_work(state, NOW + 5.0, RULES, asked_at=NOW)
    assert not hides_work(state, NOW + 5.0, RULES, asked_at=NOW - 0.1)
    state.case = replace(state.case, verdict=Verdict.SUSPECT, since=NOW - 1.0)
    assert not hides_work(state, NOW + 5.0, RULES)
    state.progress_at = NOW - 0.5
    assert hides_work(state, NOW + 5.0, RULES), "it has worked since"


def test_a_stream_that_stands_still_on_an_engine_for_one_request_is_believed_for_a_while() -> None:
    state, _, made = working()
    assert hides_work(state, NOW + UNSEEN_S - 0.1, RULES)
    assert not hides_work(state, NOW + UNSEEN_S, RULES)
    made.open("a", STREAM, NOW, retry=False).commit(NOW)
    assert not hides_work(state, NOW + UNSEEN_S - 0.1, RULES), "it computes two at once"
    state, _, made = working(PLAIN)
    for later_s, hides in ((ENGINE_SEES_S, True), (ENGINE_SEES_S + 0.1, False)):
        # A request may not have come to the engine yet that says that it has none.
        made.report(Load("a", NOW + later_s, running=0, own_in_flight=1))
        assert hides_work(state, NOW + later_s, RULES) is hides


def test_a_unit_is_believed_for_longer_where_no_other_does_better_though_its_counters_stand_still() -> None:
    state, _, made = working(sighted=True)
    state.is_alone = True
    made.report(Load("a", NOW + 2.0, running=1, progress=7.0, sighted=True))
    assert hides_work(state, NOW + UNSEEN_S - 0.1, RULES)
    assert not hides_work(state, NOW + UNSEEN_S, RULES)
    assert made.is_alone(state, NOW + 2.0)
    made.configure(
        Fleet(units=(Unit("a", "cell", "http://a", ("m",)), Unit("b", "cell", "http://b", ("m",)))), 0.0
    )
    for each in made:
        each.case = replace(each.case, verdict=Verdict.UP)
    state, other = made.units["a"], made.units["b"]
    assert made.is_alone(state, NOW + 2.0), "nothing shows that the other would do better"
    other.progress_at = NOW + 1.0
    assert not made.is_alone(state, NOW + 2.0), "it has answered a canary since"
    made.open("b", STREAM, NOW + 1.0, retry=False).commit(NOW + 1.0)
    assert not made.is_alone(state, NOW + 1.9)
    assert made.is_alone(state, NOW + 2.1), "it stands still as well"
    other.progress_at = NOW + 2.0
    made.drain("b", drained=True)
    assert made.is_alone(state, NOW + 2.1), "the only one in rotation"


def test_plain_answers_show_in_the_counters_of_an_engine_that_has_them() -> None:
    state, _, made = working(PLAIN, sighted=True)
    made.report(Load("a", NOW + 1.0, running=1, progress=7.0, sighted=True))
    assert find_stall(state, NOW + 1.1, RULES) == (1.0, 1.0, 1)
    made.report(Load("a", NOW + 1.2, running=1, progress=8.0, sighted=True))
    assert find_stall(state, NOW + 1.3, RULES) is None
    stream, _, _ = working(sighted=True)
    # They are as good as the moment that they were read at.
    assert find_stall(stream, NOW + COUNTERS_FRESH_S - 0.01, replace(RULES, silent_min_s=0.5)) is None
    assert find_stall(stream, NOW + COUNTERS_FRESH_S, RULES) == (1.0, 1.0, 1)


def test_the_limit_grows_with_the_slowest_usual_step_and_the_spells_that_passed() -> None:
    """Steps of 0.5 s at the 99th percentile; nothing as long as 2 s has ever stood in between."""
    state, _, _ = working()
    state.gaps_ms[499] += 1000
    assert stall_limit_s(state, RULES) == 1.0
    state.record_stall(0.75)
    assert stall_limit_s(state, RULES) == 1.0, "this one has not passed yet"
    state.progress_at = NOW + 1.0
    assert stall_limit_s(state, RULES) == STALLS * (0.75 + SHORTEST_STALL_S)
    state.record_stall(5.0)
    state.progress_at = NOW + 7.0
    assert stall_limit_s(state, RULES) == STEPS * 0.5


def test_the_limit_grows_with_the_largest_prompt_that_has_shown_nothing() -> None:
    state, _, made = working()
    large = made.open("a", STREAM._replace(prompt_tokens=100_000), NOW, retry=False)
    assert stall_limit_s(state, RULES) == PREFILLS * state.step_times.prefill_s(100_000) > 75.0
    assert find_stall(state, NOW + 74.0, RULES) is None
    large.commit(NOW + 10.0)
    assert stall_limit_s(state, RULES) == RULES.silent_min_s


@law
@given(st.lists(st.integers(0, 4095), max_size=300), st.lists(st.integers(0, 200_000), max_size=5))
def test_the_limit_is_never_below_the_least_and_more_work_never_shortens_it(
    gaps_ms: list[int], prompts: list[int]
) -> None:
    state, _, made = working()
    for gap_ms in gaps_ms:
        state.gaps_ms[gap_ms] += 1
    limit_s = stall_limit_s(state, RULES)
    assert limit_s >= RULES.silent_min_s
    for tokens in prompts:
        made.open("a", STREAM._replace(prompt_tokens=tokens), NOW, retry=False)
        before, limit_s = limit_s, stall_limit_s(state, RULES)
        assert limit_s >= before


# Which unit is called degraded, and which never is.

thorough_law = settings(derandomize=True, deadline=None, max_examples=100)
USUAL = Speed(gap_s=0.020, batch=8.0, kv_use=0.5, weight=1.0)
OTHERS = [USUAL, USUAL, USUAL]


def after(*gaps_s: float, before: Outlier | None = None) -> Outlier:
    """The state after comparisons at which the unit had these gaps."""
    outlier = before or Outlier()
    for gap_s in gaps_s:
        outlier = compare(outlier, USUAL._replace(gap_s=gap_s), OTHERS)
    return outlier


def test_a_slower_unit_is_degraded_after_three_comparisons_in_a_row_and_recovers_after_three() -> None:
    assert slowdown(USUAL, OTHERS) == 1.0
    assert after(*[0.020] * 10) == after(*[0.0249] * 10) == Outlier()
    assert after(0.030, 0.030).degraded == 0.0
    assert after(0.030, 0.030, 0.030).degraded == pytest.approx(1 / 3)
    assert after(0.040, 0.040, 0.040).degraded == pytest.approx(0.5)
    assert after(0.030, 0.030, 0.020, 0.030, 0.030).degraded == 0.0
    one = USUAL._replace(gap_s=0.060)
    assert slowdown(USUAL, [one, USUAL, USUAL]) == 1.0, "one slow unit is not the measure"
    assert slowdown(one, [USUAL, USUAL, USUAL]) == pytest.approx(3.0)
    slow = after(0.030, 0.030, 0.030)
    assert after(*[0.024] * 10, before=slow).degraded > 0.0, "at the edge it does not flap"
    assert after(0.022, 0.022, before=slow).degraded == slow.degraded
    assert after(0.022, 0.022, 0.022, before=slow) == Outlier()
    assert after(0.022, 0.022, 0.030, 0.022, 0.022, before=slow).degraded > 0.0


@thorough_law
@given(st.floats(0.0, 500.0), st.floats(0.0, 500.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_unit_is_never_called_degraded_for_its_batch_or_its_cache(
    own: float, theirs: float, own_kv: float, their_kv: float
) -> None:
    """A gap that grows with one of them, even in proportion to it, is expected."""
    unit = USUAL._replace(batch=own, gap_s=0.020 * max(1.0, (own + 1.0) / (theirs + 1.0)))
    assert slowdown(unit, [USUAL._replace(batch=theirs)] * 2) <= 1.0 + 1e-9
    unit = USUAL._replace(kv_use=own_kv, gap_s=0.020 * max(1.0, (own_kv + 0.1) / (their_kv + 0.1)))
    assert slowdown(unit, [USUAL._replace(kv_use=their_kv)] * 2) <= 1.0 + 1e-9


@thorough_law
@given(st.floats(1.0, 8.0))
def test_a_unit_of_less_weight_may_be_slower_and_one_of_more_need_not_be_faster(weight: float) -> None:
    """It may have more places, and steps as long as those of others."""
    light, heavy = USUAL._replace(weight=1.0 / weight), USUAL._replace(weight=weight)
    assert slowdown(light._replace(gap_s=0.020 * weight), OTHERS) == pytest.approx(1.0)
    assert slowdown(heavy, OTHERS) == pytest.approx(1.0)
    assert slowdown(heavy._replace(gap_s=0.040), OTHERS) == pytest.approx(2.0)
    assert slowdown(USUAL, [heavy, heavy]) <= 1.0


@thorough_law
@given(st.lists(st.floats(0.001, 4.0), max_size=20))
def test_whatever_is_compared_the_share_stays_between_nothing_and_all(gaps_s: list[float]) -> None:
    outlier = after(*gaps_s)
    assert 0.0 <= outlier.degraded < 1.0
    assert 0 <= outlier.streak < STREAK


# When the gate takes itself to be cut off, and what it never holds.


def heard_of(units: int) -> Board:
    """So many units, all UP and heard of at NOW."""
    made = board_up(*(Unit(n, "cell", f"http://{n}") for n in "abcdefgh"[:units]), at=NOW)
    for state in made:
        state.answered_at = NOW
    return made


def fail(made: Board, name: str, at: float, strength: Strength = Strength.STRONG) -> None:
    """Two failures: suspicion, then the fall."""
    for _ in range(2):
        made.observe(Evidence(name, Sign.BAD, strength, "canary", "no answer in time", at))


def down(made: Board) -> str:
    return "".join(state.unit.name for state in made if state.case.verdict is Verdict.DOWN)


@pytest.mark.parametrize(
    ("mute", "rotation", "panics"), [(2, 2, False), (3, 3, True), (3, 6, False), (4, 6, True)]
)
def test_panic_needs_three_and_more_than_half(mute: int, rotation: int, panics: bool) -> None:
    """That have not answered for longer than probes pause."""
    assert is_cut_off(mute, rotation) is panics
    assert not is_unreachable(NOW, NOW, NOW + UNREACHABLE_S)
    assert is_unreachable(NOW, NOW, NOW + UNREACHABLE_S + 0.01)


def test_a_unit_that_is_asked_rarely_is_not_unreachable_before_it_had_time_to_answer() -> None:
    assert not is_unreachable(NOW, inf, NOW + 60.0)
    assert not is_unreachable(NOW, NOW + 9.9, NOW + 10.0)
    assert is_unreachable(NOW, NOW + 9.5, NOW + 10.0)


def test_when_nothing_answers_any_more_the_rotation_is_held_and_let_go_after_30_s() -> None:
    made = heard_of(4)
    for name in made.units:
        fail(made, name, NOW + 3.0)
    assert down(made) == ""
    assert made.panic_at == NOW + 3.0
    made.tick(NOW + 20.0)
    assert made.panic_at == NOW + 3.0
    fail(made, "a", NOW + 32.9)
    assert down(made) == ""
    fail(made, "a", NOW + 33.0)
    assert down(made) == "a"


def test_a_unit_that_is_held_is_asked_again_at_once_and_panic_ends_when_units_answer() -> None:
    made = heard_of(3)
    fail(made, "a", NOW + 3.0)
    assert made.panic_at is not None
    again = Evidence("a", Sign.BAD, Strength.STRONG, "canary", "no answer in time", NOW + 3.5)
    assert made.observe(again) == Consequence(wants_canary=True)
    made.units["b"].answered_at = NOW + 4.0
    made.tick(NOW + 4.0)
    fail(made, "a", NOW + 4.0)
    assert down(made) == "a"


def test_neither_a_unit_that_answers_something_nor_few_units_nor_fatal_evidence_are_held() -> None:
    made = heard_of(4)
    made.units["a"].answered_at = NOW + 2.9
    fail(made, "a", NOW + 3.0)
    fail(made, "b", NOW + 3.0)
    assert down(made) == "a"
    fail(made, "c", NOW + 3.0, Strength.FATAL)
    assert down(made) == "ac"
    for units in (1, 2):
        made = heard_of(units)
        for name in made.units:
            fail(made, name, NOW + 3.0)
        assert down(made) == "ab"[:units]


def waiting(counts: bool = False) -> tuple[Board, UnitState]:
    """A unit where a stream waits since 1.0, and another one came later and began at once."""
    made = board_up(Unit("a", "c", "http://a"), Unit("b", "c", "http://b"))
    state = made.units["a"]
    state.counters_at = NOW if counts else 0.0
    made.open("a", STREAM, 1.0, retry=False)
    later = made.open("a", STREAM, 2.0, retry=False)
    later.commit(20.0)
    state.progress_at = 20.0
    made.close(later, 20.5)
    return made, state


def test_a_unit_where_all_wait_for_a_first_token_is_borne_as_long_as_such_waits_are_known() -> None:
    made, state = waiting()
    assert borne_until(state, 25.0, RULES) == 1.0 + STALLS * 19.0
    assert made.units["b"].overtaken.at(25.0) == 19.0, "its peer is an equal"


def test_no_wait_explains_the_silence_of_a_stream_or_of_counters() -> None:
    made, state = waiting()
    made.open("a", STREAM, 20.6, retry=False).commit(20.7)
    assert borne_until(state, 25.0, RULES) < 20.0 + UNSEEN_S
    _, counted = waiting(counts=True)
    assert borne_until(counted, 25.0, RULES) < 20.0 + UNSEEN_S


def test_a_request_that_is_served_in_its_turn_says_nothing_of_long_waits() -> None:
    """It waited for those before it, as where one is served at a time."""
    made = board_up(Unit("a", "c", "http://a"))
    for at in (1.0, 2.0):
        made.open("a", STREAM, at, retry=False)
    for lease, at in zip(list(made.units["a"].leases), (9.0, 18.0), strict=True):
        lease.commit(at)
    assert made.units["a"].overtaken.at(20.0) == 0.0


def test_silent_equals_are_borne_while_requests_wait_as_long_at_a_peer_that_works() -> None:
    made = board_up(Unit("a", "c", "http://a"), Unit("b", "c", "http://b"))
    state, peer = made.units["a"], made.units["b"]
    for name in ("a", "b"):
        made.open(name, STREAM, 1.0, retry=False)
    peer.canary_answered_at, peer.progress_at = 8.0, 8.1
    made.learn_waits(state, 8.2)
    assert borne_until(state, 8.2, RULES) >= 1.0 + STALLS * 7.0
    made.learn_waits(state, 60.0)
    assert state.overtaken.at(60.0) < 8.0, "a peer that is silent itself says nothing"
