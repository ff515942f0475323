"""What is taken for readiness, by engine; standing still on purpose; the word of the gate before a unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson
import pytest

from cellgate.probes import GATE_PROBES
from cellgate.probes.base import Reply, Trouble
from cellgate.probes.canary import Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.engines import ENGINES
from cellgate.probes.readiness import VIA_GATE, GateHealth, PauseProbe, Readiness, name_there, via_gate
from cellgate.router.nouns import EnginePause, Evidence, HoldKind, Load, Rules, Sign, Strength, Unit, Verdict
from tests.patient import Answer, FakePatient, evidence_of, look, reply

see = partial(evidence_of, Readiness())


@pytest.mark.parametrize(
    ("answer", "sign", "strength"),
    [
        (reply(200), Sign.GOOD, Strength.WEAK),
        *((reply(status), Sign.BAD, Strength.STRONG) for status in (500, 503)),
        *((reply(status), Sign.NEUTRAL, Strength.WEAK) for status in (400, 404, 405, 301)),
        (Trouble.REFUSED, Sign.BAD, Strength.FATAL),
        *(
            (trouble, Sign.BAD, Strength.WEAK)
            for trouble in (Trouble.UNREACHABLE, Trouble.TIMEOUT, Trouble.BROKEN)
        ),
        (Trouble.OWN, Sign.NEUTRAL, Strength.WEAK),
    ],
)
@pytest.mark.parametrize("engine", ["", "vllm", "sglang", "triton"])
def test_each_answer_is_weighed(engine: str, answer: Answer, sign: Sign, strength: Strength) -> None:
    """One answer is one piece of evidence, signed by the probe. Triton says not ready with a 400, while the
    same from another engine is no word about itself.
    """
    context = FakePatient(lambda _: answer, engine=engine)
    evidence = see(context)
    if (engine, answer) == ("triton", reply(400)):
        sign = Sign.BAD
    assert (evidence.sign, evidence.strength) == (sign, strength)
    assert (evidence.unit, evidence.source, evidence.at) == ("u", "readiness", context.now_s)


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ("", "/v1/models"),
        ("vllm", "/health"),
        ("sglang", "/ready"),
        ("triton", "/v2/health/ready"),
        ("trtllm", "/health"),
        ("llamacpp", "/health"),
        ("openai", "/health"),
    ],
)
def test_each_engine_is_asked_where_it_answers(engine: str, path: str) -> None:
    """In one request, where the first path exists; when it has become another, where that one answers. The
    /health of SGLang generates, and takes as long as its users' work.
    """
    context = FakePatient(lambda _: reply(200), engine=engine)
    assert see(context).reason == f"GET {path}: HTTP 200"
    context.engine = "triton"
    see(context)
    assert [asked.target for asked in context.asked] == [path, "/v2/health/ready"]
    assert not {"/health", "/health_generate"} & {*ENGINES["sglang"].ready}


def test_the_path_that_an_older_release_has_is_found_and_remembered() -> None:
    """SGLang's /ready came after its /ping. A look takes no longer than one may."""
    context = FakePatient(lambda target: reply(200 if target == "/ping" else 404), engine="sglang")
    assert [see(context).sign for _ in range(2)] == [Sign.GOOD] * 2
    assert [asked.target for asked in context.asked] == ["/ready", "/ping", "/ping"]

    def slow(_: str) -> Answer:
        context.now_s += 2.0
        return reply(404)

    context = FakePatient(slow, engine="sglang")
    see(context)
    assert [asked.timeout_s for asked in context.asked] == [3.0, 1.0]


def test_the_reason_names_the_path_and_what_was_said() -> None:
    assert see(FakePatient(lambda _: reply(503), engine="triton")).reason == "GET /v2/health/ready: HTTP 503"
    refused = FakePatient(lambda _: Trouble.REFUSED, engine="vllm")
    assert see(refused).reason == "GET /health: refused, so it was said"


def test_slow_answers_alone_do_not_reach_the_rate_that_is_suspicious() -> None:
    """Looks do not overlap, so that timeouts come at most one per `timeout_s`."""
    rules = Rules()
    assert rules.weak_window_s // Readiness().timeout_s + 1 < rules.weak_min


@pytest.mark.parametrize(
    ("state", "due"),
    [
        ({}, 101.0),
        # An answer to another probe.
        *(({"answered_at": at}, due) for at, due in ((100.5, 101.5), (101.9, 102.9), (102.9, 103.0))),
        *(({"answered_at": 100.5, "verdict": each}, 101.0) for each in (Verdict.SUSPECT, Verdict.STARTING)),
        # A request that is answered, and what another gate has seen.
        ({"progress_at": 100.5}, 101.5),
        ({"progress_at": 100.5, "is_peers_turn": True}, 101.0),
    ],
    ids=str,
)
def test_it_looks_at_once_and_an_answer_puts_it_off_for_a_while(state: dict[str, Any], due: float) -> None:
    """A server that has just answered does not refuse; but its readiness may be bad all the same."""
    context = FakePatient(lambda _: reply(200), **state)
    assert Readiness().due_at(context, -math.inf) == -math.inf
    assert Readiness().due_at(context, 100.0) == due


