"""Tokens that are billed: limits as engines read them, answers without usage, units that tell too many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from cellgate.proxy.admission.keys import KeyChecker
from cellgate.proxy.admission.token_estimator import ESTIMATES_KEPT, FORGET_S, NOVICE, TokenEstimators
from cellgate.proxy.request.answer_limits import LIMIT_NAMES, RULES, limits_of
from cellgate.proxy.request.body import read_ask
from cellgate.router.nouns import Ask
from tests.unit.admission.test_keys import House, asked, framed, named, said
from tests.wire.unit import LAST_CHUNK, SSE_HEAD

Body = dict[str, Any]
DEFAULT = 700
"""What the engines of these tests generate where nothing bounds them."""

# As the sources of the engines have it, written down once more (see request/answer_limits.py).
Engine = Callable[[str, Body], int]


def vllm(route: str, body: Body) -> int:
    if route == "responses":
        return body.get("max_output_tokens") or DEFAULT
    if route == "chat" and body.get("max_completion_tokens") is not None:
        return int(body["max_completion_tokens"])
    return int(body.get("max_tokens") or DEFAULT)


def sglang(route: str, body: Body) -> int:
    if route == "generate":
        return body.get("sampling_params", {}).get("max_new_tokens") or DEFAULT
    if route == "responses":
        return body.get("max_output_tokens") or DEFAULT
    if route == "chat":
        return int(body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT)
    return int(body.get("max_tokens") or DEFAULT)


def llamacpp(route: str, body: Body) -> int:
    most = body.get("max_tokens")
    if route == "responses":
        most = body.get("max_output_tokens", most)
    return int(body.get("n_predict", body.get("max_completion_tokens", most)) or DEFAULT)


def tgi(route: str, body: Body) -> int:
    if route == "generate":
        return body.get("parameters", {}).get("max_new_tokens") or DEFAULT
    return int(body.get("max_tokens") or DEFAULT)


def trtllm(route: str, body: Body) -> int:
    return vllm(route, body)


ENGINES: dict[str, Engine] = {
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "tgi": tgi,
    "trtllm": trtllm,
}
ROUTES = {
    "vllm": ("chat", "completions", "responses", "messages"),
    "sglang": ("chat", "completions", "responses", "messages", "generate"),
    "llamacpp": ("chat", "completions", "responses", "messages"),
    "tgi": ("chat", "completions", "generate"),
    "trtllm": ("chat", "completions", "responses"),
}


@contextmanager
def opened(folder: Path) -> Iterator[House]:
    house = House(asyncio.get_running_loop(), folder / "keys")
    try:
        yield house
    finally:
        house.close()


def limited(rng: random.Random, route: str) -> Body:
    """A body with some of all limits that there are, at the places where engines look and beside them."""
    body: Body = {"model": "m", "stream": True}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if route in ("chat", "messages") else {}
    body |= {"prompt": "hello"} if route == "completions" else {}
    body |= {"input": "hello"} if route == "responses" else {}
    body |= {"text": "hello", "inputs": "hello"} if route == "generate" else {}
    for name in rng.sample(sorted(LIMIT_NAMES - {"request_output_len", "max_new_tokens"}), rng.randrange(4)):
        body[name] = rng.choice([1, 17, 300, 650])
    if route == "generate" or rng.random() < 0.3:
        for holder in ("sampling_params", "parameters"):
            if rng.random() < 0.5:
                body[holder] = {rng.choice(["max_new_tokens", "other"]): rng.choice([1, 40, 500])}
    return dict(rng.sample(sorted(body.items()), len(body)))


def answer(rng: random.Random, route: str, tokens: int) -> list[bytes]:
    """A stream of so many tokens without a usage, each in an event of its own. Long ones look like several,
    but for what the limit says.
    """
    usual, long = [" abc", " the", "."], [" xyzw", " considerable"]
    words = [rng.choice(usual if tokens == DEFAULT else usual + long) for _ in range(tokens)]
    events: list[Body | str]
    if route == "generate":
        events = [*({"text_output": word} for word in words)]
    else:
        events = [said(route, word) for word in words]
    if route == "chat":
        events.insert(
            0,
            {
                "id": "c",
                "choices": [
                    {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                ],
            },
        )
    if route in ("chat", "completions"):
        delta: Body = {"delta": {}} if route == "chat" else {"text": ""}
        events += [{"id": "c", "choices": [{"index": 0, **delta, "finish_reason": "length"}]}, "[DONE]"]
    elif route == "messages":
        events.insert(0, {"type": "message_start", "message": {}})
        events += [
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}},
            {"type": "message_stop"},
        ]
    elif route == "responses":
        events += [{"type": "response.completed", "response": {}}]
    return [SSE_HEAD, *map(framed, events), LAST_CHUNK]


def become(house: House, engine: str) -> None:
    for state in house.plane.board:
        state.engine = engine


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_is_shown_is_billed_whatever_limits_a_body_names(engine: str, tmp_path: Path) -> None:
    with opened(tmp_path) as house:
        become(house, engine)
        for number in range(40):
            rng = random.Random(f"{engine} {number}")
            route = rng.choice(ROUTES[engine])
            body = limited(rng, route)
            tokens = ENGINES[engine](route, body)
            conn = house.visit(asked(route, body))
            for data in answer(rng, route, tokens):
                conn.data_received(data)
            bill = house.bills.pop()
            assert bill.is_estimated
            assert abs(bill.completion_tokens - tokens) <= tokens * 0.01, (number, route, body, tokens, bill)


def test_where_the_engine_is_not_known_the_largest_counts_of_all_that_one_of_them_reads() -> None:
    for route in ("chat", "completions", "messages", "responses", "generate"):
        for seed in range(100):
            body = limited(random.Random(seed), route)
            taken = [ENGINES[name](route, body) for name in ENGINES if route in ROUTES[name]]
            most = max((each for each in taken if each != DEFAULT), default=0)
            assert limits_of(body, route)[0] >= most, (route, body)


@pytest.mark.parametrize(
    ("more", "answers"),
    [
        ({"parameters": {"a": 1}, "n": 64}, 64),
        ({"n": "64"}, 64),
        ({"n": 2, "best_of": 3, "n_cmpl": 5}, 5),
        ({"sampling_params": [{"n": 2}, {"n": 4}]}, 4),
        ({"prompt": "a", "text": ["a"] * 9}, 9),
    ],
)
def test_no_field_hides_how_many_answers_there_are(more: Body, answers: int) -> None:
    ask = read_ask(orjson.dumps({"prompt": "a", **more}), "completions")
    assert isinstance(ask, Ask)
    assert ask.answers == answers


def test_each_rule_names_fields_that_are_known() -> None:
    assert {
        name for rules in RULES.values() for places in rules.values() for _, name in places
    } == LIMIT_NAMES


# A unit that tells what cannot be.


def estimators_of(house: House) -> TokenEstimators:
    door = house.gateway.key_check
    assert isinstance(door, KeyChecker)
    return door.estimators


def whole(usage: Body) -> bytes:
    body = orjson.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            ],
            "usage": usage,
        }
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def chat(model: str = "m", **more: Any) -> bytes:
    return asked("chat", {"model": model, "messages": [{"role": "user", "content": "x" * 400}], **more})


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_tokens": 999_999_999, "completion_tokens": 999_999_999 // 1000},
        {"prompt_tokens": 99_999_999, "completion_tokens": 1, "total_tokens": 1},
        {"prompt_tokens": 5, "completion_tokens": 99_999_999},
        {"prompt_tokens": 7000, "completion_tokens": -2000},
        {"prompt_tokens": -5000, "completion_tokens": 6000, "total_tokens": 1000},
    ],
)
async def test_a_unit_bills_no_more_than_its_request_could_cost_and_teaches_nothing_by_it(
    told: Body, tmp_path: Path
) -> None:
    with opened(tmp_path) as house:
        for _ in range(9):
            house.visit(chat(max_tokens=10)).data_received(whole(told))
            bill = house.bills.pop()
            assert 0 <= bill.completion_tokens <= 10
            assert 0 <= bill.prompt_tokens <= 20_000
        told_of = [event for event in house.plane.events.last() if event["kind"] == "impossible_usage"]
        assert len(told_of) <= len(house.plane.board.units), "once of each"
        for model in ("m", "n"):
            # What is charged first is what it was before.
            known = estimators_of(house).known.get(("k", "k", model), NOVICE)
            assert known.expect(100, 10) == (100, 10)


async def test_what_a_unit_tells_within_its_request_counts_for_this_model_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as house:
        house.visit(chat(max_tokens=10)).data_received(whole(named("chat", 16_000, 10)))
        known = estimators_of(house).known
        assert known["k", "k", "m"].expect(100, 10)[0] > 100
        assert ("k", "k", "n") not in known


async def test_lessons_are_forgotten_and_of_bounded_number() -> None:
    estimators = TokenEstimators()
    for number in range(ESTIMATES_KEPT + 10):
        estimators.make(("k", "t", str(number)))
    assert len(estimators.known) == ESTIMATES_KEPT
    assert FORGET_S < 3600


async def test_answers_that_are_doubted_and_shown_are_billed_as_told(tmp_path: Path) -> None:
    with opened(tmp_path) as house:
        body = orjson.dumps({"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 10}})
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        conn = house.visit(chat(max_tokens=10))
        while not house.bills:
            # Another unit is asked, and says the same.
            conn.data_received(head % len(body) + body)
            conn = house._asked[-1]
        bill = house.bills.pop()
        assert (bill.prompt_tokens, bill.completion_tokens) == (90, 10)
