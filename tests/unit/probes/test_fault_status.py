"""Which ranks an engine says are not healthy, what follows for its unit, and how they are retried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import orjson
import pytest

from cellgate.probes.base import Fetch, Net, Reply, Trouble
from cellgate.probes.fault_status import FaultStatus
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
@pytest.mark.parametrize(("info", "why"), [("RuntimeError", " (RuntimeError)"), ("", "")])
def test_a_rank_that_is_not_healthy_is_fatal_and_named(path: str, status: str, info: str, why: str) -> None:
    faults, evidence = look(PROBE, engine({path: page("healthy", status, info=info)}))
    assert faults == RankFaults("u", (RankFault("1", status, info),))
    assert isinstance(evidence, Evidence)
    assert (evidence.sign, evidence.strength, evidence.source) == (Sign.BAD, Strength.FATAL, FAULT_SOURCE)
    assert evidence.reason == f"GET {path}: rank 1 is {status}{why}"


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
def test_one_without_it_is_hardly_asked(pages: dict[str, Answer], in_flight: int, pause_s: float) -> None:
    context = engine(pages, in_flight=in_flight)
    assert PROBE.due_at(context, 0.0) == 1.0
    look(PROBE, context)
    assert PROBE.due_at(context, 0.0) == pause_s


class Ranks:
    """The API servers of two ranks. `take` is called with each rank that was asked while unhealthy, and gives
    what it and the others say from then on; one that is healthy refuses.
    """

    def __init__(self, take: Callable[[Ranks, str], None]) -> None:
        self.take = take
        self.said = {"": "unhealthy", "n1": "unhealthy"}
        self.failed: dict[str, str] = {}
        self.asked: list[tuple[str, Any]] = []
        self.polls = 0

    def fetch(self, node: str) -> Fetch:
        async def ask(method: str, target: str, *, body: bytes = b"", timeout_s: float) -> Reply:
            if method == "GET":
                self.polls += not node
                return self._page(node) if target == OLD else reply(404)
            self.asked.append((f"{node}{target}", orjson.loads(body)))
            own = f"own-{len(self.asked)}"
            if self.said[node] == "healthy":
                self.failed[node] = own
            else:
                self.take(self, node)
            return reply(202, orjson.dumps({"message": "accepted", "request_id": own}))

        return cast(Fetch, ask)

    def fail(self, node: str) -> None:
        """What the rank was asked last has failed."""
        self.failed[node] = f"own-{len(self.asked)}"

    def rounds(self) -> list[list[str]]:
        """Which ranks were asked in each round."""
        found = dict[str, list[str]]()
        for target, body in self.asked:
            found.setdefault(body["request_id"], []).append(target.removesuffix("/fault_tolerance/apply"))
        return list(found.values())

    def _page(self, node: str) -> Reply:
        engine = {"id": 0, "status": self.said[node]}
        if node in self.failed:
            engine |= {"last_ft_request_id": self.failed[node], "ft_error": "Worker failed"}
        return reply(200, orjson.dumps({"schema_version": 1, "total_engines": 1, "engines": [engine]}))

    def retry(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Whether all are healthy afterwards; without waiting."""
        nodes = (Node("n1", Role.FOLLOWER, probes=(HttpProbe(url="http://n1:8000/health"),)),)
        state = type("State", (), {"unit": Unit("u", "c", "http://u", nodes=nodes), "engine": "vllm"})
        net = type("Net", (), {"fetch": lambda _self, _url: self.fetch("n1")})()
        transport = type("Transport", (), {"fetch": self.fetch(""), "net": cast(Net, net)})
        monkeypatch.setattr(rank_retry, "POLL_S", 0.0)
        return asyncio.run(rank_retry.retry_ranks(cast(Any, state), cast(ProbeTransport, transport)))


WELL = {"": "healthy", "n1": "healthy"}


def heal(ranks: Ranks, node: str) -> None:
    """The last of the two that are unhealthy."""
    if node == "n1":
        ranks.said = dict(WELL)


def test_all_unhealthy_ranks_are_asked_to_retry_as_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(heal)
    assert ranks.retry(monkeypatch)
    assert ranks.rounds() == [["", "n1"]]
    assert [body["instruction"] for _, body in ranks.asked] == ["retry", "retry"]


@pytest.mark.parametrize("late", ["", "n1"])
def test_a_healthy_rank_is_asked_only_once_it_fails_too(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses it before; and it fails when the other one leaves their group for the retry."""

    def leave(ranks: Ranks, node: str) -> None:
        ranks.said = dict.fromkeys(WELL, "unhealthy") if node != late else dict(WELL)

    ranks = Ranks(leave)
    ranks.said[late] = "healthy"
    assert ranks.retry(monkeypatch)
    (asked,) = ranks.rounds()
    assert asked == ["n1", ""] if late == "" else ["", "n1"]
    assert ranks.failed == {}


def test_a_rank_that_works_alone_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(lambda ranks, node: ranks.said.update({node: "healthy"}))
    ranks.said["n1"] = "healthy"
    assert ranks.retry(monkeypatch)
    assert ranks.rounds() == [[""]]


def test_a_round_ends_when_a_rank_says_that_it_has_failed_and_another_one_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def second(ranks: Ranks, node: str) -> None:
        if len(ranks.rounds()) == 2:
            heal(ranks, node)
        elif node == "n1":
            ranks.fail(node)

    ranks = Ranks(second)
    assert ranks.retry(monkeypatch)
    assert ranks.rounds() == [["", "n1"]] * 2
    assert ranks.polls < 10, "it did not wait for the end of the first round"
    hopeless = Ranks(lambda ranks, node: ranks.fail(node))
    assert not hopeless.retry(monkeypatch)
    assert hopeless.rounds() == [["", "n1"]] * rank_retry.ROUNDS


def test_the_failure_of_an_earlier_round_does_not_end_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(heal)
    ranks.failed = {"": "of yesterday", "n1": "of yesterday"}
    assert ranks.retry(monkeypatch)
    assert len(ranks.rounds()) == 1


def test_a_round_of_which_nothing_is_heard_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_retry, "POLLS", 3)
    silent = Ranks(lambda _ranks, _node: None)
    assert not silent.retry(monkeypatch)
    assert silent.rounds() == [["", "n1"]] * rank_retry.ROUNDS


@pytest.mark.parametrize("said", [WELL, {"": "unhealthy", "n1": "dead"}])
def test_nothing_is_asked_where_no_retry_helps(monkeypatch: pytest.MonkeyPatch, said: dict[str, str]) -> None:
    ranks = Ranks(heal)
    ranks.said = said
    assert not ranks.retry(monkeypatch)
    assert ranks.asked == []
