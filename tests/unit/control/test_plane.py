"""What the control plane answers: readiness, explanations, stored responses, engine operations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import orjson
import pytest

from cellgate.probes.base import Fetch, FetchError, Reply, Trouble
from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.control.engine_control import EngineAction, EngineControlError, EngineController
from cellgate.proxy.control.explain import RoutingExplain, header_line
from cellgate.proxy.control.hold_watch import HoldWatch
from cellgate.proxy.control.plane import RENDER_S, ReadinessPage
from cellgate.proxy.control.stored_responses import RESPONSES_KEPT, StoredResponses
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.request.body import read_ask
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, EnginePause, Evidence, Fleet, HoldKind, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.sampling import IDLE_S, LOOK_AT_ALL, SAMPLE
from cellgate.router.unit_state import UnitState
from tests.unit.router.test_dry_run import NOW, PROMPT, fill, router_of

AT = 100.0


class Shown:
    """A page before one unit that is UP; `pages` are those that were published."""

    def __init__(self) -> None:
        self.board = Board(Rules())
        self.board.configure(Fleet(units=(Unit("u", "c", "http://u"),)), AT)
        self.observe(Sign.GOOD, Strength.STRONG)
        self.full = False
        self.later: list[Callable[[], None]] = []
        self.pages: list[tuple[bool, bytes, bytes]] = []
        self.page = ReadinessPage(
            self.board, lambda *page: self.pages.append(page), self.later.append, lambda: self.full
        )
        self.page.tick(AT)

    def observe(self, sign: Sign, strength: Strength) -> None:
        self.board.observe(Evidence("u", sign, strength, "canary", "seen", AT))

    @property
    def is_ready(self) -> bool:
        ready: bool = self.pages[-1][0]
        assert self.body == self.body | {"ready": ready}
        return ready

    @property
    def body(self) -> Any:
        return orjson.loads(self.pages[-1][1])


def test_each_tick_publishes_and_the_page_is_written_once_a_second() -> None:
    """What changes without units is seen on the next tick."""
    shown = Shown()
    shown.observe(Sign.BAD, Strength.FATAL)
    shown.page.tick(AT + 0.25)
    shown.page.tick(AT + RENDER_S)
    assert [page[0] for page in shown.pages] == [True, True, False]
    assert not shown.is_ready
    full = Shown()
    full.full = True
    full.page.tick(AT + 0.25)
    assert not full.is_ready
    full.board.panic_at = AT
    full.page.tick(AT + 0.5)
    assert full.body["panic"]


def test_a_change_is_published_once_at_the_end_of_the_turn_and_a_stop_at_once() -> None:
    shown = Shown()
    shown.observe(Sign.BAD, Strength.FATAL)
    shown.page.changed()
    shown.page.changed()
    assert len(shown.later) == 1
    shown.later[0]()
    assert not shown.is_ready
    shown.page.changed()
    assert len(shown.later) == 2
    shown.later[1]()
    shown.board.attention.is_large = True
    shown.page.changed()
    assert len(shown.later) == 2, "in a large fleet this tick has seen the page already"
    before = len(shown.pages)
    shown.page.tick(AT + 0.25)
    assert len(shown.pages) == before + 1
    shown = Shown()
    shown.page.stopping = True
    shown.page.publish()
    assert not shown.is_ready


# What `/explain` answers: the question read as a request is, and the answer in words.


def choice_of(router: Router) -> RoutingExplain:
    stored = StoredResponses(router.board)
    return RoutingExplain(router, stored, HeaderNames(), "prefix_affinity", lambda: NOW, random.Random(1))


def explain(router: Router, body: Any = None, **query: str) -> dict[str, Any]:
    found = choice_of(router).explain(query, None if body is None else orjson.dumps(body))
    assert isinstance(found, dict)
    return found


def mistake(query: dict[str, str], body: bytes | None = None) -> str:
    found = choice_of(router_of()).explain(query, body)
    assert isinstance(found, Failure)
    return found.message


def test_candidates_come_with_each_term_in_seconds_and_parameters_stand_for_header_lines() -> None:
    found = explain(router_of(2), model="m", prompt_tokens="1000")
    assert (found["decision"], found["unit"], found["reason"]) == ("sent", "u1", "unit u1 ranks first")
    first = found["units"][0]
    names = ("unit", "candidate", "why_not", "has_room", "prompt_tokens", "cached_tokens", "in_flight")
    assert [first[name] for name in names] == ["u1", True, None, True, 1000, 0, 0]
    assert first["cost"]["prefill_s"] == 0.5
    terms = "total queue prefill decode slowdown_of_others kv slot queue_penalty eviction shared error"
    terms += " unknown far latency"
    assert list(first["cost"]) == [f"{term}_s" for term in terms.split()]
    # It is for JSON, as it is.
    assert orjson.loads(orjson.dumps(found)) == found
    asked = explain(router_of(), model="m", session="s", tenant="t", priority="-3")["ask"]
    assert (asked["session"], asked["tenant"], asked["priority"]) == ("s", "t", -3)
    late = explain(router_of(), model="m", prompt_tokens="4000", ttft_ms="10")
    assert (late["decision"], late["unit"]) == ("refused", None)
    assert late["reason"].startswith("429: it could not be answered before its deadline")


def test_a_body_is_read_as_a_clients_is_and_finds_what_is_cached() -> None:
    router = router_of(2)
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}
    asked = explain(router, body)
    assert asked["ask"]["prefix_blocks"] == 7
    assert [unit["cached_tokens"] for unit in asked["units"]] == [0, 0]
    ask = read_ask(orjson.dumps(body))
    assert isinstance(ask, Ask)
    router.board.close(lease := router.board.open("u0", ask, NOW, retry=False), NOW)
    router.board.units["u0"].costs.prefixes.record(lease.ask.blocks)
    again = explain(router, body)
    assert (again["unit"], again["units"][0]["cached_tokens"]) == ("u0", 7 * 128)


def test_who_would_wait_is_told_why_and_behind_what() -> None:
    """Units that are no candidates say why in words."""
    router = router_of(2)
    fill(router, "u0", "u1")
    router.wait(PROMPT._replace(blocks=(), tenant="a"), NOW, frozenset(), lambda _: None)
    found = explain(router, model="m", prompt_tokens="1000")
    assert (found["decision"], found["reason"]) == ("waits", "no unit has room")
    assert found["wait_s"] == pytest.approx(1000 / 3000, abs=1e-3)
    queue = found["queue"]
    assert (queue["waiting"], queue["moved"], queue["tokens"], queue["tenants"]) == (1, 0, 1000, 1)
    assert (queue["tokens_s"], queue["waiting_max"]) == (3000, 1024)
    for name in ("u0", "u1"):
        for lease in list(router.board.units[name].leases):
            router.board.close(lease, NOW)
    assert explain(router, model="m")["reason"] == "other requests wait, and it is queued behind them"
    router = router_of(2)
    router.board.drain("u0", drained=True)
    found = explain(router, model="m", tried="u1")
    assert (found["decision"], found["reason"].partition(":")[0]) == ("refused", "503")
    assert {unit["unit"]: unit["why_not"] for unit in found["units"]} == {
        "u0": "drained: an operator has drained it",
        "u1": "tried: the request has failed there",
    }


def test_what_else_may_decide_is_noted() -> None:
    assert explain(router_of(2), model="m")["notes"] == []
    router = router_of(2)
    # It comes second: what it has to do is more than a tie.
    router.board.open("u0", PROMPT, NOW, retry=False)
    router.board.units["u0"].last_lease_at = NOW - IDLE_S - 1.0
    (idle,) = explain(router, model="m")["notes"]
    assert idle.startswith("u0 got no requests for 2 s or longer")
    (many,) = explain(router_of(LOOK_AT_ALL + 1), model="m")["notes"]
    assert many.startswith(f"of {LOOK_AT_ALL + 1} units, {SAMPLE} random ones are considered")
    (by_turn,) = explain(router_of(2, "round_robin"), model="m")["notes"]
    assert "does not rank by costs" in by_turn


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"prompt_token": "1"}, "'prompt_token' is not a parameter; the parameters are: model, "),
        ({"prompt_tokens": "-1"}, "prompt_tokens: expected an integer from 0 to 100000000, found '-1'"),
        ({"prompt_tokens": "²"}, "prompt_tokens: expected an integer"),
        ({"priority": "high"}, "x-priority: expected an integer"),
        ({"ttft_ms": "0"}, "x-slo-ttft-ms: expected milliseconds above 0"),
    ],
)
def test_a_question_that_makes_no_sense_is_told_so(query: dict[str, str], says: str) -> None:
    assert mistake(query).startswith(says)
    assert "not valid JSON" in mistake({}, b"{")
    assert mistake({"model": "m"}, b"{}").startswith("'model' is not a parameter")


def test_the_header_of_an_answer_has_what_was_reckoned() -> None:
    router = router_of(1)
    lease = router.board.open("u0", PROMPT, NOW, retry=False)
    line = header_line(lease, 0.25).decode()
    assert line.startswith("x-cellgate-explain: unit=u0 total_s=3.6")
    assert " far_s=0.0000 latency_s=0.0000 " in line
    assert line.endswith(" prompt_tokens=1000 cached_tokens=0 waited_s=0.2500\r\n")
    assert " prefill_s=1.0000 " in line


# Requests that follow a stored response go to the unit that has it, or nowhere.


def test_a_request_goes_to_the_unit_that_has_what_it_follows() -> None:
    """One that is down is a 409, one that has left a 404, which is news once; only so many are kept."""
    board = router_of(2).board
    responses = StoredResponses(board, keyed=True)

    def follow(response: str) -> Ask:
        return Ask(follows=response, payer="a")

    responses.made("resp_1", "u1", "a")
    asked = responses.bind(follow("resp_1"))
    assert isinstance(asked, Ask)
    assert asked.unit == "u1"
    board.observe(Evidence("u1", Sign.BAD, Strength.FATAL, "tcp", "refused", NOW))
    away = responses.bind(follow("resp_1"))
    assert isinstance(away, Failure)
    assert (away.kind, away.kind.row.status) == (FailureKind.RESPONSE_AWAY, 409)
    responses.made("resp_2", "c", "a")
    responses.made("resp_3", "c", "a")
    gone = responses.bind(follow("resp_2")._replace(unit=""))
    assert isinstance(gone, Failure)
    assert (gone.kind, gone.kind.row.status) == (FailureKind.RESPONSE_GONE, 404)
    assert "c made response resp_2" in gone.message
    follows = ("resp_2", "resp_3", "resp_unknown")
    assert [responses.newly_lost(follow(each)) for each in follows] == ["c", "", ""]
    for number in range(RESPONSES_KEPT):
        responses.made(f"resp_more_{number}", "u0", "a")
    assert responses.bind(follow("resp_1")) is None


RANDOM = "resp_5f0c7e1b9a8d4c3e8f7a6b5c4d3e2f10"


def test_what_was_made_for_somebody_else_is_as_unknown_as_what_nobody_made() -> None:
    """A client names its response as another's, or asks for that: it reaches no unit, takes nothing over."""
    responses = StoredResponses(router_of(2).board, keyed=True)
    responses.made("resp_mine", "u1", "a")
    responses.made("resp_mine", "u0", "b")
    asked = {who: responses.bind(Ask(unit="", follows="resp_mine", payer=who)) for who in "abc"}
    assert asked == {
        "a": Ask(unit="u1", follows="resp_mine", payer="a"),
        "b": Ask(unit="u0", follows="resp_mine", payer="b"),
        "c": None,
    }
    foreign = responses.unknown(Ask(unit="", follows="resp_mine", payer="c"))
    nobodys = responses.unknown(Ask(unit="", follows="resp_none", payer="c"))
    assert foreign.kind is nobodys.kind is FailureKind.UNKNOWN_PATH
    assert foreign.message.replace("mine", "none") == nobodys.message


