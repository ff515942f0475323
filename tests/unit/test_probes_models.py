"""Learning what a unit serves."""

from __future__ import annotations

import pytest

from probes.base import Trouble
from probes.models import ModelList
from router.nouns import Models, Unit
from tests.patient import Answer, FakePatient, look, reply


def test_the_ids_of_the_list_are_the_models() -> None:
    """OpenAI's list shape."""
    body = b'{"object": "list", "data": [{"id": "base"}, {"id": "lora"}]}'
    patient = FakePatient(lambda _: reply(200, body))
    assert look(ModelList(), patient) == [Models("u", ("base", "lora"), patient.now_s)]
    assert [(asked.method, asked.target) for asked in patient.asked] == [("GET", "/v1/models")]


@pytest.mark.parametrize(
    "answer",
    [
        reply(404),
        reply(500, b'{"data": [{"id": "m"}]}'),
        reply(200, b"{"),
        reply(200, b"[]"),
        reply(200, b'{"data": []}'),
        reply(200, b'{"data": {"id": "m"}}'),
        reply(200, b'{"data": ["m", {"id": 7}, {"id": ""}, {}]}'),
        *Trouble,
    ],
)
def test_an_answer_without_a_model_is_no_finding(answer: Answer) -> None:
    """What was known before stays known."""
    assert look(ModelList(), FakePatient(lambda _: answer)) == []


def test_a_unit_with_configured_models_is_not_asked() -> None:
    """The operator's word stands."""
    patient = FakePatient(lambda _: reply(200), unit=Unit("u", "c", "http://u", models=("m",)))
    assert look(ModelList(), patient) == []
    assert patient.asked == []


def test_it_asks_often_until_a_model_is_known() -> None:
    """Then every half minute."""
    unknown = FakePatient(lambda _: reply(200), models=frozenset())
    known = FakePatient(lambda _: reply(200), models=frozenset({"m"}))
    assert ModelList().due_at(unknown, 100.0) == 101.0
    assert ModelList().due_at(known, 100.0) == 130.0
