"""Limits of keys: the key in a head, the ledger's charges, meters that share a counter, tokens billed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from cellgate.proxy.admission.keys import take_credentials
from cellgate.proxy.admission.limits import (
    ACCOUNTS_A_TICK,
    GIVEN_BACK_S,
    KeyCounts,
    LimitLedger,
    Meter,
    Period,
    UsageRecord,
)
from cellgate.proxy.admission.token_estimator import TokenEstimator
from cellgate.proxy.config.key_file import (
    FORGOTTEN_AT_ONCE,
    LINES_AT_ONCE,
    Key,
    KeyRing,
    LimitRules,
    TenantRules,
    TokenPrice,
    keys_in,
)
from cellgate.proxy.config.settings import KeySettings
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import KEY_FIELDS, Fields
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.unit import UnitConnection
from cellgate.proxy.request.answer_limits import ANSWER_TOKENS_MAX
from cellgate.router.nouns import Ask
from tests.cost.bench import Bench, Wire
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk

AT = 1_751_328_000.0
ASK = Ask(model="m", tenant="t")


NO_LIMITS = LimitRules()


def ring(key: LimitRules = NO_LIMITS, tenant: LimitRules = NO_LIMITS, **prices: TokenPrice) -> KeyRing:
    """A key `k` of a tenant `t`."""
    rules = TenantRules("t", limits=tenant)
    return KeyRing({b"": Key("k", rules, limits=key)}, {"t": rules}, prices)


class Desk:
    """A ledger whose clock stands still, and what it has recorded."""

    def __init__(self, keys: KeyRing) -> None:
        self.now = AT
        self.bills: list[tuple[UsageRecord, float]] = []
        counts = KeyCounts(lambda: frozenset({"m"}))
        self.ledger = LimitLedger(lambda: self.now, counts, lambda *bill: self.bills.append(bill))
        self.ledger.take(keys)

    def admit(self, prompt: int = 0, completion: int = 0) -> bytes | Failure:
        """Charge a request."""
        return self.ledger.admit(("k", prompt, completion, self.now), ASK)

    def kind(self, **tokens: int) -> FailureKind | None:
        """Why a request is refused."""
        found = self.admit(**tokens)
        return found.kind if isinstance(found, Failure) else None

    def settle(self, charged: tuple[int, int], used: tuple[int, int], at: float = AT) -> None:
        """End one."""
        self.ledger.settle(UsageRecord("r", "k", "t", "m", "m", "chat", 200, at, *charged, *used, False))


def test_what_was_charged_too_much_comes_back_within_its_minute_and_what_was_too_little_is_taken() -> None:
    desk = Desk(ring(tenant=LimitRules(tokens_per_minute=100)))
    assert desk.kind(prompt=40, completion=60) is None
    assert desk.kind(prompt=1) is FailureKind.LIMITED
    desk.settle((40, 60), (40, 10))
    assert desk.kind(prompt=50) is None
    desk.settle((50, 0), (50, 30))
    assert desk.kind(prompt=1) is FailureKind.LIMITED
    desk.now += 60.0
    assert desk.kind(prompt=100) is None
    desk.settle((100, 0), (10, 0), at=AT)
    assert desk.kind(prompt=1) is FailureKind.LIMITED, "the next minute is not larger"


def test_limits_of_key_and_tenant_both_hold_and_a_refused_request_costs_neither() -> None:
    desk = Desk(ring(LimitRules(requests_per_minute=1), LimitRules(requests_per_minute=2)))
    assert [desk.kind() for _ in range(3)] == [None, FailureKind.LIMITED, FailureKind.LIMITED]
    desk.ledger.take(ring(LimitRules(requests_per_minute=5), LimitRules(requests_per_minute=2)))
    assert [desk.kind() for _ in range(2)] == [None, FailureKind.LIMITED]


def test_limits_that_change_keep_what_was_used_and_tokens_are_charged_as_they_come() -> None:
    desk = Desk(ring(LimitRules(tokens_per_minute=100)))
    desk.admit(prompt=10)
    desk.ledger.spent("k", "t", "m", 70)
    desk.ledger.take(ring(LimitRules(tokens_per_minute=90)))
    assert desk.kind(prompt=11) is FailureKind.LIMITED
    assert desk.kind(prompt=10) is None
    desk.ledger.take(ring())
    assert desk.kind(prompt=10**9) is None


def test_a_reload_of_many_keys_takes_no_turn_of_its_own_and_all_get_their_limits_in_some_ticks() -> None:
    """A hundred thousand keys in use, and a file that changes them, cost the loop a few slices."""
    keys = {b"%d" % n: Key(f"k{n}", TenantRules("t"), limits=LimitRules(in_flight=1)) for n in range(1000)}
    desk = Desk(KeyRing(keys))
    for key in keys.values():
        desk.ledger.admit((key.name, 0, 0, AT), ASK)
    fewer = {digest: replace(key, limits=LimitRules(in_flight=2)) for digest, key in list(keys.items())[1:]}
    new = Counted(KeyRing(fewer).limits)
    desk.ledger.take(cast("KeyRing", SimpleNamespace(prices={}, limits=new)))
    assert new.looked == 0
    assert isinstance(desk.ledger.admit(("k1", 0, 0, AT), ASK), bytes)
    new.looked = 0
    desk.ledger.tick()
    assert new.looked <= 2 * ACCOUNTS_A_TICK
    for _ in range(1 + 1000 // ACCOUNTS_A_TICK):
        desk.ledger.tick()
    assert len(desk.ledger._accounts) == 999
    assert not desk.ledger._stale
    assert not desk.ledger._old_plans
    assert isinstance(desk.ledger.admit(("k2", 0, 0, AT), ASK), bytes)
    assert isinstance(desk.ledger.admit(("k2", 0, 0, AT), ASK), Failure)


def test_a_large_file_of_keys_is_read_and_let_go_with_rests_for_the_streams() -> None:
    lines = [b'{"key":"k%d","sha256":"%064x","tenant":"t"}' % (n, n) for n in range(4096)]
    rests = list[None]()
    keys = keys_in("keys", b"\r\n".join(lines), lambda: rests.append(None))
    assert len(keys.keys) == 4096
    assert len(rests) >= 2 * len(lines) // LINES_AT_ONCE
    rests.clear()
    keys.forget(lambda: rests.append(None))
    assert (dict(keys.keys), dict(keys.limits)) == ({}, {})
    assert len(rests) >= len(lines) // FORGOTTEN_AT_ONCE


class Counted(dict[str, LimitRules]):
    """Limits that count how often somebody has looked; all at once is a mistake."""

    looked = 0

    def __getitem__(self, title: str) -> LimitRules:
        self.looked += 1
        return super().__getitem__(title)

    def __contains__(self, title: object) -> bool:
        self.looked += 1
        return super().__contains__(title)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all of them at once")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_money_is_reckoned_by_the_price_of_the_model_and_a_fallback_costs_what_it_costs() -> None:
    desk = Desk(ring(LimitRules(cost_per_day=0.001), m=TokenPrice(prompt=2.0, completion=4.0)))
    assert desk.kind(prompt=300, completion=100) is None
    assert desk.kind(prompt=1) is FailureKind.OVER_BUDGET
    desk.settle((300, 100), (100, 50))
    assert desk.bills[0][1] == pytest.approx(0.0004)
    assert desk.kind(prompt=300) is None
    big, small = TokenPrice(10.0, 10.0), TokenPrice(1.0, 1.0)
    desk = Desk(ring(tenant=LimitRules(cost_per_day=1.0), big=big, m=small))
    desk.ledger.admit(("k", 40_000, 10_000, desk.now), ASK._replace(model="big"))
    bill = UsageRecord("r", "k", "t", "m", "big", "chat", 200, AT, 40_000, 10_000, 40_000, 10_000, False)
    desk.ledger.settle(bill)
    # 0.05 is spent: 900,000 tokens of the cheap model cost 0.9, 960,000 would be too much.
    assert desk.kind(prompt=960_000) is FailureKind.OVER_BUDGET
    assert desk.kind(prompt=900_000) is None


def test_a_request_that_may_use_more_than_is_left_is_admitted_alone() -> None:
    desk = Desk(ring(tenant=LimitRules(tokens_per_minute=100)))
    assert desk.kind(prompt=10, completion=5000) is None, "a large max_tokens is no reason to refuse"
    found = desk.admit(prompt=1, completion=1)
    assert isinstance(found, Failure)
    assert (found.kind, found.retry_after_s) == (FailureKind.LIMITED, GIVEN_BACK_S)
    desk.settle((10, 5000), (10, 20))
    assert desk.kind(prompt=10, completion=5000) is None, "what was not used is given back"
    desk.settle((10, 5000), (10, 60))
    assert desk.kind(prompt=1) is FailureKind.LIMITED
    desk.now += 60.0
    assert desk.kind(prompt=101, completion=1) is FailureKind.OVER_BUDGET


def test_short_answers_do_not_teach_that_hundreds_of_long_ones_fit() -> None:
    desk, habits = Desk(ring(tenant=LimitRules(tokens_per_minute=20_000))), TokenEstimator()
    for _ in range(60):
        prompt, completion = habits.expect(5, 1)
        assert desk.kind(prompt=prompt, completion=completion) is None
        habits.learn(5, 5, 1)
        desk.settle((prompt, completion), (5, 1))
    for limit in (0, 2000):
        prompt, completion = habits.expect(5, limit)
        passed = sum(desk.kind(prompt=prompt, completion=completion) is None for _ in range(200))
        assert passed == 10
        for _ in range(passed):
            desk.settle((prompt, completion), (5, 0))


def test_requests_in_flight_are_released_once_each_and_the_limit_with_the_least_left_is_told() -> None:
    desk = Desk(ring(LimitRules(in_flight=1)))
    assert [desk.kind(), desk.kind()] == [None, FailureKind.LIMITED]
    desk.settle((0, 0), (0, 0))
    assert desk.kind() is None
    desk.ledger.abandon("k", "t")
    desk.ledger.abandon("k", "t")
    assert [desk.kind(), desk.kind()] == [None, FailureKind.LIMITED]
    lines = Desk(ring(LimitRules(tokens_per_minute=1000), LimitRules(tokens_per_minute=500))).admit(
        prompt=100
    )
    assert isinstance(lines, bytes)
    assert lines.split(b"\r\n")[:3] == [
        b"x-ratelimit-limit-tokens: 500",
        b"x-ratelimit-remaining-tokens: 400",
        b"x-ratelimit-reset-tokens: 61s",
    ]


def test_short_prompts_with_a_long_template_say_nothing_of_long_ones() -> None:
    habits = TokenEstimator()
    for _ in range(60):
        habits.learn(1, 40, 5)
    assert habits.expect(1, 0)[0] == 40
    assert 10_000 < habits.expect(10_000, 0)[0] < 10_200
    for _ in range(60):
        habits.learn(10_000, 15_000, 5)
    assert habits.expect(10_000, 0)[0] == pytest.approx(15_000, rel=0.05)
    habits.learn(5, 5, 9000)
    assert habits.expect(5, 0)[1] == 9000, "without a limit as long as the longest lately"
    assert habits.expect(5, 100, 40)[1] == 4000
    assert habits.expect(5, 10**9)[1] == ANSWER_TOKENS_MAX


def test_models_that_no_configuration_names_share_a_label() -> None:
    counts = KeyCounts(lambda: frozenset({"m"}))
    usual = UsageRecord("r", "k", "t", "m", "m", "chat", 200, AT, 0, 0, 1, 2, False)
    for model in ("m", "adapter-1", "adapter-2"):
        counts.used(usual._replace(model=model))
    rows = {
        sample.labels["model"]: sample.value
        for family in counts.collect()
        if family.name == "cellgate_tenant_tokens"
        for sample in family.samples
        if sample.labels["kind"] == "completion"
    }
    assert rows == {"m": 2, "": 4}


# Meters: alone, and several that share a counter.

NEW_YEARS_EVE = datetime(2026, 12, 31, 23, 59, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(("period", "length_s"), [("minute", 60), ("day", 86_400), ("month", 31 * 86_400)])
def test_windows_are_those_of_the_clock(period: str, length_s: int) -> None:
    begins_at, ends_at = Period(period).window(NEW_YEARS_EVE)
    assert ends_at == NEW_YEARS_EVE + 30
    assert ends_at - begins_at == length_s
    assert Period(period).window(ends_at)[0] == ends_at


def test_alone_it_takes_what_there_is_and_no_more_and_another_limit_holds_at_once() -> None:
    meter = Meter(100, Period.MINUTE, NEW_YEARS_EVE)
    meter.spent += 60
    assert (meter.has_room(40), meter.has_room(41), meter.left) == (True, False, 40)
    meter.change(50)
    assert not meter.has_room(1)
    meter.change(80)
    assert (meter.has_room(20), meter.has_room(21)) == (True, False)
    meter.spent -= 10
    assert meter.left == 30
    meter.roll(meter.ends_at, 0)
    assert meter.left == 80


class Shares:
    """What each gate has taken, as Redis has it; an answer may be lost, and Redis may forget."""

    def __init__(self) -> None:
        self.taken: dict[Meter, int] = {}

    def take(self, meter: Meter, gates: int, *, is_lost: bool = False) -> None:
        """One exchange."""
        amount = meter.to_take(gates)
        self.taken[meter] = meter.taken + amount
        if not is_lost:
            meter.took(amount, sum(self.taken.values()))


@pytest.mark.parametrize("lost", [0.0, 0.3], ids=["all answers arrive", "a third is lost"])
@pytest.mark.parametrize("busy", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_gates_that_share_pass_the_limit_within_a_few_requests(seed: int, busy: int, lost: float) -> None:
    """Each busy gate wants more than all of it; each exchange is late by as much as chance has it."""
    rng, gates, limit, request, shares = random.Random(seed), 3, 10_000, 50, Shares()
    meters = [Meter(limit, Period.MINUTE, NEW_YEARS_EVE, gates) for _ in range(gates)]
    assert meters[0].has_room(limit * 9 // 10), "more than a slice passes where it is free"
    for _ in range(3000):
        meter = rng.choice(meters[:busy])
        if meter.has_room(request):
            meter.spent += request
        if rng.random() < 0.05:
            for each in [meter] if busy > 1 else meters:
                shares.take(each, gates, is_lost=rng.random() < lost)
    assert 0.98 * limit <= sum(meter.spent for meter in meters) <= limit + busy * request


def test_a_request_that_finds_too_little_has_the_counter_looked_at_soon() -> None:
    meter = Meter(10_000, Period.MINUTE, NEW_YEARS_EVE, 3)
    meter.took(amount := meter.to_take(3), amount)
    meter.spent = meter.held - 1
    assert [meter.is_low, meter.has_room(50), meter.is_low] == [False, False, True]
    meter.took(more := meter.to_take(3), amount + more)
    assert [meter.has_room(50), meter.is_low] == [True, False]


class FailingShares:
    """As Shares, but answers come later, and the server's replica may lack the last writes when it fails."""

    def __init__(self, rng: random.Random, meters: list[Meter]) -> None:
        self._rng, self._meters = rng, meters
        self._primary: dict[Meter, int] = {}
        self._replica: dict[Meter, int] = {}
        self._coming: dict[Meter, tuple[int, int]] = {}

    def step(self) -> None:
        """One gate writes, or gets its answer."""
        meter = self._rng.choice(self._meters)
        if (answer := self._coming.pop(meter, None)) is not None:
            meter.took(*answer)
            return
        amount = meter.to_take(len(self._meters))
        self._primary[meter] = meter.taken + amount
        self._coming[meter] = amount, sum(self._primary.values())
        if self._rng.random() < 0.5:
            self._replica = dict(self._primary)

    def fail_over(self) -> None:
        """Between writes and their answers, which are lost."""
        self._primary = dict(self._replica)
        for meter in self._coming:
            meter.stand_alone()
        self._coming.clear()

    def roll(self) -> None:
        """The window ends: the next one has counters of its own."""
        for meter in self._meters:
            meter.roll(meter.ends_at, len(self._meters))
        self._primary, self._replica = {}, {}
        self._coming.clear()