def test_metrics_of_a_unit_without_work_are_read_less_often_and_those_of_a_suspect_more_often() -> None:
    context = FakePatient(lambda _: reply(200))
    busy, idle = Load("u", 100.0, running=1), Load("u", 100.0)
    for load, verdict, metrics_s in (
        (None, Verdict.UP, 1.0),
        (busy, Verdict.UP, 1.0),
        (busy, Verdict.SUSPECT, 0.5),
        (idle, Verdict.UP, 3.0),
        (idle, Verdict.STARTING, 1.0),
    ):
        context.load, context.verdict = load, verdict
        assert EngineMetrics().due_at(context, 100.0) == 100.0 + metrics_s


# What an engine says of standing still on purpose, and what it costs to ask.

PROBE = PauseProbe()
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


def test_an_engine_is_asked_calmly_and_often_while_it_is_on_hold() -> None:
    """For paths that it does not have not again soon."""
    context = engine({})
    assert look(PROBE, context) == []
    assert len(context.asked) == 3
    assert look(PROBE, context) == []
    assert len(context.asked) == 3
    assert PROBE.due_at(context, 100.0) == 100.0 + PROBE.rest_s
    context.now_s += PROBE.absent_s
    look(PROBE, context)
    assert len(context.asked) == 6
    context = engine(AWAKE)
    look(PROBE, context)
    assert PROBE.due_at(context, 100.0) == 102.0
    context.in_flight = 1
    assert PROBE.due_at(context, 100.0) == 101.0
    context.is_on_hold = True
    assert PROBE.due_at(context, 100.0) == 100.5
    look(PROBE, context)
    assert [asked.target for asked in context.asked[3:]] == ["/is_paused", "/is_sleeping"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"is_paused":"yes"}', b'{"is_paused":1}', b"\xff", None])
def test_strange_answers_say_nothing_and_one_that_refuses_is_gone(body: bytes | None) -> None:
    """Nor does an engine that does not answer; and those that cannot say it are not asked."""
    answer = Trouble.TIMEOUT if body is None else reply(200, body)
    assert look(PROBE, FakePatient(lambda _: answer, engine="vllm")) == []
    gone = evidence_of(PROBE, FakePatient(lambda _: Trouble.REFUSED, engine="vllm"))
    assert (gone.sign, gone.strength) == (Sign.BAD, Strength.FATAL)
    other = engine(AWAKE, "llamacpp")
    assert (look(PROBE, other), other.asked) == ([], [])


# What is made of the word of the gate before a unit, and when it is asked.

UNIT = Unit("east.u/1", "east", "http://gate", nodes=via_gate("u/1"), engine=VIA_GATE)
SLOW = Reply(200, {"x-envoy-degraded": "1"}, b"")


NOTHING = (Sign.NEUTRAL, Strength.WEAK)


@pytest.mark.parametrize(
    ("answer", "weight"),
    [
        *((answer, (Sign.GOOD, Strength.STRONG)) for answer in (reply(200), SLOW)),
        *((reply(status), (Sign.BAD, Strength.STRONG)) for status in (404, 503)),
        *((answer, NOTHING) for answer in (reply(500), reply(302), Trouble.OWN)),
        (Trouble.REFUSED, (Sign.BAD, Strength.FATAL)),
        (Trouble.UNREACHABLE, (Sign.BAD, Strength.STRONG)),
        (Trouble.TIMEOUT, (Sign.BAD, Strength.STRONG)),
        (Trouble.BROKEN, (Sign.BAD, Strength.STRONG)),
    ],
)
@pytest.mark.parametrize("verdict", [Verdict.UP, Verdict.SUSPECT])
def test_a_gates_word_is_weighed(verdict: Verdict, answer: Answer, weight: tuple[Sign, Strength]) -> None:
    """A suspicion that it shares is not cleared."""
    context = FakePatient(lambda _: answer, UNIT, verdict=verdict)
    evidence = evidence_of(GateHealth(), context)
    assert (evidence.unit, evidence.source) == (UNIT.name, Canary.name)
    assert [asked.target for asked in context.asked] == ["/healthz/unit/u%2F1"]
    shares = verdict is Verdict.SUSPECT and answer is SLOW
    assert (evidence.sign, evidence.strength) == (NOTHING if shares else weight)


def test_it_is_asked_while_there_is_doubt_and_when_nothing_is_heard() -> None:
    probe, context = GateHealth(), FakePatient(lambda _: reply(200), UNIT, progress_at=99.0)
    assert probe.due_at(context, -math.inf) == 99.0 + probe.quiet_s
    context.progress_at = 10.0
    assert probe.due_at(context, 50.0) == 51.0
    context.progress_at, context.verdict = 99.0, Verdict.DOWN
    assert probe.due_at(context, 99.5) == 100.5
    assert list(GATE_PROBES.items()) == [(Canary.name, GateHealth)]
    assert name_there(UNIT) == "u/1"
