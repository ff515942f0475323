"""Tokens billed are those computed, whoever leaves when: generated requests to a gate without sockets."""

from __future__ import annotations

import asyncio
import os
import random
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from cellgate.proxy.admission.limits import UsageRecord
from cellgate.proxy.config.settings import KeySettings
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.unit import UnitConnection
from tests.cost.bench import Bench, Wire
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk

REQUESTS = int(os.environ.get("BILLED_REQUESTS", "400"))
KEY = "sk-k"
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}
LIMIT_NAMES = {"responses": "max_output_tokens"}


class Work(NamedTuple):
    """What an engine does for a request: reads, each with the tokens that are computed once it has come."""

    reads: list[tuple[bytes, int]]
    prompt: int
    told: int | None


class Line(Wire):
    """One that can be closed."""

    def abort(self) -> None:
        """Nobody is told."""

    close = pause_reading = abort


class House(Bench):
    """A gate with a key, and the bills of its ledger."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, file: Path, limits: dict[str, int] | None = None
    ) -> None:
        key = {"key": "k", "sha256": sha256(KEY.encode()).hexdigest(), "limits": limits or {}}
        file.write_bytes(orjson.dumps(key))
        super().__init__(loop, keys=KeySettings(str(file)))
        self.bills: list[UsageRecord] = []
        accounting = self.plane.accounting
        assert accounting is not None
        accounting.begin()
        accounting.ledger._record = lambda bill, _cost: self.bills.append(bill)

    def _connect(self, unit: str) -> None:
        pool = self.gateway.pool(self.gateway.board.units[unit])
        conn = UnitConnection(pool)
        conn.connection_made(Line(lambda: self._asked.append(conn)))
        pool.connections[conn] = 0
        pool.give_back(conn)

    def visit(self, request: bytes) -> UnitConnection | None:
        """A new client asks; the connection of the unit that got it, if any did."""
        for state in self.plane.board:
            if not self.gateway.pool(state).connections:
                self._connect(state.unit.name)
        self.client = ClientConnection(self.gateway)
        self.client.connection_made(Line())
        self._asked.clear()
        self.client.data_received(request)
        return self._asked[-1] if self._asked else None


def asked(route: str, body: dict[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = f"POST {PATHS[route]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def named(route: str, prompt: int, answer: int) -> dict[str, Any]:
    names = ("input", "output") if route in ("messages", "responses") else ("prompt", "completion")
    echo = {"total_tokens": prompt + answer}
    return {f"{names[0]}_tokens": prompt, f"{names[1]}_tokens": answer} | echo


def streamed(
    rng: random.Random, route: str, tokens: int, usage: dict[str, Any] | None
) -> list[tuple[bytes, int]]:
    """Events, and how many tokens are computed by then."""
    at_once = rng.choice([1, 1, 4, 8])
    out: list[tuple[dict[str, Any] | str, int]] = []
    if route == "messages":
        begun = {"input_tokens": usage["input_tokens"], "output_tokens": 0} if usage else {}
        out.append(({"type": "message_start", "message": {"usage": begun}}, 0))
    for done in range(0, tokens, at_once):
        count = min(at_once, tokens - done)
        text = "".join(rng.choice([" abc", " the", " xyzw"]) for _ in range(count))
        part: dict[str, Any]
        if route == "messages":
            delta = {"type": "text_delta", "text": text}
            part = {"type": "content_block_delta", "index": 0, "delta": delta}
        elif route == "responses":
            part = {"type": "response.output_text.delta", "output_index": 0, "delta": text}
        else:
            said = {"text": text} if route == "completions" else {"delta": {"content": text}}
            part = {"id": "c", "choices": [{"index": 0, **said, "finish_reason": None}]}
        out.append((part, done + count))
    if route == "messages":
        out.append(({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}, tokens))
        out.append(({"type": "message_stop"}, tokens))
    elif route == "responses":
        out.append(({"type": "response.completed", "response": {"user": "usage", "usage": usage}}, tokens))
    else:
        out.append(({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, tokens))
        if usage is not None:
            out.append(({"id": "c", "choices": [], "usage": usage}, tokens))
        out.append(("[DONE]", tokens))
    reads = [(SSE_HEAD, 0)]
    for data, computed in out:
        name = f"event: {data['type']}\n" if isinstance(data, dict) and "type" in data else ""
        body = data if isinstance(data, str) else orjson.dumps(data).decode()
        reads.append((chunk(f"{name}data: {body}\n\n".encode()), computed))
    return [*reads, (LAST_CHUNK, tokens)]


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


def work(rng: random.Random, route: str, most: int, *, stream: bool) -> Work:
    tokens = 0 if route == "embeddings" else rng.randrange(1 + most // 2, most + 1)
    prompt = rng.randrange(1, 500)
    usage = named(route, prompt, tokens) if rng.random() < 0.7 else None
    make = streamed if stream else plain
    return Work(make(rng, route, tokens, usage), prompt, tokens if usage else None)


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
    found = work(rng, route, (limit or 2000) * n, stream=stream)
    conn = house.visit(asked(route, body))
    assert conn is not None
    if rng.random() < 0.2:
        house._asked.clear()
        conn.data_received(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n")
        if not house._asked:
            # There is no other unit now: its client gets the error.
            assert house.bills.pop().completion_tokens == 0
            return
        conn = house._asked[-1]
    leaves = rng.random() < 0.4
    left = rng.randrange(1, len(found.reads)) if leaves else len(found.reads)
    for data, _ in found.reads[:left]:
        if data:
            conn.data_received(data)
    computed = found.reads[left - 1][1]
    if leaves:
        house.client.connection_lost(None)
    (bill,) = house.bills
    house.bills.clear()
    if not leaves and found.told is not None:
        assert (bill.prompt_tokens, bill.completion_tokens) == (found.prompt, found.told)
        assert not bill.is_estimated
    elif bill.is_estimated:
        assert bill.completion_tokens >= computed / 2, (bill, computed)
    else:
        assert (bill.prompt_tokens, bill.completion_tokens) == (found.prompt, found.told)


@pytest.mark.parametrize("seed", range(REQUESTS // 100))
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
