"""OpenAI's SDK reads a whole answer over connections that are cut, with docs/reconnect.md's transport."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from loadtests.simunit.process import sim_units
from loadtests.vllm.relay import Budget, Relay
from tests.documented import ROOT
from tests.wire.process import GateProcess

PAGE = (ROOT / "docs" / "reconnect.md").read_text()
(SNIPPET,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ASKED: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Tell me about gates."}],
    "max_tokens": 100,
    "stream": True,
}


def transport() -> httpx2.BaseTransport:
    """As the page has it."""
    names: dict[str, Any] = {}
    exec(SNIPPET, names)
    made: httpx2.BaseTransport = names["ComesBack"](retries=0)
    return made


def read(client: OpenAI) -> tuple[str, int]:
    """The text of an answer, and in how many pieces it came."""
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ASKED)]
    return "".join(pieces), len(pieces)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_answer_is_read_once_and_whole_over_connections_that_are_cut(tmp_path: Path, workers: int) -> None:
    budget = Budget()
    with sim_units(["a"]) as units:
        served = {unit.name: unit.url for unit in units}
        with (
            GateProcess(tmp_path, served, workers=workers, resume_s=10) as gate,
            Relay("client's network", gate.url, budget) as relay,
            httpx2.Client(transport=transport()) as http,
            OpenAI(base_url=f"{relay.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
        ):
            gate.until_up("a")
            whole = read(client)
            for events in (1, 2, 30, 60, 90, 7, 50, 80):
                budget.cut_after(events)
                assert read(client) == whole
            assert budget.spent == 8
