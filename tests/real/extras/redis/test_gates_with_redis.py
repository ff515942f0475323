"""Two gates as processes before the same units, and what Redis may suffer while they work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path

import orjson
import pytest

from loadtests.simunit.process import SimUnit, sim_units
from tests.real.asking import asked_on, post
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually, metrics
from tests.wire.stage import PROCESSES_S, live_for

BODY = orjson.dumps(
    {"model": "sim", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}]}
)
CONVERSATIONS = 12


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[tuple[RedisServer, GateProcess, GateProcess]]:
    """A Redis, and two gates before the same four units that share what they know there."""
    with RedisServer(tmp_path) as server, sim_units(["a", "b", "c", "d"], step_ms=2) as units:
        urls = {unit.name: unit.url for unit in units}
        started = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            started.append(GateProcess(tmp_path / name, urls, redis=server.url, rules={"slow_start_s": 0}))
        with started[0] as one, started[1] as other:
            for gate in started:
                gate.until_up(*urls)
            assert eventually(lambda: _documents(server) == 2 * len(urls))
            yield server, one, other


@live_for(PROCESSES_S)
async def test_conversations_go_on_at_the_other_gate_and_a_redis_that_dies_or_freezes_fails_no_request(
    gates: tuple[RedisServer, GateProcess, GateProcess],
) -> None:
    server, one, other = gates
    for number in range(CONVERSATIONS):
        assert _cached_tokens(one, number, 1) == 0
    # There is a document while there is anything new to tell.
    heard = 'cellgate_redis_messages_total{kind="prefixes",way="received"}'
    assert eventually(lambda: _figure(other, heard) >= CONVERSATIONS)
    assert eventually(lambda: not server.do("KEYS", "cellgate:prefixes:*"))
    cached = [_cached_tokens(other, number, 3) for number in range(CONVERSATIONS)]
    # On the unit that holds it: by chance, 3 of 4 would have to be computed again.
    assert all(tokens > 500 for tokens in cached), cached

    async def says(words: str) -> None:
        assert await asyncio.to_thread(eventually, lambda: _last(one).startswith(words)), one.log

    async with (
        asked_on(one.port, rps=30.0, body=BODY) as statuses,
        asked_on(other.port, rps=30.0, body=BODY) as of_the_other,
    ):
        server.kill()
        await says("does not answer")
        server.start()
        await says("answers:")
        # Back empty.
        assert await asyncio.to_thread(eventually, lambda: _documents(server) == 8)
        server.freeze()
        await says("does not answer")
        server.thaw()
        await says("answers:")
    assert statuses.keys() == of_the_other.keys() == {200}, one.log


def _documents(server: RedisServer) -> int:
    """How many documents of units are there, of all gates."""
    return sum(int(server.do("HLEN", key)) for key in server.do("KEYS", "cellgate:units:*"))


def _last(gate: GateProcess) -> str:
    """What it has said of Redis last."""
    return [line for line in gate.log.splitlines() if " Redis " in line][-1].split(" Redis ")[1]


@live_for(PROCESSES_S)
async def test_redis_comes_late_is_full_has_room_again_and_what_it_says_of_a_unit_is_asked_about_at_once(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        unit = stack.enter_context(SimUnit.start("a", step_ms=10))
        server = RedisServer(tmp_path)
        gate = stack.enter_context(GateProcess(tmp_path, {"a": unit.url}, redis=server.url))
        gate.until_up("a")
        assert await post(gate.port, BODY) == 200
        assert eventually(lambda: "Redis does not answer (ConnectionError: " in gate.log)
        stack.enter_context(server)
        assert eventually(lambda: _documents(server) == 1)
        server.do("CONFIG", "SET", "maxmemory", "1")
        assert eventually(lambda: "Redis takes no writes" in gate.log)
        assert await post(gate.port, BODY) == 200
        server.do("CONFIG", "SET", "maxmemory", "0")
        # On a machine that lags it may have been away once more.
        assert eventually(lambda: gate.log.count("Redis answers") >= 2)

        # A flip is evidence: it sends a canary, and that decides.
        assert eventually(lambda: _documents(server))
        (key,) = server.do("KEYS", "cellgate:units:*")
        lie = {"gate": "liar", "verdict": "down", "reason": "I say so"}
        truth = orjson.loads(server.do("HGET", key, "a")) | {"gate": "liar"}
        said = cycle([truth | lie] * 100 + [truth] * 100)
        numbers = count(1)
        server.do("SADD", "cellgate:cell:c", "liar")

        def lie_until_believed() -> bool:
            """A gate that has lagged counts no evidence for a second, and has to hear it anew."""
            beat = {"v": 1, "gate": "liar", "beat": next(numbers), "units": {"a": next(said)}}
            server.do("SET", "cellgate:{beat}:liar", orjson.dumps(beat), "PX", 5000)
            return "up -> suspect: gate liar reports it as down: I say so" in gate.log

        assert eventually(lie_until_believed), gate.log
        assert eventually(lambda: "suspect -> up" in gate.log), gate.log
        gate.until_up("a")


def _cached_tokens(gate: GateProcess, number: int, messages: int) -> int:
    """Ask for so many messages of a conversation: how many tokens of them the unit had cached."""
    said = [{"role": "user", "content": f"{number} is what this is about. " * 120}]
    said += [{"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And then?"}]
    body = orjson.dumps({"model": "sim", "max_tokens": 2, "messages": said[:messages]})
    connection = gate.connect()
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        reply = orjson.loads(connection.getresponse().read())
    finally:
        connection.close()
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def _figure(gate: GateProcess, name: str) -> float:
    return next(float(line.split()[1]) for line in metrics(gate).splitlines() if line.startswith(f"{name} "))