def test_without_keys_an_id_that_nobody_can_guess_is_as_good_as_a_key_and_any_other_is_its_addresss() -> None:
    responses = StoredResponses(router_of(2).board)
    responses.made(RANDOM, "u1", "1.1.1.1")
    responses.made("resp_1", "u1", "1.1.1.1")
    # A unit, or a client that was told the id, makes one of the same name.
    responses.made(RANDOM, "u0", "2.2.2.2")
    asked = {
        follows: [
            found.unit if isinstance(found := responses.bind(Ask(follows=follows, payer=who)), Ask) else None
            for who in ("1.1.1.1", "2.2.2.2")
        ]
        for follows in (RANDOM, "resp_1")
    }
    assert asked == {RANDOM: ["u1", "u1"], "resp_1": ["u1", None]}


@pytest.mark.parametrize("keyed", [True, False])
def test_one_that_makes_many_responses_pushes_out_its_own(*, keyed: bool) -> None:
    """A flood of one-token answers breaks no conversation of others, nor does the same by many names."""
    responses, rng = StoredResponses(router_of(2).board, keyed=keyed), random.Random(1)
    conversations = {f"resp_{rng.randbytes(16).hex()}": f"quiet{number % 8}" for number in range(40)}
    for response, who in conversations.items():
        responses.made(response, "u1", who)
    for number in range(RESPONSES_KEPT + 10_400):
        responses.made(f"resp_{rng.randbytes(16).hex()}", "u0", "loud" if number % 3 else "louder")
    found = [responses.bind(Ask(follows=response, payer=who)) for response, who in conversations.items()]
    assert [ask.unit for ask in found if isinstance(ask, Ask)] == ["u1"] * 40
    assert len(list(responses)) == RESPONSES_KEPT