@pytest.mark.parametrize("seed", range(12))
def test_after_a_fail_over_in_a_burst_the_next_window_passes_no_request_more(seed: int) -> None:
    rng, gates, limit = random.Random(seed), 3, 120
    meters = [Meter(limit, Period.MINUTE, NEW_YEARS_EVE, gates) for _ in range(gates)]
    shares = FailingShares(rng, meters)
    passed = []
    for window in range(3):
        for turn in range(2000):
            if (window, turn) == (0, 100):
                shares.fail_over()
            meter = rng.choice(meters)
            if meter.has_room(1):
                meter.spent += 1
            if rng.random() < 0.3:
                shares.step()
        passed.append(sum(meter.spent for meter in meters))
        shares.roll()
    assert passed[0] <= gates * limit
    assert all(0.98 * limit <= each <= limit for each in passed[1:]), passed


def test_without_the_counter_each_has_the_whole_limit_and_afterwards_owes_what_it_used() -> None:
    meter, other = (Meter(1000, Period.MINUTE, NEW_YEARS_EVE, 2) for _ in range(2))
    shares = Shares()
    for each in (meter, other):
        shares.take(each, 2)
    meter.stand_alone()
    meter.spent += 1000
    assert not meter.has_room(1)
    for each in (meter, other):
        shares.take(each, 2)
    assert sum(shares.taken.values()) >= 1000
    assert other.left == 0


