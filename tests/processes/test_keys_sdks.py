"""The SDKs of OpenAI and Anthropic with keys: right, wrong, expired, revoked in a stream, above a limit.

Each raises its own exceptions, and waits by itself where it is told to.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit
from tests.extras import ONE_OR_TWO_WORKERS
from tests.processes.test_gate_openai import MODEL
from tests.processes.test_gate_openai import units as units
from tests.real.programs import python_of
from tests.wire.process import GateProcess, eventually, metrics

SCRIPT = Path(__file__).with_name("keys_client.py")
GOOD, OLD, ONE, FEW = "sk-good", "sk-old", "sk-one", "sk-few"
NAMES = {GOOD: "good", OLD: "old", ONE: "one", FEW: "few"}
LINES: dict[str, dict[str, Any]] = {
    GOOD: {"tenant": "team"},
    OLD: {"expires": "2020-01-01"},
    ONE: {"limits": {"in_flight": 1}},
    # Fewer than a request asks for: it is charged at its start.
    FEW: {"limits": {"tokens_per_day": 4}},
}


def write_keys(file: Path, *names: str) -> None:
    """The file of keys with these."""
    lines = [
        {"key": NAMES[key], "sha256": sha256(key.encode()).hexdigest(), **LINES[key]}
        for key in names or tuple(LINES)
    ]
    new = file.with_suffix(".new")
    new.write_text("\n".join(map(json.dumps, lines)))
    new.rename(file)


@pytest.fixture(params=ONE_OR_TWO_WORKERS, ids=["one process", "two workers"])
def gate(request: pytest.FixtureRequest, units: list[SimUnit], tmp_path: Path) -> Iterator[GateProcess]:
    file = tmp_path / "keys.jsonl"
    write_keys(file)
    keys = {"file": str(file), "on_revoke": "end"}
    served = {unit.name: unit.url for unit in units}
    process = GateProcess(
        tmp_path, served, keys=keys, workers=request.param, usage_log=str(tmp_path / "usage.jsonl")
    )
    with process:
        process.until_up("a", "b")
        for unit in units:
            unit.hold()
        yield process
        for unit in units:
            unit.release()


class Sdk:
    """One SDK in a process of its own."""

    def __init__(self, sdk: str, gate: GateProcess) -> None:
        python = sys.executable if sdk == "openai" else python_of("agents")
        command = [python, str(SCRIPT), sdk, gate.url, MODEL]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes)

    def begin(self, key: str, tokens: int = 5, retries: int = 0) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"key": key, "tokens": tokens, "retries": retries}) + "\n")
        self._process.stdin.flush()

    def until_begun(self) -> None:
        """Wait for the first piece of its answer."""
        assert self._line() == "begun"

    def end(self) -> dict[str, Any]:
        """What became of it."""
        line = self._line()
        found: dict[str, Any] = json.loads(self._line() if line == "begun" else line)
        return found

    def ask(self, key: str, **how: int) -> tuple[str | None, int | None]:
        """The exception that a request raises, and its status."""
        self.begin(key, **how)
        told = self.end()
        return told["error"], told["status"]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line: str = self._process.stdout.readline()
        return line.strip()


@pytest.fixture(params=["openai", pytest.param("anthropic", marks=pytest.mark.nightly)])
def sdks(request: pytest.FixtureRequest, gate: GateProcess) -> Iterator[tuple[Sdk, Sdk]]:
    made = Sdk(request.param, gate), Sdk(request.param, gate)
    yield made
    for each in made:
        each.close()


def refused(gate: GateProcess) -> float:
    """How many requests were told to come again."""
    lines = [
        line for line in metrics(gate).splitlines() if line.startswith("cellgate_client_requests_total{")
    ]
    return sum(float(line.split()[-1]) for line in lines if 'status="429"' in line)


def test_they_raise_what_they_have_for_it_and_wait_when_they_are_told(
    sdks: tuple[Sdk, Sdk], gate: GateProcess, tmp_path: Path
) -> None:
    sdk, other = sdks
    assert sdk.ask(GOOD) == (None, None)
    assert sdk.ask("sk-wrong") == ("AuthenticationError", 401)
    assert sdk.ask(OLD) == ("AuthenticationError", 401)
    # A budget is no rate: nobody waits for tomorrow.
    assert sdk.ask(FEW, retries=2) == ("RateLimitError", 429)
    # One at a time: the other waits for a second, as it is told; by itself it would wait for half of one.
    sdk.begin(ONE, tokens=50)
    sdk.until_begun()
    assert other.ask(ONE) == ("RateLimitError", 429)
    # Workers tell of theirs a while later.
    assert eventually(lambda: refused(gate) == 2)
    other.begin(ONE, retries=8)
    assert eventually(lambda: refused(gate) > 2)
    sdk.close()
    told = other.end()
    assert told["error"] is None
    assert told["s"] >= 1.0
    # Revoked in the middle of a stream.
    other.begin(GOOD, tokens=50)
    other.until_begun()
    write_keys(tmp_path / "keys.jsonl", ONE)
    told = other.end()
    assert told["error"] == ("APIError" if told["status"] is None else "APIStatusError")
    assert told["pieces"] > 0
    asked = [other.ask(GOOD)]
    while asked[-1] == (None, None) and len(asked) < 50:
        # Another worker reads the file within a second, too.
        time.sleep(0.1)
        asked.append(other.ask(GOOD))
    assert asked[-1] == ("AuthenticationError", 401)
    assert eventually(lambda: sum(unit["in_flight"] for unit in gate.units().values()) == 0)
    assert 'cellgate_tenant_tokens_total{kind="completion",model="",tenant="team"}' in metrics(gate)
    assert eventually(lambda: (tmp_path / "usage.jsonl").read_text().count('"key":"good"') == 1 + len(asked))
