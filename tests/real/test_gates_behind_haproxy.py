"""The whole way: a real HAProxy before two gates as processes, which are restarted under load."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import orjson
import pytest
import yaml

from loadtests.kit.processes import start, stop
from loadtests.simunit.process import SimUnit
from tests.real.asking import asked_on, until
from tests.real.haproxy import haproxy
from tests.real.programs import free_port
from tests.wire.stage import PROCESSES_S, live_for

BODY = orjson.dumps(
    {"model": "sim", "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}]}
)
RPS = 150.0


class Restartable:
    """A gate on ports that stay the same. `generation` counts its processes."""

    def __init__(self, folder: Path, units: dict[str, str]) -> None:
        self.port, self.agent_port, self._admin_port = free_port(), free_port(), free_port()
        self._folder = folder
        folder.mkdir()
        rows = [{"name": name, "url": url} for name, url in units.items()]
        config = {
            "listen": f"127.0.0.1:{self.port}",
            "admin": f"127.0.0.1:{self._admin_port}",
            "agent_check": f"127.0.0.1:{self.agent_port}",
            "access_log": "off",
            "timeouts": {"drain_delay_s": 1.5},
            "cells": [{"name": "c", "units": rows}],
        }
        (folder / "gate.yaml").write_text(yaml.safe_dump(config))
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            stop(self._process)

    async def restart(self) -> None:
        """As a rolling update does: stop in good order, then start the successor."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(self._process.wait, 15.0) == 0
        self._start()

    def _start(self) -> None:
        self.generation += 1
        log = self._folder / f"gate.{self.generation}.log"
        command = [sys.executable, "-m", "cellgate", "serve", "-c", str(self._folder / "gate.yaml")]
        self._process = start(command, log)


@pytest.mark.alone
@live_for(2 * PROCESSES_S)
async def test_a_rolling_restart_of_both_gates_fails_no_request(tmp_path: Path) -> None:
    with SimUnit.start("a", step_ms=10) as a, SimUnit.start("b", step_ms=10) as b:
        units = {unit.name: f"http://127.0.0.1:{unit.port}" for unit in (a, b)}
        with (
            Restartable(tmp_path / "one", units) as one,
            Restartable(tmp_path / "other", units) as other,
            haproxy(tmp_path, {"10.0.0.1": one, "10.0.0.2": other}) as here,
        ):

            def up() -> bool:
                return [s.places for s in here.servers().values() if s.status == "UP"] == [512, 512]

            async def all_up() -> None:
                await until(up)

            await all_up()
            async with asked_on(here.port, rps=RPS, body=BODY) as statuses:
                for gate in (one, other):
                    await gate.restart()
                    await all_up()
            assert one.generation == other.generation == 2
            assert statuses.keys() == {200}, statuses
