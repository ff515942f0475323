"""The verdict of the abuse suite: what fails a line, and what is put down to the machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from loadtests.abuse.catalog import CATALOG
from loadtests.abuse.nouns import Abuse, Got, Place
from loadtests.abuse.verdict import Try, is_failed, middle, wait_limit_s, worst_first


async def nothing(_: Place) -> Got:
    return Counter()


ABUSE = Abuse("a", "does nothing", nothing)
GOOD = Try(
    abuse=ABUSE,
    got=Counter({"400 bad_json": 1}),
    cpu_s=0.1,
    wait_s=0.02,
    p99_s=0.01,
    undisturbed_p99_s=0.005,
    control_s=0.01,
    late_s=0.0,
    queued_s=0.0,
    lost=0,
    before_mb=90.0,
    peak_mb=200.0,
    after_mb=100.0,
    took_s=1.0,
)


def test_a_try_within_all_limits_has_no_problems() -> None:
    assert GOOD.problems() == []
    assert GOOD.badness() < 1.0


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (replace(GOOD, wait_s=0.11), "a neighbour waited 110 ms, more than 100"),
        (replace(GOOD, p99_s=0.12), "the p99 of a neighbour's TTFT was 120 ms, more than 110"),
        (replace(GOOD, cpu_s=0.31), "CPU 0.31 s, more than 0.30"),
        (replace(GOOD, after_mb=111.0), "memory +21 MB afterwards, more than 20"),
        (replace(GOOD, lost=2), "2 of the neighbour's requests were not answered well"),
        (replace(GOOD, got=Counter(hang=1)), "got 'hang' (1 times)"),
        (replace(GOOD, got=Counter({"500 internal": 3})), "got '500 internal' (3 times)"),
        (replace(GOOD, got=Counter({"closed": 1})), "got 'closed' (1 times)"),
    ],
)
def test_each_limit_fails_a_try_by_itself(broken: Try, says: str) -> None:
    assert broken.problems() == [says]
    assert broken.badness() > 1.0


def test_a_larger_body_and_more_requests_may_cost_more_cpu() -> None:
    assert replace(GOOD, abuse=replace(ABUSE, megabytes=20), cpu_s=1.9).problems() == []
    assert replace(GOOD, abuse=replace(ABUSE, requests=1000), cpu_s=0.9).problems() == []


def test_a_noisy_machine_is_allowed_for_up_to_a_bound() -> None:
    assert wait_limit_s(0.01) == wait_limit_s(0.02) == pytest.approx(0.1)
    assert wait_limit_s(0.05) == pytest.approx(0.13)
    assert wait_limit_s(5.0) == wait_limit_s(0.1) == pytest.approx(0.18)


def test_the_median_try_is_judged() -> None:
    bad, worse = replace(GOOD, wait_s=0.2), replace(GOOD, wait_s=2.0)
    assert not is_failed([bad, GOOD, GOOD])
    assert is_failed([worse, GOOD, bad])
    assert middle([worse, GOOD, bad]) is bad
    assert worst_first([[GOOD], [worse], [bad]]) == [[worse], [bad], [GOOD]]


def test_every_abuse_has_a_name_of_its_own_that_fits_the_table() -> None:
    names = [abuse.name for abuse in CATALOG]
    assert len(set(names)) == len(names) >= 40
    assert [name for name in names if len(name) > 24] == []
