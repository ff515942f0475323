"""Laws of retries: what the rule decides for any failures in a row is what a model of ten lines does."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.http.errors import FailureKind, Fault
from cellgate.router.nouns import Refusal, Rules
from cellgate.router.retry import Attempts, Unplaced, has_budget, next_step, without_room

K = FailureKind
ANSWERS = {K.BUSY, K.FALSE_BUSY, K.UNIT_ERROR, K.FIRST_EVENT_ERROR, K.GARBAGE, K.MODEL_GONE}
"""Answers of a unit: the next attempt is paid."""
ENDED = {K.ABORTED, K.TRANSFER_FAILED, K.PREFILL_LOST}
"""The unit ended the request, and may get it again."""
NOT_CONNECTED = {K.NO_RESOURCES, K.UNKNOWN_NAME}
"""The gate could not connect: the only unit may get it again."""
AFTER = {K.TRUNCATED, K.STREAM_ERROR, K.CUT, K.NOT_RESUMED}
"""The client has seen some of the answer."""
MOVES = {kind for kind in K if kind.row.fault is Fault.UNIT} - ANSWERS - ENDED - AFTER | {K.EVICTED}
RETRIED = ANSWERS | ENDED | NOT_CONNECTED | MOVES


class Failed(NamedTuple):
    """One failure of a request, and how things are then."""

    kind: FailureKind
    is_up: bool
    is_alone: bool
    paid_live: int


rows = st.builds(
    Failed,
    st.sampled_from(K) | st.sampled_from(sorted(RETRIED, key=str)),
    *[st.booleans()] * 2,
    st.integers(0, 6),
)
bounds = st.builds(
    Rules,
    attempts=st.integers(1, 4),
    retry_min=st.integers(0, 4),
    retry_budget=st.sampled_from([0.0, 0.2, 0.5]),
)


def model(rows: list[Failed], rules: Rules, live: int) -> list[str]:
    """What follows each failure, until one is the last."""
    said, paid, returned = list[str](), 0, 0
    for kind, is_up, is_alone, paid_live in rows:
        if kind in ANSWERS and is_up:
            enough = paid_live >= max(rules.retry_min, rules.retry_budget * live)
            paid += 1
            said.append("end" if enough or paid >= rules.attempts else "paid")
        elif (kind in ENDED or (kind in NOT_CONNECTED and is_alone)) and returned + 1 < rules.attempts:
            returned += 1
            said.append("back")
        else:
            said.append("free" if kind in RETRIED else "end")
        if said[-1] == "end":
            break
    return said


@settings(max_examples=300)
@given(rows=st.lists(rows, min_size=1, max_size=8), rules=bounds, live=st.integers(0, 40))
def test_the_rule_decides_as_the_model_does(rows: list[Failed], rules: Rules, live: int) -> None:
    said, history = list[str](), Attempts()
    for number, (kind, is_up, is_alone, paid_live) in enumerate(rows):
        rule, before = kind.row.retry, history
        step = next_step(history, rule, rules, is_up=is_up, is_alone=is_alone, live=live, paid_live=paid_live)
        said.append("end" if not step.again else "paid" if step.draws else "back" if step.returns else "free")
        if not step.again:
            break
        history = history.after(f"u{number}", step)
        # Each step is counted once, where it belongs.
        assert (len(history.tried) > len(before.tried)) is not step.returns
        assert history.paid - before.paid == step.draws
        assert history.returned - before.returned == step.returns
    assert said == model(rows, rules, live)


@pytest.mark.parametrize("kind", FailureKind, ids=lambda kind: kind.value)
def test_what_a_unit_answered_cools_it_and_only_a_busy_one_is_waited_for(kind: FailureKind) -> None:
    rule = kind.row.retry
    assert (rule.again, rule.cools, rule.waits) == (kind in RETRIED, kind in ANSWERS, kind is K.BUSY)


@given(why=st.sampled_from(Refusal), returned=st.integers(0, 5), rules=bounds)
def test_a_request_of_a_busy_unit_waits_again_a_few_times_and_others_only_where_it_may_help(
    why: Refusal, returned: int, rules: Rules
) -> None:
    history = Attempts(returned=returned)
    may_wait = returned + 1 < rules.attempts
    helps = why in (Refusal.FULL, Refusal.UNSURE, Refusal.POISON, Refusal.HELD)
    found = {kind: without_room(history, kind.row.retry, why, rules) for kind in RETRIED}
    waits = Unplaced.WAITS_AGAIN if may_wait else Unplaced.SHOWN
    assert found.pop(K.BUSY) is (Unplaced.NEXT if why is Refusal.UNSURE else waits)
    assert set(found.values()) == {Unplaced.NEXT if helps else Unplaced.SHOWN}


@pytest.mark.parametrize(("live", "most"), [(1, 3), (15, 3), (16, 4), (100, 20)])
def test_the_budget_is_a_share_of_the_live_requests_and_never_below_its_floor(live: int, most: int) -> None:
    rules = Rules(retry_budget=0.2, retry_min=3)
    assert [has_budget(live, paid, rules) for paid in (most - 1, most)] == [True, False]
