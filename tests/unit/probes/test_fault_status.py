"""Which ranks an engine says are not healthy, what follows for its unit, and how they are retried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import orjson
import pytest

from cellgate.probes.base import Fetch, Net, Reply, Trouble
from cellgate.probes.fault_status import FaultStatus, rank_words
from cellgate.probes.nodes import HttpProbe
from cellgate.proxy.control import rank_retry
from cellgate.proxy.http.fetch import ProbeTransport
from cellgate.router.judge import FAULT_SOURCE, judge, open_case, works_though_out
from cellgate.router.nouns import (
    EnginePause,
    Evidence,
    HoldKind,
    Node,
    RankFault,
    RankFaults,
    Role,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from tests.patient import Answer, FakePatient, look, reply

OLD, NEW = "/fault_tolerance/status", "/v1/fault_tolerance/status"
PROBE = FaultStatus()
RULES = Rules()


def page(*ranks: str, info: str = "") -> Reply:
    """The status of these ranks, numbered from 0."""
    engines = [
        {"id": number, "status": status, **({"fault_info": info} if info else {})}
        for number, status in enumerate(ranks)
    ]
    found = {"schema_version": 1, "total_engines": len(ranks), "engines": engines}
    return reply(200, orjson.dumps(found))


def engine(pages: Mapping[str, Answer], **changes: Any) -> FakePatient:
    """One that has these pages, and no others."""
    return FakePatient(lambda target: pages.get(target, reply(404)), engine="vllm", **changes)


@pytest.mark.parametrize("path", [OLD, NEW])
@pytest.mark.parametrize("status", ["unhealthy", "dead", "paused"])
def test_a_rank_that_is_not_healthy_is_fatal_and_named(path: str, status: str) -> None:
    found = look(PROBE, engine({path: page("healthy", status, info="RuntimeError")}))
    faults, evidence = found
    assert faults == RankFaults("u", (RankFault("1", status, "RuntimeError"),))
    assert isinstance(evidence, Evidence)
    assert (evidence.sign, evidence.strength, evidence.source) == (Sign.BAD, Strength.FATAL, FAULT_SOURCE)
    assert evidence.reason == f"GET {path}: rank 1 is {status} (RuntimeError)"


@pytest.mark.parametrize(
    "answer",
    [
        page("healthy", "healthy"),
        page("something new"),
        reply(404),
        reply(500),
        reply(200, b"<html>"),
        reply(200, b'{"engines": {"0": "unhealthy"}}'),
        reply(200, b'{"engines": [7, {"id": 1}, {"status": ["unhealthy"]}]}'),
        Trouble.TIMEOUT,
        Trouble.REFUSED,
    ],
)
def test_whatever_else_is_answered_says_nothing(answer: Answer) -> None:
    assert look(PROBE, engine({OLD: answer, NEW: answer})) == []


def test_an_engine_that_recovers_stands_still_on_purpose_until_it_says_otherwise() -> None:
    pages: dict[str, Answer] = {OLD: page("recovering")}
    context = engine(pages)
    (began,) = look(PROBE, context)
    assert isinstance(began, EnginePause)
    assert (began.kind, began.is_of_faults) == (HoldKind.RECOVERING, True)
    pages[OLD] = page("healthy")
    (over,) = look(PROBE, context)
    assert isinstance(over, EnginePause)
    assert (over.kind, over.is_of_faults) == (None, True)


def test_the_end_of_a_fault_is_told_once_and_proves_nothing() -> None:
    pages: dict[str, Answer] = {OLD: page("unhealthy")}
    context = engine(pages)
    case = open_case(0.0)
    for answer, verdict in ((page("unhealthy"), Verdict.DOWN), (page("healthy"), Verdict.DOWN)):
        pages[OLD] = answer
        for found in look(PROBE, context):
            if isinstance(found, Evidence):
                case, wants_canary = judge(case, found, RULES)
        assert case.verdict is verdict
    assert (wants_canary, case.faults) == (True, frozenset())
    assert look(PROBE, context) == []


def test_no_canary_brings_a_unit_back_while_a_rank_is_faulty() -> None:
    fault = Evidence("u", Sign.BAD, Strength.FATAL, FAULT_SOURCE, "rank 0 is dead", 1.0)
    case, _ = judge(open_case(0.0), fault, RULES)
    for at in (2.0, 3.0, 4.0):
        case, _ = judge(case, Evidence("u", Sign.GOOD, Strength.STRONG, "canary", "a token", at), RULES)
    assert case.verdict is Verdict.DOWN
    assert not works_though_out(case)  # A request may have ended it.


def test_ranks_of_other_nodes_are_asked_where_their_probe_says() -> None:
    nodes = (
        Node("n0", Role.LEADER),
        Node("n1", Role.FOLLOWER, probes=(HttpProbe(url="http://n1:8000/health"),)),
    )
    pages = {OLD: page("healthy"), f"http://n1:8000{OLD}": page("unhealthy")}
    faults = look(PROBE, engine(pages, unit=Unit("u", "c", "http://u", nodes=nodes)))[0]
    assert faults == RankFaults("u", (RankFault("0", "unhealthy", "", "n1"),))


@pytest.mark.parametrize(
    ("pages", "in_flight", "pause_s"),
    [({}, 1, 60.0), ({OLD: page("healthy")}, 0, 2.0), ({OLD: page("healthy")}, 1, 1.0)],
)
def test_an_engine_without_it_is_hardly_asked(
    pages: dict[str, Answer], in_flight: int, pause_s: float
) -> None:
    context = engine(pages, in_flight=in_flight)
    assert PROBE.due_at(context, 0.0) == 1.0
    look(PROBE, context)
    assert PROBE.due_at(context, 0.0) == pause_s


class Ranks:
    """The API servers of two ranks. `heal` is called with the number of each round that was begun."""

    def __init__(self, heal: Callable[[int], dict[str, str]]) -> None:
        self.heal = heal
        self.said = {"": "unhealthy", "n1": "unhealthy"}
        self.asked: list[tuple[str, Any]] = []

    def fetch(self, node: str) -> Fetch:
        async def ask(method: str, target: str, *, body: bytes = b"", timeout_s: float) -> Reply:
            if method == "GET":
                return page(self.said[node]) if target == OLD else reply(404)
            self.asked.append((f"{node}{target}", orjson.loads(body)))
            if node == "n1":
                self.said |= self.heal(len(self.asked) // 2)
            return reply(202)

        return cast(Fetch, ask)

    def retry(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Whether all are healthy afterwards; without waiting."""
        nodes = (Node("n1", Role.FOLLOWER, probes=(HttpProbe(url="http://n1:8000/health"),)),)
        state = type("State", (), {"unit": Unit("u", "c", "http://u", nodes=nodes), "engine": "vllm"})
        net = type("Net", (), {"fetch": lambda _self, _url: self.fetch("n1")})()
        transport = type("Transport", (), {"fetch": self.fetch(""), "net": cast(Net, net)})
        monkeypatch.setattr(rank_retry, "POLL_S", 0.0)
        monkeypatch.setattr(rank_retry, "POLLS", 3)
        return asyncio.run(rank_retry.retry_ranks(cast(Any, state), cast(ProbeTransport, transport)))


WELL = {"": "healthy", "n1": "healthy"}


def test_all_ranks_are_asked_to_retry_as_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(lambda _round: WELL)
    assert ranks.retry(monkeypatch)
    (first, body), (second, same) = ranks.asked
    assert (first, second) == ("/fault_tolerance/apply", "n1/fault_tolerance/apply")
    assert body == same
    assert (body["instruction"], len(body["request_id"])) == ("retry", 36)


def test_a_round_that_fails_is_tried_again_with_another_id_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(lambda number: WELL if number == 2 else {})
    assert ranks.retry(monkeypatch)
    assert len({body["request_id"] for _, body in ranks.asked}) == 2
    hopeless = Ranks(lambda _round: {})
    assert not hopeless.retry(monkeypatch)
    assert len(hopeless.asked) == 2 * rank_retry.ROUNDS


@pytest.mark.parametrize("said", [WELL, {"": "unhealthy", "n1": "dead"}])
def test_nothing_is_asked_where_a_retry_cannot_help(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    ranks = Ranks(lambda _round: {})
    ranks.said = said
    assert not ranks.retry(monkeypatch)
    assert ranks.asked == []


def test_a_fault_in_words() -> None:
    assert rank_words(RankFault("3", "dead", "")) == "rank 3 is dead"
