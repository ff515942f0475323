"""What an engine says of standing still on purpose, and what it costs to ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.readiness import QuiescenceProbe, Readiness
from cellgate.router.nouns import EnginePause, Evidence, HoldKind, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply

PROBE = QuiescenceProbe()
SCALING = reply(503, b'{"error":"The model is currently scaling. Please try again later."}')
AWAKE = {"/is_paused": {"is_paused": False}, "/is_sleeping": {"is_sleeping": False}}


def engine(answers: Mapping[str, dict[str, bool]], name: str = "vllm", **changes: Any) -> FakePatient:
    """One that has these paths, and no others."""

    def answer(target: str) -> Answer:
        return reply(200, orjson.dumps(answers[target])) if target in answers else reply(404)

    return FakePatient(answer, engine=name, **changes)


def kinds(context: FakePatient) -> list[HoldKind | None]:
    return [found.kind for found in look(PROBE, context) if isinstance(found, EnginePause)]


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        (AWAKE, None),
        (AWAKE | {"/is_paused": {"is_paused": True}}, HoldKind.PAUSED),
        (AWAKE | {"/is_sleeping": {"is_sleeping": True}}, HoldKind.ASLEEP),
        ({"/is_scaling_elastic_ep": {"is_scaling_elastic_ep": True}}, HoldKind.SCALING),
    ],
)
def test_vllm_says_it_by_a_flag(answers: dict[str, dict[str, bool]], kind: HoldKind | None) -> None:
    assert kinds(engine(answers)) == [kind]


def test_an_engine_that_answers_503_everywhere_while_it_scales_has_said_so() -> None:
    assert kinds(FakePatient(lambda _: SCALING, engine="vllm")) == [HoldKind.SCALING]
    explained, evidence = look(Readiness(), FakePatient(lambda _: SCALING, engine="vllm"))
    assert isinstance(explained, EnginePause)
    assert isinstance(evidence, Evidence)


@pytest.mark.parametrize(("ping", "kind"), [(200, HoldKind.PAUSED), (503, None)])
def test_sglang_is_paused_when_it_is_up_and_not_ready(ping: int, kind: HoldKind | None) -> None:
    context = FakePatient(lambda target: reply(503 if target == "/ready" else ping), engine="sglang")
    assert kinds(context) == [kind]


def test_paths_that_an_engine_does_not_have_are_not_asked_for_again_soon() -> None:
    context = engine({})
    assert look(PROBE, context) == []
    assert len(context.asked) == 3
    assert look(PROBE, context) == []
    assert len(context.asked) == 3
    assert PROBE.due_at(context, 100.0) == 100.0 + PROBE.rest_s
    context.now_s += PROBE.absent_s
    look(PROBE, context)
    assert len(context.asked) == 6


def test_an_engine_that_has_them_is_asked_calmly_and_often_while_it_is_on_hold() -> None:
    context = engine(AWAKE)
    look(PROBE, context)
    assert PROBE.due_at(context, 100.0) == 102.0
    context.in_flight = 1
    assert PROBE.due_at(context, 100.0) == 101.0
    context.is_on_hold = True
    assert PROBE.due_at(context, 100.0) == 100.5
    look(PROBE, context)
    assert [asked.target for asked in context.asked[3:]] == ["/is_paused", "/is_sleeping"]


def test_engines_that_cannot_say_it_are_not_asked() -> None:
    context = engine(AWAKE, "llamacpp")
    assert look(PROBE, context) == []
    assert context.asked == []


@pytest.mark.parametrize("body", [b"", b"[]", b'{"is_paused":"yes"}', b'{"is_paused":1}', b"\xff"])
def test_strange_answers_say_nothing(body: bytes) -> None:
    assert look(PROBE, FakePatient(lambda _: reply(200, body), engine="vllm")) == []


def test_an_engine_that_does_not_answer_says_nothing_and_one_that_refuses_is_gone() -> None:
    assert look(PROBE, FakePatient(lambda _: Trouble.TIMEOUT, engine="vllm")) == []
    [gone] = look(PROBE, FakePatient(lambda _: Trouble.REFUSED, engine="vllm"))
    assert isinstance(gone, Evidence)
    assert (gone.sign, gone.strength) == (Sign.BAD, Strength.FATAL)