# Operations of an engine for an operator: out of rotation first, back only after a proof.

OK = Reply(200, {}, b"{}")


class Stage:
    """A conductor of one unit; `reply` is what its engine answers."""

    def __init__(self, engine: str = "vllm") -> None:
        self.now = 100.0
        self.reply: Reply | FetchError = OK
        self.asked: list[tuple[str, bytes, bool]] = []
        self.looked: list[str] = []
        self.board = Board(Rules())
        self.board.configure(Fleet(units=(Unit("u", "c", "http://u", engine=engine),)), 90.0)
        self.board.observe(Evidence("u", Sign.GOOD, Strength.STRONG, "canary", "token", 95.0))
        events = EventLog(lambda: 0.0, 2, lambda *_: None)
        self.watch = HoldWatch(
            self.board,
            cast("Any", self),
            events,
            lambda: self.now,
            evict=lambda _: None,
            changed=lambda: None,
        )
        self.conductor = EngineController(
            lambda _: cast(Fetch, self.fetch), self.set_drain, self.watch, 300.0
        )

    @property
    def state(self) -> UnitState:
        return self.board.units["u"]

    def set_drain(self, unit: str, drained: bool) -> bool:
        return self.board.drain(unit, drained=drained)

    def look_now(self, _unit: str, probe: str) -> None:
        """As the prober has it."""
        self.looked.append(probe)

    def unanswered(self, _probe: str, _for_s: float, _now: float) -> list[str]:
        """As the prober has it."""
        return []

    async def fetch(self, method: str, target: str, *, body: bytes, timeout_s: float) -> Reply:
        assert method == "POST"
        self.asked.append((target, body, self.state.drained))
        if isinstance(self.reply, FetchError):
            raise self.reply
        return self.reply

    def act_on_engine(self, deed: EngineAction, mode: str = "") -> str:
        return asyncio.run(self.conductor.act_on_engine(self.state, deed, mode))

    def refusal(self, deed: EngineAction, mode: str = "") -> EngineControlError:
        with pytest.raises(EngineControlError) as caught:
            self.act_on_engine(deed, mode)
        return caught.value


