"""What a unit still has to do for this gate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.backlog import Backlog, Job, Prefilled

law = settings(derandomize=True, deadline=None, max_examples=200)


def test_of_the_prompt_in_front_a_part_is_done_by_now() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 1100), 10.0)
    backlog.open("b", Job(500, 600), 10.5)
    assert backlog.backlog_tokens(10.0, 100.0) == 1500
    assert backlog.backlog_tokens(13.0, 100.0) == 1200
    assert (backlog.batch, backlog.queued, backlog.kv_tokens) == (2, 2, 1700)


def test_a_unit_on_which_nothing_moves_looks_busier_all_the_time() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 0), 10.0)
    backlog.open("b", Job(500, 0), 10.0)
    assert backlog.backlog_tokens(20.0, 100.0) == 500
    assert backlog.backlog_tokens(21.0, 100.0) == 600, "a second too late, and a second more"
    assert backlog.backlog_tokens(60.0, 100.0) == 4500


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


def test_a_prompt_given_up_counts_for_nothing_and_the_next_begins() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 0), 10.0)
    backlog.open("b", Job(500, 0), 10.0)
    backlog.close("a", 12.0)
    assert backlog.backlog_tokens(12.0, 100.0) == 500
    done = backlog.show("b", 13.0)
    assert done is not None
    assert (done.tokens, done.busy_s) == (500, 1.0)


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


def test_a_prompt_that_another_unit_computes_is_not_ahead_of_others() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 1100, sent_at=10.0, begins_at=10.0), 10.0)
    backlog.open("b", Job(1, 500, sent_at=11.5, begins_at=11.5), 11.5)
    backlog.fetch("b", 11.5)
    assert (backlog.batch, backlog.queued, backlog.queued_tokens, backlog.kv_tokens) == (2, 1, 1000, 1600)
    done = backlog.show("a", 12.0)
    assert done is not None
    assert done.busy_s == 2.0, "the prompt in front began when it did"
    assert backlog.show("b", 13.0) is None
    backlog.close("a", 14.0)
    backlog.close("b", 14.0)
    assert (backlog.batch, backlog.kv_tokens) == (0, 0)


def test_what_was_written_of_late_fades() -> None:
    backlog = Backlog()
    backlog.open("a", Job(1000, 0), 10.0)
    backlog.close("a", 11.0)
    backlog.open("b", Job(500, 0), 130.0)
    assert backlog.written_tokens(130.0) == pytest.approx(1000.0)
    assert backlog.written_tokens(250.0) == pytest.approx(500.0)


@law
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