def test_a_counter_that_has_forgotten_is_told_again() -> None:
    meter, shares = Meter(1000, Period.MINUTE, NEW_YEARS_EVE, 2), Shares()
    meter.spent += 400
    shares.take(meter, 2)
    shares.taken.clear()
    shares.take(meter, 2)
    assert shares.taken[meter] >= 400


# Tokens billed are those computed, whoever leaves when: generated requests to a gate without sockets.

KEY = "sk-k"
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}
ALL_PATHS = PATHS | {"generate": "/generate"}
LIMIT_NAMES = {"responses": "max_output_tokens"}


class House(Bench):
    """A gate with a key, and the bills of its ledger."""

    def __init__(self, loop: asyncio.AbstractEventLoop, file: Path) -> None:
        file.write_bytes(orjson.dumps({"key": "k", "sha256": sha256(KEY.encode()).hexdigest()}))
        super().__init__(loop, keys=KeySettings(str(file)))
        self.bills: list[UsageRecord] = []
        accounting = self.plane.accounting
        assert accounting is not None
        accounting.begin()
        accounting.ledger._record = lambda bill, _cost: self.bills.append(bill)

    def visit(self, request: bytes) -> UnitConnection:
        """A new client asks; the connection of the unit that got it."""
        for state in self.plane.board:
            if not self.gateway.services.pool(state).connections:
                self._connect(state.unit.name)
        self.client = ClientConnection(self.gateway)
        self.client.connection_made(Wire())
        self._asked.clear()
        self.client.data_received(request)
        return self._asked[-1]


