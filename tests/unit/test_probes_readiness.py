"""What the leader's `/health` is taken for."""

from __future__ import annotations

import math

import pytest

from probes.base import Trouble
from probes.readiness import Readiness
from router.nouns import Evidence, Rules, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply


@pytest.mark.parametrize(
    ("answer", "sign", "strength"),
    [
        (reply(200), Sign.GOOD, Strength.WEAK),
        (reply(400), Sign.BAD, Strength.WEAK),
        (reply(500), Sign.BAD, Strength.STRONG),
        (reply(503), Sign.BAD, Strength.STRONG),
        (reply(404), Sign.NEUTRAL, Strength.WEAK),
        (reply(405), Sign.NEUTRAL, Strength.WEAK),
        (reply(301), Sign.NEUTRAL, Strength.WEAK),
        (Trouble.REFUSED, Sign.BAD, Strength.FATAL),
        (Trouble.UNREACHABLE, Sign.BAD, Strength.WEAK),
        (Trouble.TIMEOUT, Sign.BAD, Strength.WEAK),
        (Trouble.BROKEN, Sign.BAD, Strength.WEAK),
        (Trouble.OWN, Sign.NEUTRAL, Strength.WEAK),
    ],
)
def test_each_answer_is_weighed(answer: Answer, sign: Sign, strength: Strength) -> None:
    """One answer is one piece of evidence, signed by the probe."""
    patient = FakePatient(lambda _: answer)
    [evidence] = look(Readiness(), patient)
    assert isinstance(evidence, Evidence)
    assert (evidence.sign, evidence.strength) == (sign, strength)
    assert (evidence.unit, evidence.source, evidence.at) == ("u", "readiness", patient.now_s)


def test_the_reason_names_the_path_and_what_was_said() -> None:
    """A person reads why."""
    [said] = look(Readiness(path="/v2/health/ready"), FakePatient(lambda _: reply(503)))
    [trouble] = look(Readiness(), FakePatient(lambda _: Trouble.REFUSED))
    assert isinstance(said, Evidence)
    assert isinstance(trouble, Evidence)
    assert said.reason == "GET /v2/health/ready: HTTP 503"
    assert trouble.reason == "GET /health: refused, so it was said"


def test_it_looks_at_once_and_then_each_period() -> None:
    """The first look is overdue from the beginning."""
    patient = FakePatient(lambda _: reply(200))
    assert Readiness().due_at(patient, -math.inf) == -math.inf
    assert Readiness(period_s=2.0).due_at(patient, 100.0) == 102.0


def test_slow_answers_alone_do_not_reach_the_rate_that_is_suspicious() -> None:
    """Looks do not overlap, so that timeouts come at most one per `timeout_s`."""
    rules = Rules()
    assert rules.weak_window_s // Readiness().timeout_s + 1 < rules.weak_min
