"""The whole way: a real Envoy before two gates as processes, each before a simulated unit."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from loadtests.simunit.process import SimUnit
from tests.real.asking import asked_on, until
from tests.real.envoy import envoy
from tests.wire.process import GateProcess, metrics
from tests.wire.stage import PROCESSES_S, live_for

BODY = orjson.dumps(
    {"model": "sim", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Why?"}]}
)

ENOUGH = 60
"""Requests of the faster gate, for a share."""


@live_for(PROCESSES_S)
async def test_the_gate_with_units_of_half_the_speed_gets_half(tmp_path: Path) -> None:
    with ExitStack() as stack:
        gates = []
        for name, step_ms in (("fast", 25), ("slow", 50)):
            unit = stack.enter_context(SimUnit.start(name, step_ms=step_ms))
            folder = tmp_path / name
            folder.mkdir()
            gate = GateProcess(folder, {name: f"http://127.0.0.1:{unit.port}"})
            gates.append(stack.enter_context(gate))
        for gate, name in zip(gates, ("fast", "slow"), strict=True):
            gate.until_up(name)
        fast, slow = gates
        here = stack.enter_context(
            envoy(tmp_path, [gate.port for gate in gates], [gate.admin_port for gate in gates])
        )

        async def is_up() -> bool:
            hosts = (await here.hosts()).values()
            return len(hosts) == 2 and all(host.healthy for host in hosts)

        await until(is_up)
        async with asked_on(here.port, rps=40.0, body=BODY) as statuses:
            shares: list[float] = []
            while not shares or shares[-1] != pytest.approx(0.5, abs=0.12):
                before = served(fast), served(slow)
                await until(lambda: served(fast) - before[0] >= ENOUGH)  # noqa: B023
                shares.append((served(slow) - before[1]) / (served(fast) - before[0]))
        print(f"of the other's requests: {', '.join(f'{share:.2f}' for share in shares)}")
    assert statuses.keys() == {200}


def served(gate: GateProcess) -> int:
    """How many generations a gate has answered."""
    counter = 'cellgate_client_requests_total{route="chat",status="200"}'
    lines = [line for line in metrics(gate).splitlines() if line.startswith(counter)]
    return sum(int(float(line.split()[-1])) for line in lines)
