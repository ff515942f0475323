"""Pauses of the simulated unit, as real vLLM has them."""

from collections.abc import Iterator

import pytest

from loadtests.simunit.process import SimUnit
from loadtests.tests.simunit_stage import STEP_MS, OpenStream, call, chat, text_of


@pytest.fixture
def unit() -> Iterator[SimUnit]:
    with SimUnit.start("paused", can_pause=1, step_ms=STEP_MS, followers=0) as unit:
        yield unit


def is_paused(unit: SimUnit) -> bool:
    return bool(call(unit, "/is_paused")[1]["is_paused"])


def test_a_paused_unit_says_so_while_health_says_200_and_what_it_keeps_goes_on_later(unit: SimUnit) -> None:
    expected = text_of(chat(unit, max_tokens=64))
    stream = OpenStream(unit).read_until(b'" ')
    assert call(unit, "/pause?mode=keep", {})[0] == 200
    assert (is_paused(unit), call(unit, "/health")[0], stream.is_silent()) == (True, 200, True)
    assert call(unit, "/resume", {})[0] == 200
    assert stream.read_until(b"[DONE]").text == expected
    assert not is_paused(unit)
    stream.close()


def test_a_pause_may_abort_streams_under_200(unit: SimUnit) -> None:
    stream = OpenStream(unit).read_until(b'" ')
    call(unit, "/pause?mode=abort", {})
    assert b'"finish_reason":"abort"' in stream.read_until(b"[DONE]").received
    stream.close()


def test_a_pause_may_wait_for_streams(unit: SimUnit) -> None:
    expected = text_of(chat(unit, max_tokens=64))
    stream = OpenStream(unit).read_until(b'" ')
    call(unit, "/pause?mode=wait", {})
    assert unit.state()["running"] == 0
    assert stream.read_until(b"[DONE]").text == expected
    stream.close()
