"""Two gates as processes before the same units, and what Redis may suffer while they work."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import orjson

from loadtests.simunit.process import SimUnit
from tests.real.asking import post, steadily
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually, metrics
from tests.wire.stage import PROCESSES_S, live_for

BODY = orjson.dumps(
    {"model": "sim", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}]}
)
CONVERSATIONS = 12


@live_for(PROCESSES_S)
async def test_redis_killed_back_empty_and_frozen_fails_no_request(tmp_path: Path) -> None:
    with ExitStack() as stack:
        units = [stack.enter_context(SimUnit.start(name, step_ms=10)) for name in ("a", "b")]
        urls = {unit.name: f"http://127.0.0.1:{unit.port}" for unit in units}
        server = stack.enter_context(RedisServer(tmp_path))
        gates = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            gates.append(stack.enter_context(GateProcess(tmp_path / name, urls, redis=server.url)))
        one = gates[0]
        for gate in gates:
            gate.until_up("a", "b")
        assert eventually(lambda: len(server.do("SMEMBERS", "cellgate:cell:c")) == 4)
        asking = [
            asyncio.create_task(steadily(gate.port, rps=30.0, seconds=9.0, body=BODY)) for gate in gates
        ]
        await asyncio.sleep(1.0)
        server.kill()
        await asyncio.sleep(2.0)
        server.start()
        await asyncio.sleep(1.0)
        assert len(server.do("SMEMBERS", "cellgate:cell:c")) == 4
        server.freeze()
        await asyncio.sleep(2.5)
        server.thaw()
        statuses = Counter([status for task in asking for status in await task])
        lines = [line for line in one.log.splitlines() if "Redis" in line]
    assert statuses == {200: 540}
    assert [line.split(" Redis ")[1].split()[0] for line in lines] == [
        "answers:",
        "does",
        "answers:",
        "does",
        "answers:",
    ]


@live_for(PROCESSES_S)
async def test_a_redis_that_is_absent_at_start_comes_is_full_and_has_room_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        unit = stack.enter_context(SimUnit.start("a", step_ms=10))
        server = RedisServer(tmp_path)
        gate = GateProcess(tmp_path, {"a": f"http://127.0.0.1:{unit.port}"}, redis=server.url)
        stack.enter_context(gate)
        gate.until_up("a")
        assert await post(gate.port, BODY) == 200
        stack.enter_context(server)
        assert eventually(lambda: len(server.do("KEYS", "cellgate:unit:a:*")) == 1)
        server.do("CONFIG", "SET", "maxmemory", "1")
        assert eventually(lambda: "Redis takes no writes" in gate.log)
        assert await post(gate.port, BODY) == 200
        server.do("CONFIG", "SET", "maxmemory", "0")
        assert eventually(lambda: gate.log.count("Redis answers") == 2)
        lines = [line for line in gate.log.splitlines() if "Redis" in line]
    assert len(lines) == 4
    assert "Redis does not answer (ConnectionError: " in lines[0]


@live_for(PROCESSES_S)
async def test_what_one_gate_has_seen_the_other_asks_about_at_once(tmp_path: Path) -> None:
    """A flip is evidence: it sends a canary, and that decides."""
    with ExitStack() as stack:
        unit = stack.enter_context(SimUnit.start("a", step_ms=10))
        server = stack.enter_context(RedisServer(tmp_path))
        gate = stack.enter_context(
            GateProcess(tmp_path, {"a": f"http://127.0.0.1:{unit.port}"}, redis=server.url)
        )
        gate.until_up("a")
        assert eventually(lambda: server.do("KEYS", "cellgate:unit:a:*"))
        (key,) = server.do("KEYS", "cellgate:unit:a:*")
        document = orjson.loads(server.do("GET", key)) | {
            "gate": "liar",
            "verdict": "down",
            "reason": "I say so",
        }
        server.do("SADD", "cellgate:cell:c", "a:liar")

        def lie_until_believed() -> bool:
            """A gate that has lagged counts no evidence against units for a second."""
            beat = orjson.dumps({"v": 1, "gate": "liar", "beat": 1, "units": {}})
            server.do("SET", "cellgate:beat:liar", beat, "PX", 5000)
            server.do("SET", "cellgate:unit:a:liar", orjson.dumps(document), "PX", 5000)
            return "up -> suspect: gate liar reports it as down: I say so" in gate.log

        assert eventually(lie_until_believed), gate.log
        assert eventually(lambda: "suspect -> up" in gate.log), gate.log
        gate.until_up("a")


@live_for(PROCESSES_S)
async def test_a_conversation_goes_on_at_the_other_gate_on_the_unit_that_holds_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        units = [stack.enter_context(SimUnit.start(name, step_ms=2)) for name in ("a", "b", "c", "d")]
        urls = {unit.name: f"http://127.0.0.1:{unit.port}" for unit in units}
        server = stack.enter_context(RedisServer(tmp_path))
        gates = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            gate = GateProcess(tmp_path / name, urls, redis=server.url, rules={"slow_start_s": 0})
            gates.append(stack.enter_context(gate))
        for gate in gates:
            gate.until_up(*urls)
        assert eventually(lambda: len(server.do("SMEMBERS", "cellgate:cell:c")) == 2 * len(urls))
        one, other = gates
        for number in range(CONVERSATIONS):
            assert _cached_tokens(one, number, 1) == 0
        # There is a document while there is anything new to tell.
        heard = 'cellgate_redis_messages_total{kind="prefixes",way="received"}'
        assert eventually(lambda: _figure(other, heard) >= CONVERSATIONS)
        assert eventually(lambda: not server.do("KEYS", "cellgate:prefixes:*"))
        cached = [_cached_tokens(other, number, 3) for number in range(CONVERSATIONS)]
    # By chance, 3 of 4 would have to be computed again.
    assert all(tokens > 500 for tokens in cached), cached


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
