"""What load tools share: how they wait, look on, and print."""

import asyncio
import time

import pytest

from loadtests.kit.report import columns, run_parts
from loadtests.kit.waiting import repeated, until, wait_until

PATIENCE_S = 5.0


def test_waiting_ends_with_what_was_found() -> None:
    found = iter(["", "", "here"])
    assert wait_until(lambda: next(found), PATIENCE_S, 0.001) == "here"
    found = iter(["", "", "here"])
    assert asyncio.run(until(lambda: next(found), PATIENCE_S, 0.001)) == "here"


def test_waiting_ends_with_patience() -> None:
    assert wait_until(lambda: 0, 0.01, 0.001) == 0
    assert asyncio.run(until(lambda: None, 0.01, 0.001)) is None


def test_a_thread_looks_on_until_it_is_left() -> None:
    looks: list[float] = []
    with repeated(lambda: looks.append(time.monotonic()), 0.001):
        assert wait_until(lambda: len(looks) > 2, PATIENCE_S, 0.001)
    seen = len(looks)
    time.sleep(0.01)
    assert len(looks) == seen


def test_columns_are_as_wide_as_they_must_be() -> None:
    rows = [("", "DOWN"), ("kill", "1"), ("freeze it", "12")]
    assert columns(rows).splitlines() == ["           DOWN", "kill       1", "freeze it  12"]
    numbers = ["           DOWN", "kill          1", "freeze it    12"]
    assert columns(rows, numbers=True).splitlines() == numbers


def test_a_part_that_does_not_hold_makes_the_run_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_parts({"one": list, "two": lambda: ["too slow"]}) == 1
    assert capsys.readouterr().out == "one: passed\ntwo: FAILED\n  ! too slow\n"
    assert run_parts({"one": list}) == 0
