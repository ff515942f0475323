"""When a unit that has work is silent for too long, and what proves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Fleet, Load, Rules, Unit
from cellgate.router.stall import (
    CLEARED_S,
    COUNTERS_FRESH_S,
    PLAIN_S,
    PREFILLS,
    SPELLS,
    STEPS,
    hides_work,
    silence,
    silent_limit_s,
)
from cellgate.router.unit_state import SPELL_S, Desk, Lease

RULES = Rules()
NOW = 100.0
STREAM = Ask("m", stream=True, prompt_tokens=10)
PLAIN = STREAM._replace(stream=False)
law = settings(derandomize=True, deadline=None, max_examples=50)


def board() -> Board:
    made = Board(RULES)
    made.configure(Fleet(units=(Unit("a", "cell", "http://a"),)), 0.0)
    return made


def working(ask: Ask = STREAM, *, sighted: bool = False, since: float = NOW) -> tuple[Desk, Lease, Board]:
    """A unit with one request, whose counters (if it has some) were read just now."""
    made = board()
    lease = made.open("a", ask, since, retry=False)
    if ask.stream:
        lease.commit(since)
    if sighted:
        made.report(Load("a", since, running=1, progress=7.0, sighted=True))
    return made.desks["a"], lease, made


def test_a_stream_on_which_nothing_moves_is_silence() -> None:
    desk, _, _ = working()
    assert silence(desk, NOW + 0.99, RULES) is None
    assert silence(desk, NOW + 1.0, RULES) == (1.0, 1.0, 1)


def test_a_unit_without_requests_is_never_silent() -> None:
    desk, lease, made = working()
    made.close(lease, NOW)
    assert silence(desk, NOW + 1000.0, RULES) is None


def test_any_work_breaks_the_silence() -> None:
    desk, _, _ = working()
    desk.life_at = NOW + 5.0
    assert silence(desk, NOW + 5.9, RULES) is None


def test_silence_is_counted_from_when_there_was_work_to_do() -> None:
    desk, _, _ = working(since=NOW)
    desk.life_at = NOW - 1000.0
    assert silence(desk, NOW + 0.5, RULES) is None


@pytest.mark.parametrize("mark", ["paused", "evicted"])
def test_what_no_client_reads_and_what_has_been_taken_away_proves_nothing(mark: str) -> None:
    desk, lease, made = working(sighted=True)
    setattr(lease, mark, True)
    assert silence(desk, NOW + 30.0, RULES) is None
    made.open("a", STREAM, NOW, retry=False).commit(NOW)
    found = silence(desk, NOW + 30.0, RULES)
    assert found is not None
    assert found.waiting == 1


def test_plain_answers_of_an_engine_without_counters_prove_nothing() -> None:
    desk, _, _ = working(PLAIN)
    assert silence(desk, NOW + 1000.0, RULES) is None


def test_a_stream_that_has_yet_to_begin_may_stand_in_line_where_no_step_is_counted() -> None:
    """Behind what others have asked of the unit; where steps are counted, those would show."""
    for sighted, found in ((False, None), (True, (1.0, 1.0, 1))):
        desk, lease, made = working(sighted=sighted)
        made.close(lease, NOW)
        made.open("a", STREAM, NOW, retry=False)
        assert silence(desk, NOW + COUNTERS_FRESH_S, RULES) == found


def test_requests_that_a_unit_has_lost_are_held_against_it_once() -> None:
    """A canary has passed while they stood still, and would pass again every second."""
    desk, _, made = working()
    desk.cleared_at = NOW + 2.0
    assert silence(desk, NOW + 10.0, RULES) is None
    made.open("a", STREAM, NOW + 3.0, retry=False).commit(NOW + 3.5)
    found = silence(desk, NOW + 10.0, RULES)
    assert found is not None
    assert found.waiting == 1
    assert silence(desk, NOW + 2.0 + CLEARED_S, RULES) is not None


def test_plain_answers_hide_what_a_unit_does_that_counts_no_steps() -> None:
    desk, _, made = working(PLAIN)
    assert hides_work(desk, NOW + PLAIN_S - 0.1)
    assert not hides_work(desk, NOW + PLAIN_S)
    desk.pace.answered(100.0)
    assert hides_work(desk, NOW + 199.0)
    made.report(Load("a", NOW, running=1, progress=7.0, sighted=True))
    assert not hides_work(desk, NOW)
    assert not hides_work(working()[0], NOW), "a stream shows"


def test_plain_answers_show_in_the_counters_of_an_engine_that_has_them() -> None:
    desk, _, made = working(PLAIN, sighted=True)
    made.report(Load("a", NOW + 1.0, running=1, progress=7.0, sighted=True))
    assert silence(desk, NOW + 1.1, RULES) == (1.0, 1.0, 1)
    made.report(Load("a", NOW + 1.2, running=1, progress=8.0, sighted=True))
    assert silence(desk, NOW + 1.3, RULES) is None


def test_counters_are_as_good_as_the_moment_they_were_read_at() -> None:
    desk, _, _ = working(sighted=True)
    assert silence(desk, NOW + COUNTERS_FRESH_S - 0.01, replace(RULES, silent_min_s=0.5)) is None
    assert silence(desk, NOW + COUNTERS_FRESH_S, RULES) == (1.0, 1.0, 1)


def test_a_stale_counter_hides_no_silence_of_plain_answers_either_way() -> None:
    desk, _, _ = working(PLAIN, sighted=True)
    assert silence(desk, NOW + 1000.0, RULES) is None, "nobody can tell any more"


def test_the_limit_grows_with_the_slowest_usual_step_and_the_spells_that_passed() -> None:
    """Steps of 0.5 s at the 99th percentile; nothing as long as 2 s has ever stood in between."""
    desk, _, _ = working()
    desk.gaps_ms[499] += 1000
    assert silent_limit_s(desk, RULES) == 1.0
    desk.stands_still(0.75)
    assert silent_limit_s(desk, RULES) == 1.0, "this one has not passed yet"
    desk.life_at = NOW + 1.0
    assert silent_limit_s(desk, RULES) == SPELLS * (0.75 + SPELL_S)
    desk.stands_still(5.0)
    desk.life_at = NOW + 7.0
    assert silent_limit_s(desk, RULES) == STEPS * 0.5


def test_the_limit_grows_with_the_largest_prompt_that_has_shown_nothing() -> None:
    desk, _, made = working()
    large = made.open("a", STREAM._replace(prompt_tokens=100_000), NOW, retry=False)
    assert silent_limit_s(desk, RULES) == PREFILLS * desk.pace.prefill_s(100_000) > 75.0
    assert silence(desk, NOW + 74.0, RULES) is None
    large.commit(NOW + 10.0)
    assert silent_limit_s(desk, RULES) == RULES.silent_min_s


@law
@given(st.lists(st.integers(0, 4095), max_size=300), st.lists(st.integers(0, 200_000), max_size=5))
def test_the_limit_is_never_below_the_least_and_more_work_never_shortens_it(
    gaps_ms: list[int], prompts: list[int]
) -> None:
    desk, _, made = working()
    for gap_ms in gaps_ms:
        desk.gaps_ms[gap_ms] += 1
    limit_s = silent_limit_s(desk, RULES)
    assert limit_s >= RULES.silent_min_s
    for tokens in prompts:
        made.open("a", STREAM._replace(prompt_tokens=tokens), NOW, retry=False)
        before, limit_s = limit_s, silent_limit_s(desk, RULES)
        assert limit_s >= before
