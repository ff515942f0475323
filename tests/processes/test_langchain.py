"""LangChain's client reads streams whose unit dies in the middle. It has a venv of its own: it brings some 20
packages, which nothing else here needs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit
from tests.processes.test_continued import BREAKS, MODEL, STREAMS, TOKENS, unbroken, until_halfway
from tests.processes.test_continued import gate as gate
from tests.processes.test_continued import units as units
from tests.real.programs import python_of
from tests.wire.process import GateProcess, metrics

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("langchain_client.py")


@pytest.mark.parametrize("name", ["leader killed", "follower frozen", "error in the stream"])
def test_langchain_notices_nothing(name: str, gate: GateProcess, units: list[SimUnit]) -> None:
    text, usage = unbroken(units[1])
    command = [python_of("langchain"), str(SCRIPT), gate.url, MODEL, str(TOKENS), str(STREAMS)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until_halfway(gate, units)
        BREAKS[name](units[0])
        out, err = client.communicate(timeout=45.0)
    finally:
        client.kill()
        client.wait()
    assert (client.returncode, err) == (0, "")
    answers: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert len(answers) == STREAMS
    for answer in answers:
        assert (answer["text"], answer["finish_reason"]) == (text, "length")
        assert answer["usage"]["output_tokens"] == TOKENS
        assert answer["usage"]["input_tokens"] == usage["prompt_tokens"]
    continued = 'cellgate_continuations_total{kind="text",result="continued"}'
    lines = [line for line in metrics(gate).splitlines() if line.startswith(continued)]
    assert float(lines[0].rpartition(" ")[2]) > 0
