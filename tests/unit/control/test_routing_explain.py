"""What `/explain` answers: the question read as a request is, and the answer in words."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.control.explain import RoutingExplain, header_line
from cellgate.proxy.control.plane import StoredResponses
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.request.body import read_ask
from cellgate.router.nouns import Ask
from cellgate.router.pick import Router
from cellgate.router.sampling import IDLE_S, LOOK_AT_ALL, SAMPLE
from tests.unit.router.test_dry_run import NOW, PROMPT, fill, router_of


def choice_of(router: Router, policy: str = "prefix_affinity") -> RoutingExplain:
    stored = StoredResponses(router.board)
    return RoutingExplain(router, stored, HeaderNames(), policy, lambda: NOW, random.Random(1))


def explain(router: Router, body: Any = None, **query: str) -> dict[str, Any]:
    found = choice_of(router).explain(query, None if body is None else orjson.dumps(body))
    assert isinstance(found, dict)
    return found


def mistake(query: dict[str, str], body: bytes | None = None) -> str:
    found = choice_of(router_of()).explain(query, body)
    assert isinstance(found, Failure)
    return found.message


def test_candidates_come_with_each_term_in_seconds() -> None:
    found = explain(router_of(2), model="m", prompt_tokens="1000")
    assert (found["decision"], found["unit"], found["reason"]) == ("sent", "u1", "unit u1 ranks first")
    first = found["units"][0]
    assert (first["unit"], first["candidate"], first["why_not"], first["has_room"]) == (
        "u1",
        True,
        None,
        True,
    )
    assert (first["prompt_tokens"], first["cached_tokens"], first["in_flight"]) == (1000, 0, 0)
    assert first["cost"]["prefill_s"] == 0.5
    assert list(first["cost"]) == [
        "total_s",
        "queue_s",
        "prefill_s",
        "decode_s",
        "beside_s",
        "kv_s",
        "seat_s",
        "line_s",
        "evict_s",
        "shared_s",
        "error_s",
        "doubt_s",
        "far_s",
        "latency_s",
    ]
    # It is for JSON, as it is.
    assert orjson.loads(orjson.dumps(found)) == found


def test_a_body_is_read_as_a_clients_is_and_finds_what_is_cached() -> None:
    router = router_of(2)
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}
    choice = choice_of(router)
    asked = choice.explain({}, orjson.dumps(body))
    assert isinstance(asked, dict)
    assert asked["ask"]["prefix_blocks"] == 7
    assert [unit["cached_tokens"] for unit in asked["units"]] == [0, 0]
    ask = read_ask(orjson.dumps(body))
    assert isinstance(ask, Ask)
    router.board.close(lease := router.board.open("u0", ask, NOW, retry=False), NOW)
    router.board.units["u0"].costs.prefixes.record(lease.ask.blocks)
    again = explain(router, body)
    assert (again["unit"], again["units"][0]["cached_tokens"]) == ("u0", 7 * 128)


def test_parameters_stand_for_header_lines() -> None:
    found = explain(router_of(), model="m", session="s", tenant="t", priority="-3")
    assert {name: found["ask"][name] for name in ("session", "tenant", "priority")} == {
        "session": "s",
        "tenant": "t",
        "priority": -3,
    }
    late = explain(router_of(), model="m", prompt_tokens="4000", ttft_ms="10")
    assert (late["decision"], late["unit"]) == ("refused", None)
    assert late["reason"].startswith("429: it could not be answered before its deadline")


def test_who_would_wait_is_told_why_and_behind_what() -> None:
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


def test_units_that_are_no_candidates_say_why_in_words() -> None:
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
        (
            {"prompt_token": "1"},
            "'prompt_token' is not a parameter; the parameters are: model, prompt_tokens, ",
        ),
        ({"prompt_tokens": "-1"}, "prompt_tokens: expected an integer from 0 to 100000000, found '-1'"),
        ({"prompt_tokens": "²"}, "prompt_tokens: expected an integer"),
        ({"priority": "high"}, "x-priority: expected an integer"),
        ({"ttft_ms": "0"}, "x-slo-ttft-ms: expected milliseconds above 0"),
        ({"session": ""}, "x-session-id: expected a name"),
    ],
)
def test_a_question_that_makes_no_sense_is_told_so(query: dict[str, str], says: str) -> None:
    assert mistake(query).startswith(says)


def test_a_body_that_makes_no_sense_is_told_so() -> None:
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
