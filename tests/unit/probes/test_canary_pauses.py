"""How often a canary is sent to a unit at which canaries run out of time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.canary import BLIND_IDLE, Canary
from cellgate.router.nouns import Rules, Verdict
from tests.patient import FakePatient, look

SENT_AT = 100.0


def after_timeouts(number: int, verdict: Verdict = Verdict.SUSPECT) -> FakePatient:
    """A unit at which so many canaries in a row have run out of time, and which has done nothing recently."""
    patient = FakePatient(lambda _: Trouble.TIMEOUT, verdict=verdict, progress_at=-1000.0)
    for _ in range(number):
        look(Canary(), patient)
    return patient


@pytest.mark.parametrize("verdict", [Verdict.UP, Verdict.SUSPECT])
@pytest.mark.parametrize(
    ("timeouts", "pause_s"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (40, 8.0)]
)
def test_a_unit_that_makes_progress_gets_fewer_from_one_timeout_to_the_next(
    verdict: Verdict, timeouts: int, pause_s: float
) -> None:
    patient = after_timeouts(timeouts, verdict)
    moving = replace(patient, progress_at=SENT_AT + 60.0 if timeouts else 0.0)
    assert Canary().due_at(moving, SENT_AT) == SENT_AT + pause_s


def test_a_suspect_that_is_seen_to_stand_still_is_asked_each_second() -> None:
    """An agent may say so, while what it has to do would explain the silence for longer."""
    patient = replace(after_timeouts(6), is_hiding=True)
    assert Canary().due_at(patient, SENT_AT) == SENT_AT + 8.0
    assert Canary().due_at(replace(patient, is_seen_still=True), SENT_AT) == SENT_AT + 1.0


def test_one_that_stops_making_progress_gets_the_next_as_soon_as_an_idle_one() -> None:
    patient = replace(after_timeouts(6), rules=Rules(canary_idle_s=3.0))
    idle_s = 3.0 * BLIND_IDLE
    assert Canary().due_at(replace(patient, progress_at=SENT_AT + 3.0), SENT_AT) == SENT_AT + 3.0 + idle_s
    assert Canary().due_at(replace(patient, progress_at=SENT_AT - 60.0), SENT_AT) == SENT_AT + 1.0