@pytest.mark.parametrize(
    ("deed", "path"), [("pause", "/pause?mode=wait"), ("sleep", "/sleep?level=1&mode=wait")]
)
def test_a_unit_is_drained_before_its_engine_stands_still(deed: EngineAction, path: str) -> None:
    stage = Stage()
    assert stage.act_on_engine(deed) == "wait"
    assert stage.asked == [(path, b"", True)]
    assert stage.looked == ["quiescence"]


@pytest.mark.parametrize(("deed", "path"), [("resume", "/resume"), ("wake", "/wake_up")])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_unit_that_goes_on_has_to_show_work_first(deed: EngineAction, path: str, is_known: bool) -> None:
    stage = Stage()
    stage.set_drain("u", True)
    if is_known:
        stage.watch.hear(stage.state, EnginePause("u", HoldKind.PAUSED, 99.0))
    stage.act_on_engine(deed)
    assert stage.asked == [(path, b"", True)]
    assert not stage.state.drained
    assert not stage.state.is_usable()
    assert stage.looked[-1] == "canary"
    stage.board.observe(Evidence("u", Sign.GOOD, Strength.STRONG, "canary", "token", 100.5))
    stage.watch.tick(101.0)
    assert stage.state.is_usable()


def test_an_engine_that_refuses_changes_nothing_and_one_that_does_not_answer_stays_drained() -> None:
    """The error says what to do."""
    stage = Stage()
    stage.reply = Reply(404, {}, b'{"detail":"Not Found"}')
    refusal = stage.refusal("pause")
    assert refusal.status is HTTPStatus.BAD_GATEWAY
    assert "POST /pause: HTTP 404" in str(refusal)
    assert "VLLM_SERVER_DEV_MODE=1" in str(refusal)
    assert not stage.state.drained
    stage.reply = FetchError(Trouble.TIMEOUT, "POST /pause: no reply within 300 s")
    assert "it stays drained" in str(stage.refusal("pause", "keep"))
    assert stage.state.drained


def test_an_unknown_mode_and_an_engine_that_cannot_do_it_are_refused_before_anything_is_done() -> None:
    stage = Stage("sglang")
    refusal = stage.refusal("pause", "wait")
    assert (refusal.status, stage.asked) == (HTTPStatus.BAD_REQUEST, [])
    assert str(refusal) == "unit u: pause of engine sglang has the modes abort, keep, not 'wait'"
    assert stage.act_on_engine("pause", "keep") == "keep"
    assert stage.asked == [("/pause_generation", b'{"mode":"in_place"}', True)]
    refusal = Stage("llamacpp").refusal("sleep")
    assert refusal.status is HTTPStatus.CONFLICT
    assert "engine llamacpp has no sleep that the gate knows; these have: vllm" in str(refusal)
