"""A gate of one or several processes: names of models that are reloaded, and the guardrail of deploy/."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit
from tests.extras import ONE_OR_TWO_WORKERS, needs
from tests.wire.process import ROOT, GateProcess, eventually, metrics

EXAMPLE = ROOT / "deploy" / "guardrail" / "guardrail.py"


@pytest.fixture(scope="module")
def unit() -> Iterator[SimUnit]:
    (started,) = SimUnit.start_all(["a"], followers=0, step_ms=1)
    yield started
    started.stop()


class NamingGate(GateProcess):
    """A gate whose names of models can be rewritten."""

    def name(self, unit: SimUnit, **models: Any) -> None:
        """Write the file with these names."""
        self._keys["models"] = models
        self.configure({"a": unit.url})

    def ask(self, model: str, text: str = "hello") -> tuple[int, str | None, Any]:
        """Status, the model that served, and the answer."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
        connection = self.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        reply = connection.getresponse()
        told = reply.status, reply.getheader("x-cellgate-model"), json.loads(reply.read())
        connection.close()
        return told


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as knock:
        return not knock.connect_ex(("127.0.0.1", port))


@contextmanager
def guardrail() -> Iterator[int]:
    """The example, on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(EXAMPLE), "--port", str(port)])
    try:
        assert eventually(lambda: answers(port))
        yield port
    finally:
        process.kill()
        process.wait()


@needs("guardrail")
@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
def test_names_are_reloaded_and_the_example_removes_personal_data(
    unit: SimUnit, tmp_path: Path, workers: int
) -> None:
    with guardrail() as port:
        keys = {"url": f"http://127.0.0.1:{port}/check", "answer": "windows", "timeout_s": 5}
        more: dict[str, Any] = {"workers": workers, "guardrail": keys, "models": {"gpt": "sim"}}
        with NamingGate(tmp_path, {"a": unit.url}, **more) as gate:
            gate.until_up("a")
            assert gate.ask("gpt", "my card is 4111 1111 1111 1111")[:2] == (200, "sim")
            assert gate.ask("sim")[0] == 200
            changed = re.compile(r'verdicts_total\{phase="request",result="changed"\} 1')
            assert eventually(lambda: changed.search(metrics(gate)))
            allowed = re.compile(r'verdicts_total\{phase="answer",result="allowed"\} 2')
            assert eventually(lambda: allowed.search(metrics(gate)))
            assert gate.admin("GET", "/explain?model=gpt")[1]["ask"]["model"] == "sim"
            gate.name(unit, other="sim")
            assert gate.admin("POST", "/reload")[0] == 200
            assert eventually(lambda: gate.ask("other")[:2] == (200, "sim"))
            assert gate.ask("gpt")[0] == 404
            assert re.search(r'named_requests_total\{model="sim",name="gpt"\} 1', metrics(gate))