def asked(route: str, body: dict[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = f"POST {ALL_PATHS[route]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def named(route: str, prompt: int, answer: int) -> dict[str, Any]:
    names = ("input", "output") if route in ("messages", "responses") else ("prompt", "completion")
    echo = {"total_tokens": prompt + answer}
    return {f"{names[0]}_tokens": prompt, f"{names[1]}_tokens": answer} | echo


def streamed(
    rng: random.Random, route: str, tokens: int, usage: dict[str, Any] | None
) -> list[tuple[bytes, int]]:
    """Events, and how many tokens are computed by then."""
    at_once, out = rng.choice([1, 1, 4, 8]), list[tuple[dict[str, Any] | str, int]]()
    if route == "messages":
        begun = {"input_tokens": usage["input_tokens"], "output_tokens": 0} if usage else {}
        out.append(({"type": "message_start", "message": {"usage": begun}}, 0))
    for done in range(0, tokens, at_once):
        count = min(at_once, tokens - done)
        text = "".join(rng.choice([" abc", " the", " xyzw"]) for _ in range(count))
        out.append((said(route, text), done + count))
    last: list[dict[str, Any] | str]
    if route == "messages":
        delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
        last = [delta, {"type": "message_stop"}]
    elif route == "responses":
        last = [{"type": "response.completed", "response": {"user": "usage", "usage": usage}}]
    else:
        told = [{"id": "c", "choices": [], "usage": usage}] if usage else []
        last = [{"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, *told, "[DONE]"]
    reads = [(SSE_HEAD, 0)]
    reads += [(framed(data), computed) for data, computed in [*out, *((each, tokens) for each in last)]]
    return [*reads, (LAST_CHUNK, tokens)]


def framed(event: dict[str, Any] | str) -> bytes:
    name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
    data = event if isinstance(event, str) else orjson.dumps(event).decode()
    return chunk(f"{name}data: {data}\n\n".encode())


def said(route: str, text: str) -> dict[str, Any]:
    """An event that says this."""
    if route == "messages":
        delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": 0, "delta": delta}
    if route == "responses":
        return {"type": "response.output_text.delta", "output_index": 0, "delta": text}
    said = {"text": text} if route == "completions" else {"delta": {"content": text}}
    return {"id": "c", "choices": [{"index": 0, **said, "finish_reason": None}]}


def plain(
    rng: random.Random, route: str, tokens: int, usage: dict[str, Any] | None
) -> list[tuple[bytes, int]]:
    text = " ".join(rng.choice(["abc", "the", "xyz"]) for _ in range(tokens))
    answer: dict[str, Any] = {"user": "usage", "text": text, "usage": usage, "metadata": {"usage": {}}}
    if route == "embeddings":
        answer["data"] = [{"index": 0, "embedding": [0.5]}]
    body = orjson.dumps(answer)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    size = rng.choice([1448, 65536, len(body) + len(head)])
    data = head + body
    # All is computed before the first byte comes.
    return [(b"", tokens), *((data[at : at + size], tokens) for at in range(0, len(data), size))]


def one(rng: random.Random, house: House) -> None:
    """One request, and whether its bill is right."""
    route = rng.choice(list(PATHS))
    stream = route != "embeddings" and rng.random() < 0.5
    n, limit = rng.choice([1, 1, 3]), rng.choice([None, 16, 300, 9000])
    n = n if route in ("chat", "completions") else 1
    body: dict[str, Any] = {"model": "m", "stream": stream, "input": "x" * 400}
    if route in ("chat", "messages"):
        body["messages"] = [{"role": "user", "content": "x" * 400}]
    if route == "completions":
        body["prompt"] = rng.choice(["x" * 400, ["x" * 400], [1, 2, 3]])
    body |= {"n": n} if n > 1 else {}
    body |= {LIMIT_NAMES.get(route, "max_tokens"): limit} if limit else {}
    most = (limit or 2000) * n
    tokens = 0 if route == "embeddings" else rng.randrange(1 + most // 2, most + 1)
    prompt = rng.randrange(1, 500)
    usage = named(route, prompt, tokens) if rng.random() < 0.7 else None
    reads = (streamed if stream else plain)(rng, route, tokens, usage)
    conn = house.visit(asked(route, body))
    if rng.random() < 0.2:
        house._asked.clear()
        conn.data_received(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n")
        if not house._asked:
            # There is no other unit now: its client gets the error.
            assert house.bills.pop().completion_tokens == 0
            return
        conn = house._asked[-1]
    leaves = rng.random() < 0.4
    left = rng.randrange(1, len(reads)) if leaves else len(reads)
    for data in [data for data, _ in reads[:left] if data]:
        conn.data_received(data)
    if leaves:
        house.client.connection_lost(None)
    bill = house.bills.pop()
    if bill.is_estimated:
        assert leaves or usage is None
        assert bill.completion_tokens >= reads[left - 1][1] / 2, (bill, reads[left - 1])
    else:
        assert usage is not None
        assert (bill.prompt_tokens, bill.completion_tokens) == (prompt, tokens)


@pytest.mark.parametrize("seed", range(2))
async def test_tokens_billed_are_those_computed(seed: int, tmp_path: Path) -> None:
    for number in range(100):
        if number % 10 == 0:
            house = House(asyncio.get_running_loop(), tmp_path / "keys")
        rng = random.Random(seed * 100 + number)
        try:
            one(rng, house)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, request {number}: {error}") from error
        if number % 10 == 9:
            house.close()


# The key in a head.

SESSION = (b"x-session-id", b"s")


def request(*fields: tuple[bytes, bytes]) -> Request:
    """A request as it was read."""
    made = Request(0.0, [], [], [])
    made.routing = [field for field in fields if field[0] in KEY_FIELDS or field == SESSION]
    made.lines = [b"%b: %b\r\n" % field for field in fields]
    return made


@pytest.mark.parametrize(
    ("shown", "key"),
    [
        ([(b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"bearer  k ")], b"k"),
        ([(b"x-api-key", b"k")], b"k"),
        ([(b"x-api-key", b"k"), (b"authorization", b"Bearer k"), (b"api-key", b"k")], b"k"),
        ([(b"x-api-key", b"k"), (b"authorization", b"Bearer other")], b""),
        ([(b"authorization", b"Basic k")], b""),
        ([(b"authorization", b"")], b""),
        ([], b""),
    ],
)
def test_it_is_taken_out_whatever_it_is(shown: Fields, key: bytes) -> None:
    for more in ([], [SESSION]):
        read = request((b"accept", b"*/*"), *shown, *more)
        assert take_credentials(read) == key
        assert read.lines == request((b"accept", b"*/*"), *more).lines
        assert read.routing == more
    alone = request((b"authorization", b"Bearer k"))
    alone.lines.clear()
    assert take_credentials(alone) == b"", "a key that is for this connection alone is none"
