"""The predicted seconds of an ask on a unit: each term, and what holds for all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.backlog import Backlog, Job, Prefilled
from cellgate.router.cost import (
    COST_ERROR_MAX_S,
    COST_UNKNOWN_S,
    FOREIGN_TOKENS,
    KV_MAX_S,
    LINE,
    NEW_EVICT_SHARE,
    PREFILL_BESIDE,
    Cost,
    CostTerms,
    Facts,
    OtherLoad,
    cost_terms,
    terms,
)
from cellgate.router.learning import Rates

law = settings(derandomize=True, deadline=None, max_examples=100)
NOW = 100.0


ANSWER = 100.0


def rates(prefill_tokens_s: float = 1000.0, step_s: float = 0.01, share: float = 0.0) -> Rates:
    learnt = Rates()
    learnt.prefill_tokens_s.guess(prefill_tokens_s)
    learnt.steps.guess(step_s, share)
    return learnt


def cost(
    unit: CostTerms, work: Backlog, prompt: float, cached: float, answer: float = ANSWER, spared: float = 0.0
) -> Cost:
    return Cost(*terms(unit, work, prompt, cached, spared, answer, NOW))


def alone(facts: Facts) -> CostTerms:
    return cost_terms([facts])[0]


def fresh(waiting: float = 0.0, running: float = 0.0, kv_use: float = 0.0, age_s: float = 0.0) -> OtherLoad:
    return OtherLoad(waiting, running, kv_use, age_s)


def busy(*prompts: int) -> Backlog:
    backlog = Backlog()
    for number, tokens in enumerate(prompts):
        backlog.open(number, Job(tokens, tokens), NOW)
    return backlog


def cost_of(facts: Facts, backlog: Backlog | None = None, prompt: float = 500.0, cached: float = 0.0) -> Cost:
    return cost(alone(facts), backlog or Backlog(), prompt, cached)


reports = st.none() | st.builds(
    OtherLoad,
    waiting=st.floats(0, 1e6),
    running=st.floats(0, 1e6),
    kv_use=st.floats(0, 1),
    age_s=st.floats(0, 1e9),
    waiting_tokens=st.none() | st.floats(0, 1e12),
)
facts = st.builds(
    Facts,
    rates=st.builds(rates, st.floats(1e-3, 1e12), st.floats(1e-9, 1e3), st.floats(0, 1)),
    report=reports,
    error_share=st.floats(0, 0.99),
    far_s=st.floats(0, 10),
    kv_tokens=st.sampled_from([0, 1, 1000, 2_000_000]),
    written_tokens=st.floats(0, 1e12),
    slots=st.sampled_from([math.inf, 1.0, 64.0]),
)
works = st.lists(st.integers(0, 10**7), max_size=5).map(lambda prompts: busy(*prompts))
sizes = st.integers(0, 10**7)


@law
@given(units=st.lists(facts, min_size=1, max_size=5), backlog=works, prompt=sizes, cached=sizes, spared=sizes)
def test_a_cost_is_positive_finite_and_the_sum_of_its_terms(
    units: list[Facts], backlog: Backlog, prompt: int, cached: int, spared: int
) -> None:
    for unit in cost_terms(units):
        here = cost(unit, backlog, prompt, cached, spared=spared)
        assert 0.0 < here.total_s < math.inf
        assert all(0.0 <= term < math.inf for term in here._replace(shared_s=0.0))
        assert -here.prefill_s * (1 + 1e-9) <= here.shared_s <= 0.0
        assert here.total_s == pytest.approx(sum(here[1:]))


@law
@given(unit=facts, backlog=works, prompt=sizes, cached=sizes, more=sizes)
def test_more_work_or_less_cache_is_never_cheaper(
    unit: Facts, backlog: Backlog, prompt: int, cached: int, more: int
) -> None:
    here = alone(unit)
    before = cost(here, backlog, prompt, cached).total_s
    assert cost(here, backlog, prompt, cached + more).total_s <= before
    assert cost(here, backlog, prompt + more, cached).total_s >= before * (1 - 1e-12)
    backlog.open("more", Job(more, more), NOW)
    assert cost(here, backlog, prompt, cached).total_s >= before * (1 - 1e-12)


@law
@given(units=st.lists(facts, min_size=2, max_size=5))
def test_what_a_unit_is_held_to_have_lies_between_its_own_word_and_its_peers(units: list[Facts]) -> None:
    heard = [facts.report.running + facts.report.waiting for facts in units if facts.report is not None]
    for unit in cost_terms(units):
        low, high = min(heard, default=0.0), max(heard, default=0.0)
        assert low * 0.5 - 1e-6 <= unit.foreign_batch <= high * 2.0 + 1e-6


def test_what_is_ahead_is_waited_for_and_what_the_unit_does_not_hold_is_computed() -> None:
    here = cost_of(Facts(rates(1000.0)), busy(2000, 1000), prompt=500)
    assert (here.queue_s, here.prefill_s) == pytest.approx((3.0, 0.5))
    assert here.ttft_s == pytest.approx(3.5)
    here = cost_of(Facts(rates(1000.0)), busy(2000), prompt=500, cached=400)
    assert (here.queue_s, here.prefill_s) == pytest.approx((2.0, 0.1))
    everything = cost_of(Facts(rates(1000.0)), prompt=500, cached=600)
    assert everything.prefill_s == pytest.approx(0.001)
    counted = cost_of(Facts(rates(1000.0), fresh(waiting=2.0)))
    assert counted.queue_s == pytest.approx(2 * FOREIGN_TOKENS / 1000.0)
    told = cost_of(Facts(rates(1000.0), OtherLoad(2.0, 0.0, 0.0, 0.0, waiting_tokens=700.0)))
    assert told.queue_s == pytest.approx(0.7)
    unit = alone(Facts(rates(1000.0)))
    own, shared = (cost(unit, Backlog(), 500, 0, spared=spared) for spared in (0, 400))
    assert (shared.prefill_s, shared.ttft_s) == (own.prefill_s, own.ttft_s), "it is waited for all the same"
    assert shared.total_s == pytest.approx(own.total_s - 0.4)


def test_an_answer_is_decoded_at_the_batch_that_will_be_there_and_pays_what_those_beside_it_wait() -> None:
    unit = Facts(rates(1000.0, step_s=0.01, share=0.1))
    alone_there, three = cost_of(unit), cost_of(unit, busy(1, 1, 1), prompt=500)
    assert alone_there.decode_s == pytest.approx(ANSWER * 0.011)
    assert alone_there.slowdown_of_others_s == 0.0
    assert three.decode_s == pytest.approx(ANSWER * 0.014)
    # Each of them has longer steps for as long as it is there, and a part of its prefill in between.
    assert three.slowdown_of_others_s == pytest.approx(3 * (ANSWER * 0.001 + PREFILL_BESIDE * 0.5))
    assert cost(alone(unit), Backlog(), 500, 0, answer=2.0).decode_s == pytest.approx(0.022)
    some = [cost_of(Facts(rates(step_s=0.01)), busy(*[1] * count)).decode_s for count in (0, 1, 2)]
    assert some == sorted(set(some)), "idle units come first even where batching costs nothing"


def test_above_the_seats_of_an_engine_one_waits_for_another_to_end() -> None:
    unit = Facts(rates(1000.0, step_s=0.01), slots=2.0)
    assert cost_of(unit, busy(1)).slot_s == 0.0
    # Of two answers of a second each one ends every half a second.
    assert cost_of(unit, busy(1, 1)).slot_s == pytest.approx(0.5, rel=0.01)
    assert cost_of(unit, busy(1, 1, 1)).slot_s == pytest.approx(1.0, rel=0.01)
    # Of the last seats some are left to what others may have.
    told = OtherLoad(0.0, 8.0, 0.0, 0.0, waiting_tokens=0.0)
    nine, ten = (Facts(rates(1000.0, step_s=0.01), told, slots=seats) for seats in (9.0, 10.0))
    assert cost_of(nine).slot_s > cost_of(ten).slot_s == 0.0


def test_a_faster_answer_is_no_reason_to_wait_in_line_for_a_seat_while_another_unit_has_one() -> None:
    """For a cached prompt one may wait for as long as that would be computed."""
    fast, slow = Facts(rates(1000.0, step_s=0.01), slots=2.0), Facts(rates(1000.0, step_s=0.02), slots=2.0)
    in_line, free = cost_of(fast, busy(1, 1), prompt=10.0), cost_of(slow, busy(1), prompt=10.0)
    assert in_line.total_s - in_line.queue_penalty_s < free.total_s < in_line.total_s
    assert in_line.queue_penalty_s == in_line.decode_s < LINE * in_line.slot_s
    assert in_line.ttft_s == pytest.approx(in_line.queue_s + in_line.prefill_s + in_line.slot_s)
    assert cost_of(fast, busy(1, 1), prompt=700.0, cached=600.0).queue_penalty_s == 0.0
    later_s = cost_of(fast, busy(1, 1)).slot_s - 0.45
    assert cost_of(fast, busy(1, 1), prompt=700.0, cached=450.0).queue_penalty_s == pytest.approx(
        LINE * later_s
    )


def test_what_does_not_fit_waits_and_a_cache_into_which_little_was_written_is_the_better_place() -> None:
    here = Facts(rates(1000.0, step_s=0.01), kv_tokens=10_000)
    backlog = busy(9000)
    assert cost_of(here, backlog, prompt=800).kv_s == 0.0
    # 9000 tokens come free within the second that an answer takes; 900 of them are wanted.
    assert cost_of(here, backlog, prompt=1800).kv_s == pytest.approx(0.1, rel=0.02)
    full = cost_of(here._replace(report=fresh(kv_use=1.0)), prompt=900)
    assert full.kv_s == pytest.approx(0.1, rel=0.02)
    assert cost_of(here, backlog, prompt=1e9).kv_s == KV_MAX_S
    calm, average, busy_one = cost_terms(
        [Facts(rates(1000.0), written_tokens=tokens) for tokens in (0.0, 1e5, 2e5)]
    )
    new = [cost(unit, Backlog(), 1000.0, 0.0).eviction_s for unit in (calm, average, busy_one)]
    assert new == pytest.approx([0.0, NEW_EVICT_SHARE, 2 * NEW_EVICT_SHARE])
    assert cost(busy_one, Backlog(), 1000.0, 990.0).eviction_s == pytest.approx(0.02 * NEW_EVICT_SHARE)
    assert alone(Facts(rates())).evict_share == 0.0
    large, small = cost_terms([Facts(rates(), kv_tokens=kv, written_tokens=1e5) for kv in (10**6, 10**5)])
    assert large.evict_share < small.evict_share


@law
@given(unit=facts, errors=st.floats(0, 0.99), prompt=sizes)
def test_more_errors_are_never_cheaper(unit: Facts, errors: float, prompt: int) -> None:
    """A unit that fails everything looks busy however idle it is."""
    low, high = sorted((errors, unit.error_share))
    calm, failing = (
        cost_of(unit._replace(error_share=share), busy(1000), prompt).total_s for share in (low, high)
    )
    assert calm <= failing
    assert cost_of(Facts(rates(), error_share=0.99)).error_s == COST_ERROR_MAX_S
    assert cost_of(Facts(rates(), error_share=0.9)).total_s > cost_of(Facts(rates()), busy(30_000)).total_s


def test_a_unit_of_which_nothing_is_heard_counts_as_its_peers_do() -> None:
    heard = [Facts(rates(), fresh(waiting=float(n), running=10.0)) for n in (2, 4, 6)]
    silent = cost_terms([*heard, Facts(rates())])[-1]
    assert (silent.foreign_tokens, silent.foreign_batch) == (4 * FOREIGN_TOKENS, 14.0)
    assert silent.unknown_s == COST_UNKNOWN_S
    # A report of nothing is no reason to prefer a silent unit.
    known, silent = cost_terms([Facts(rates(), fresh()), Facts(rates())])
    assert cost(known, Backlog(), 100, 0).total_s < cost(silent, Backlog(), 100, 0).total_s


def test_an_old_report_gives_way_to_the_peers_word_by_and_by() -> None:
    heard = [Facts(rates(), fresh(waiting=4.0)) for _ in range(3)]

    def tokens(age_s: float) -> float:
        return cost_terms([*heard, Facts(rates(), fresh(waiting=0.0, age_s=age_s))])[-1].foreign_tokens

    ages = [0.0, 0.05, 0.2, 1.0, 2.0, 10.0, 1e9]
    assert [tokens(age_s) for age_s in ages] == sorted(tokens(age_s) for age_s in ages)
    assert (tokens(0.0), tokens(1e9)) == (0.0, 4000.0)
    assert tokens(2.0) == pytest.approx(2000.0, rel=0.5)
    # Without peers it is the best there is.
    here = alone(Facts(rates(), fresh(waiting=3.0, age_s=1e6)))
    assert here.foreign_tokens == 3 * FOREIGN_TOKENS
    assert here.unknown_s == pytest.approx(COST_UNKNOWN_S)


# What a unit still has to do for this gate.

thorough_law = settings(derandomize=True, deadline=None, max_examples=200)


def test_of_the_prompt_in_front_a_part_is_done_by_now_unless_nothing_moves() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 1100), 10.0)
    backlog.open("b", Job(500, 600), 10.5)
    assert (backlog.batch, backlog.queued, backlog.kv_tokens) == (2, 2, 1700)
    for now, tokens in ((10.0, 1500), (13.0, 1200), (20.0, 500), (21.0, 600), (60.0, 4500)):
        # From 20.0 on it is late, and looks busier all the time: a second too late, and a second more.
        assert backlog.backlog_tokens(now, 100.0) == tokens
    backlog.close("a", 62.0)
    assert backlog.backlog_tokens(62.0, 100.0) == 500, "one that was given up counts for nothing"
    done = backlog.show("b", 63.0)
    assert done is not None
    assert (done.tokens, done.busy_s) == (500, 1.0)


def test_a_first_token_tells_how_long_its_prompt_was_computed() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 1100, sent_at=10.0, begins_at=10.0), 10.0)
    backlog.open("b", Job(500, 600, sent_at=10.5, begins_at=10.5), 10.5)
    assert backlog.show("a", 12.0) == Prefilled(1000, 2.0, 2.0, 2.0, found_idle=True, follows=False)
    assert backlog.show("b", 13.0) == Prefilled(500, 1.0, 2.5, 1.0, found_idle=False, follows=True)
    assert backlog.show("b", 13.0) is None
    assert (backlog.queued, backlog.batch, backlog.queued_tokens) == (0, 2, 0)
    backlog.open("c", Job(100, 100, sent_at=20.0, begins_at=20.0), 20.0)
    assert backlog.show("c", 20.5) == Prefilled(100, 0.5, 0.5, 0.5, found_idle=True, follows=False)


def test_a_latency_is_no_work_and_passes_while_others_are_computed() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 0, sent_at=10.0, begins_at=10.5), 10.0)
    backlog.open("b", Job(500, 0, sent_at=10.0, begins_at=10.5), 10.0)
    backlog.open("c", Job(200, 0, sent_at=11.0, begins_at=11.5), 11.0)
    assert backlog.backlog_tokens(10.5, 1000.0) == 1700, "nothing is late before its latency is over"
    assert backlog.backlog_tokens(10.5, 1000.0, latency_s=0.5) == 1200
    assert backlog.backlog_tokens(10.5, 1000.0, latency_s=2.0) == 0
    shown = [backlog.show("a", 11.1), backlog.show("b", 11.2), backlog.show("c", 11.7)]
    assert [done.busy_s for done in shown if done] == pytest.approx([0.6, 0.1, 0.2])
    assert [done.follows for done in shown if done] == [False, True, False]


def test_an_answer_that_comes_whole_shows_that_prompts_before_its_own_are_computed() -> None:
    backlog = Backlog()
    plain, streamed = Job(1000, 0, is_streamed=False), Job(1000, 0)
    for number, job in enumerate((plain, plain, streamed, plain, plain)):
        at = 10.0 + number
        backlog.open(number, job._replace(sent_at=at, begins_at=at), at)
    backlog.show(1, 20.0, tells=False)
    assert backlog.queued_tokens == 3000, "those behind it are not"
    backlog.show(4, 21.0, tells=False)
    assert backlog.queued_tokens == 2000, "what is streamed shows it, and so does what comes behind that"
    backlog.show(2, 22.0)
    assert (backlog.queued_tokens, backlog.front_since) == (1000, 22.0)
    for number in range(5):
        backlog.close(number, 23.0)
    assert (backlog.batch, backlog.queued_tokens, backlog.front_tokens) == (0, 0, 0)


def test_what_is_there_counts_for_as_long_as_it_is_there_and_what_was_written_fades() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 1100, sent_at=10.0, begins_at=10.0), 10.0)
    backlog.open("b", Job(1, 500, sent_at=11.5, begins_at=11.5), 11.5)
    backlog.take_as_computed("b", 11.5)
    assert (backlog.batch, backlog.queued, backlog.queued_tokens, backlog.kv_tokens) == (2, 1, 1000, 1600)
    done = backlog.show("a", 12.0)
    assert done is not None
    assert done.busy_s == 2.0, "the prompt in front began when it did"
    assert backlog.show("b", 13.0) is None
    backlog.close("a", 14.0)
    backlog.close("b", 14.0)
    assert (backlog.batch, backlog.kv_tokens) == (0, 0)
    backlog = Backlog()
    backlog.open("a", Job(1000, 0), 10.0)
    backlog.close("a", 11.0)
    backlog.open("b", Job(500, 0), 130.0)
    assert backlog.written_tokens(130.0) == pytest.approx(1000.0)
    assert backlog.written_tokens(250.0) == pytest.approx(500.0)


@thorough_law
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["open", "show", "close"]),
            st.integers(0, 5),
            st.integers(0, 10_000),
            st.floats(0.0, 10.0),
        )
    )
)
def test_its_sums_are_those_of_what_is_there(events: list[tuple[str, int, int, float]]) -> None:
    backlog, queued, decoding, now = Backlog(), dict[int, Job](), dict[int, Job](), 0.0
    for what, key, tokens, later_s in events:
        now += later_s
        if what == "open" and key not in queued and key not in decoding:
            queued[key] = Job(tokens, tokens + 7)
            backlog.open(key, queued[key], now)
        elif what == "show":
            backlog.show(key, now)
            if key in queued:
                decoding[key] = queued.pop(key)
        elif what == "close":
            backlog.close(key, now)
            queued.pop(key, None)
            decoding.pop(key, None)
        assert backlog.queued_tokens == sum(job.uncached_tokens for job in queued.values())
        assert backlog.kv_tokens == sum(job.kv_tokens for job in (*queued.values(), *decoding.values()))
        assert (backlog.queued, backlog.batch) == (len(queued), len(queued) + len(decoding))
        first = next(iter(queued.values()), Job(0, 0)).uncached_tokens
        assert backlog.queued_tokens - first <= backlog.backlog_tokens(now, 1000.0)
