"""What is made of the word of the gate before a unit, and when it is asked."""

from __future__ import annotations

import math

import pytest

from cellgate.probes import GATE_PROBES
from cellgate.probes.base import Reply, Trouble
from cellgate.probes.canary import Canary
from cellgate.probes.readiness import VIA_GATE, GateHealth, name_there, via_gate
from cellgate.router.nouns import Evidence, Sign, Strength, Unit, Verdict
from tests.patient import Answer, FakePatient, look, reply

UNIT = Unit("east.u/1", "east", "http://gate", nodes=via_gate("u/1"), engine=VIA_GATE)
SLOW = Reply(200, {"x-envoy-degraded": "1"}, b"")


def see(answer: Answer, verdict: Verdict = Verdict.UP) -> tuple[Sign, Strength]:
    """How one answer weighs."""
    context = FakePatient(lambda _: answer, UNIT, verdict=verdict)
    [evidence] = look(GateHealth(), context)
    assert isinstance(evidence, Evidence)
    assert (evidence.unit, evidence.source) == (UNIT.name, Canary.name)
    assert [asked.target for asked in context.asked] == ["/healthz/unit/u%2F1"]
    return evidence.sign, evidence.strength


@pytest.mark.parametrize(
    ("answer", "weight"),
    [
        (reply(200), (Sign.GOOD, Strength.STRONG)),
        (SLOW, (Sign.GOOD, Strength.STRONG)),
        (reply(404), (Sign.BAD, Strength.STRONG)),
        (reply(503), (Sign.BAD, Strength.STRONG)),
        (reply(500), (Sign.NEUTRAL, Strength.WEAK)),
        (reply(302), (Sign.NEUTRAL, Strength.WEAK)),
        (Trouble.REFUSED, (Sign.BAD, Strength.FATAL)),
        (Trouble.UNREACHABLE, (Sign.BAD, Strength.STRONG)),
        (Trouble.TIMEOUT, (Sign.BAD, Strength.STRONG)),
        (Trouble.BROKEN, (Sign.BAD, Strength.STRONG)),
        (Trouble.OWN, (Sign.NEUTRAL, Strength.WEAK)),
    ],
)
def test_each_answer_is_weighed(answer: Answer, weight: tuple[Sign, Strength]) -> None:
    assert see(answer) == weight


def test_a_suspicion_that_its_gate_shares_is_not_cleared() -> None:
    assert see(SLOW, Verdict.SUSPECT) == (Sign.NEUTRAL, Strength.WEAK)
    assert see(reply(200), Verdict.SUSPECT) == (Sign.GOOD, Strength.STRONG)


def test_it_is_asked_while_there_is_doubt_and_when_nothing_is_heard() -> None:
    probe, context = GateHealth(), FakePatient(lambda _: reply(200), UNIT, progress_at=99.0)
    assert probe.due_at(context, -math.inf) == 99.0 + probe.quiet_s
    context.progress_at = 10.0
    assert probe.due_at(context, 50.0) == 51.0
    context.progress_at, context.verdict = 99.0, Verdict.DOWN
    assert probe.due_at(context, 99.5) == 100.5


def test_it_stands_in_for_the_canary() -> None:
    assert list(GATE_PROBES.items()) == [(Canary.name, GateHealth)]
    assert name_there(UNIT) == "u/1"
