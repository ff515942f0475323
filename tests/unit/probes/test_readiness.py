"""What is taken for readiness, by engine."""

from __future__ import annotations

import math

import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.engines import ENGINES
from cellgate.probes.readiness import Readiness
from cellgate.router.nouns import Evidence, Load, Rules, Sign, Strength, Verdict
from tests.patient import Answer, FakePatient, look, reply


def see(context: FakePatient) -> Evidence:
    """The evidence of one look."""
    [evidence] = look(Readiness(), context)
    assert isinstance(evidence, Evidence)
    return evidence


@pytest.mark.parametrize(
    ("answer", "sign", "strength"),
    [
        (reply(200), Sign.GOOD, Strength.WEAK),
        (reply(500), Sign.BAD, Strength.STRONG),
        (reply(503), Sign.BAD, Strength.STRONG),
        (reply(400), Sign.NEUTRAL, Strength.WEAK),
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
@pytest.mark.parametrize("engine", ["", "vllm", "sglang"])
def test_each_answer_is_weighed(engine: str, answer: Answer, sign: Sign, strength: Strength) -> None:
    """One answer is one piece of evidence, signed by the probe."""
    context = FakePatient(lambda _: answer, engine=engine)
    evidence = see(context)
    assert (evidence.sign, evidence.strength) == (sign, strength)
    assert (evidence.unit, evidence.source, evidence.at) == ("u", "readiness", context.now_s)


def test_triton_says_not_ready_with_a_400() -> None:
    """While the same from another engine is no word about itself."""
    evidence = see(FakePatient(lambda _: reply(400), engine="triton"))
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.WEAK)


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
    """In one request, where the first path exists."""
    context = FakePatient(lambda _: reply(200), engine=engine)
    assert see(context).reason == f"GET {path}: HTTP 200"
    assert [asked.target for asked in context.asked] == [path]


def test_the_path_that_an_older_release_has_is_found_and_remembered() -> None:
    """SGLang's /ready came after its /ping."""
    context = FakePatient(lambda target: reply(200 if target == "/ping" else 404), engine="sglang")
    assert see(context).sign is Sign.GOOD
    assert see(context).sign is Sign.GOOD
    assert [asked.target for asked in context.asked] == ["/ready", "/ping", "/ping"]


def test_a_unit_that_became_another_engine_is_asked_where_that_one_answers() -> None:
    """What was remembered was the other engine's."""
    context = FakePatient(lambda _: reply(200), engine="vllm")
    see(context)
    context.engine = "triton"
    see(context)
    assert [asked.target for asked in context.asked] == ["/health", "/v2/health/ready"]


def test_sglang_is_never_asked_to_generate() -> None:
    """Its /health does, and takes as long as its users' work."""
    assert not {"/health", "/health_generate"} & {*ENGINES["sglang"].ready}


def test_all_paths_share_one_timeout() -> None:
    """A look takes no longer than one may."""

    def slow(_: str) -> Answer:
        context.now_s += 2.0
        return reply(404)

    context = FakePatient(slow, engine="sglang")
    see(context)
    assert [asked.timeout_s for asked in context.asked] == [3.0, 1.0]


def test_the_reason_names_the_path_and_what_was_said() -> None:
    """A person reads why."""
    assert see(FakePatient(lambda _: reply(503), engine="triton")).reason == "GET /v2/health/ready: HTTP 503"
    refused = FakePatient(lambda _: Trouble.REFUSED, engine="vllm")
    assert see(refused).reason == "GET /health: refused, so it was said"


def test_it_looks_at_once_and_then_each_period() -> None:
    """The first look is overdue from the beginning."""
    context = FakePatient(lambda _: reply(200))
    assert Readiness().due_at(context, -math.inf) == -math.inf
    assert Readiness(period_s=2.0).due_at(context, 100.0) == 102.0


def test_slow_answers_alone_do_not_reach_the_rate_that_is_suspicious() -> None:
    """Looks do not overlap, so that timeouts come at most one per `timeout_s`."""
    rules = Rules()
    assert rules.weak_window_s // Readiness().timeout_s + 1 < rules.weak_min


@pytest.mark.parametrize(
    ("verdict", "answered_at", "due"),
    [
        (Verdict.UP, 0.0, 101.0),
        (Verdict.UP, 100.5, 101.5),
        (Verdict.UP, 101.9, 102.9),
        (Verdict.UP, 102.9, 103.0),
        (Verdict.SUSPECT, 100.5, 101.0),
        (Verdict.STARTING, 100.5, 101.0),
    ],
)
def test_an_answer_to_another_probe_puts_it_off_for_a_while(
    verdict: Verdict, answered_at: float, due: float
) -> None:
    """A server that has just answered does not refuse; but its readiness may be bad all the same."""
    context = FakePatient(lambda _: reply(200), verdict=verdict, answered_at=answered_at)
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
