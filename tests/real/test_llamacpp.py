"""The gate before two real llama.cpp servers: what it learns of them, and what it does when one breaks."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.real.asking import until
from tests.real.llamacpp import MODEL, SLOTS, LlamaServer, Stream, chat, read_all
from tests.wire.process import GateProcess, metrics
from tests.wire.stage import PROCESSES_S, live_for

pytestmark = pytest.mark.nightly

TOKENS = 1000
Servers = dict[str, LlamaServer]


def until_verdict(gate: GateProcess, verdict: str) -> asyncio.Task[None]:
    """Wait until the gate believes this of `a`."""
    return asyncio.create_task(until(lambda: gate.units()["a"]["verdict"] == verdict))


def attempts(gate: GateProcess, name: str) -> float:
    """So many requests were tried on this unit."""
    lines = [line for line in metrics(gate).splitlines() if line.startswith("cellgate_attempts_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if f'unit="{name}"' in line)


async def answering(gate: GateProcess, servers: Servers) -> set[str]:
    """Ask for as much as both servers answer at once; the names of those that have answered."""
    before = {name: attempts(gate, name) for name in servers}
    streams = [Stream(gate.port, chat(number, max_tokens=50)) for number in range(2 * SLOTS)]
    await read_all(streams)
    assert all(stream.is_done and len(stream.text) == 50 for stream in streams)
    return {name for name in servers if attempts(gate, name) > before[name]}


async def is_answering(gate: GateProcess, servers: Servers, name: str) -> bool:
    """Whether this one is among them."""
    return name in await answering(gate, servers)


async def all_up_and_never_down(gate: GateProcess) -> None:
    """Wait until the gate believes well of every server; it has taken none down."""
    await until(lambda: {unit["verdict"] for unit in gate.units().values()} == {"up"})
    assert "-> down" not in gate.log


@live_for(PROCESSES_S)
async def test_what_a_server_is_and_how_busy_is_found_out(gate: GateProcess, servers: Servers) -> None:
    unit = gate.admin("GET", "/units/a")[1]
    assert (unit["engine"], unit["models"]) == ("llamacpp", [MODEL])
    assert unit["news"]["canary"]["reason"] == "one token by chat"
    health = "GET /health: HTTP 200"
    await until(lambda: gate.admin("GET", "/units/a")[1]["news"]["readiness"]["reason"] == health)
    crowd = [Stream(servers["a"].port, chat(number, max_tokens=4000)) for number in range(2 * SLOTS)]
    reading = asyncio.create_task(read_all(crowd))
    await until(lambda: (load := gate.units()["a"]["load"])["running"] == SLOTS and load["waiting"] >= SLOTS)
    reading.cancel()
    await until(lambda: gate.units()["a"]["load"]["running"] == 0)
    # A crowd is no reason to think ill of it: at most to ask once more.
    await all_up_and_never_down(gate)


@live_for(PROCESSES_S)
async def test_in_a_crowd_of_others_few_canaries_are_left_in_line(
    gate: GateProcess, servers: Servers
) -> None:
    others = [Stream(servers["a"].port, chat(number, max_tokens=6000)) for number in range(SLOTS)]
    reading = asyncio.create_task(read_all(others))
    await until(lambda: gate.units()["a"]["load"]["running"] == SLOTS)
    await asyncio.sleep(15.0)
    # A request that was given up stays in line at this engine. One a second would be 13 or more.
    assert gate.units()["a"]["load"]["waiting"] <= 7
    assert not reading.done()
    reading.cancel()
    await all_up_and_never_down(gate)


@live_for(PROCESSES_S)
async def test_streams_are_spread_over_the_servers_and_come_as_they_were_said(
    gate: GateProcess, servers: Servers
) -> None:
    bodies = [chat(number, max_tokens=TOKENS) for number in range(2 * SLOTS)]
    said = [Stream(servers["b"].port, body) for body in bodies]
    await read_all(said)
    relayed = [Stream(gate.port, body) for body in bodies]
    reading = asyncio.create_task(read_all(relayed))
    await until(lambda: all(unit["in_flight"] == SLOTS for unit in gate.units().values()))
    await reading
    assert [stream.text for stream in relayed] == [stream.text for stream in said]
    assert all((stream.is_done, stream.finish) == (True, "length") for stream in relayed)
    # It closes the connection of each stream without a word before.
    assert not any(unit["restart_suspected"] for unit in gate.units().values())


@live_for(PROCESSES_S)
async def test_a_killed_server_is_down_at_once_and_up_again_when_it_is_back(
    gate: GateProcess, servers: Servers
) -> None:
    streams = [Stream(gate.port, chat(number, max_tokens=TOKENS)) for number in range(2 * SLOTS)]
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    await until(lambda: all(stream.text for stream in streams))
    servers["a"].kill()
    await until_verdict(gate, "down")
    await asyncio.gather(*reading, return_exceptions=True)
    assert await answering(gate, servers) == {"b"}
    servers["a"].start()
    await until_verdict(gate, "up")
    await until(lambda: is_answering(gate, servers, "a"))


@pytest.mark.parametrize("streams", [0, 2 * SLOTS])
@live_for(PROCESSES_S)
async def test_a_frozen_server_is_found_out_and_up_again_when_it_goes_on(
    gate: GateProcess, servers: Servers, streams: int
) -> None:
    """Idle, a canary finds it."""
    begun = [Stream(gate.port, chat(number, max_tokens=TOKENS)) for number in range(streams)]
    reading = [asyncio.create_task(stream.read()) for stream in begun]
    await until(lambda: all(stream.text for stream in begun))
    servers["a"].signal(signal.SIGSTOP)
    await until_verdict(gate, "down")
    await asyncio.gather(*reading, return_exceptions=True)
    assert await answering(gate, servers) == {"b"}
    servers["a"].signal(signal.SIGCONT)
    await until_verdict(gate, "up")
    await until(lambda: is_answering(gate, servers, "a"))
