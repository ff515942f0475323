"""The report of an agent, as the gate takes it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.probes.agents import NAMES_MAX, TEXT_MAX, AgentReport
from cellgate.probes.base import Trouble
from cellgate.router.nouns import Node, NodeFacts, Role
from tests.patient import Answer, FakePatient, look, reply

PROBE = AgentReport("node:9911", "s3cret")
NODE = Node("u-1", Role.FOLLOWER)


def said(**told: Any) -> Answer:
    return reply(200, orjson.dumps({"cellgate_agent": 1, **told}))


def facts_of(answer: Answer) -> NodeFacts | None:
    found = look(PROBE, FakePatient(lambda _: answer, node=NODE))
    assert all(isinstance(finding, NodeFacts) for finding in found)
    return found[0] if found else None  # type: ignore[return-value]


def test_a_report_is_asked_for_with_the_token() -> None:
    patient = FakePatient(lambda _: said(stack={"image": "sha256:1"}), node=NODE)
    found = look(PROBE, patient)
    assert found == [NodeFacts("u", "u-1", 100.0, {"image": "sha256:1"})]
    assert (patient.asked[0].target, patient.tokens) == ("http://node:9911/report", ["s3cret"])
    assert PROBE.due_at(patient, 100.0) == 130.0


@pytest.mark.parametrize(
    "answer", [*Trouble, reply(503), reply(401), reply(200, b"<html>"), reply(200, b"[]"), reply(200, b"{}")]
)
def test_an_agent_that_does_not_report_is_no_finding(answer: Answer) -> None:
    assert facts_of(answer) is None


def test_an_older_agent_is_asked_rarely() -> None:
    patient = FakePatient(lambda _: reply(404), node=NODE)
    assert look(PROBE, patient) == []
    assert PROBE.due_at(patient, 100.0) == 700.0


def test_a_report_of_any_kind_is_bounded_text() -> None:
    stack: dict[str, Any] = {f"flag --{n}": "x" * 200 for n in range(600)}
    facts = facts_of(said(stack={"image": 7, "driver\n": "1\x1b[0m", **stack}))
    assert facts is not None
    assert facts.stack["driver?"] == "1?[0m"
    assert "image" not in facts.stack
    assert len(facts.stack) <= NAMES_MAX
    assert max(len(value) for value in facts.stack.values()) == TEXT_MAX
    odd = facts_of(said(stack=["no", "mapping"]))
    assert odd is not None
    assert odd.stack == {}
