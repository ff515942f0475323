"""The first calls of docs/api.md are made, as they stand there, through a real gate."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from loadtests.kit.gate import GateProcess
from loadtests.simunit.process import sim_units
from tests.documented import ROOT, typed
from tests.real.programs import python_of

PAGE = (ROOT / "docs" / "api.md").read_text()
SNIPPETS = {
    re.findall(r"^from (\w+) import", code, re.MULTILINE)[0]: code
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
PYTHONS = {"openai": lambda: sys.executable, "langchain_openai": lambda: python_of("langchain")}
"""Where the SDK of a snippet is installed. Anthropic's is not: its snippet is read, but not run."""


@pytest.fixture(scope="module")
def gate() -> Iterator[GateProcess]:
    with sim_units(["a", "b"]) as units, GateProcess(units) as started:
        yield started


def test_the_snippets_are_those_of_three_sdks() -> None:
    assert list(SNIPPETS) == ["openai", "langchain_openai", "anthropic"]
    for code in SNIPPETS.values():
        ast.parse(code)


@pytest.mark.parametrize("sdk", ["openai", pytest.param("langchain_openai", marks=pytest.mark.nightly)])
def test_a_snippet_prints_an_answer(sdk: str, gate: GateProcess) -> None:
    code = SNIPPETS[sdk].replace("127.0.0.1:8000", f"127.0.0.1:{gate.port}")
    done = subprocess.run(
        [PYTHONS[sdk](), "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


@pytest.mark.parametrize("each", [each for each in typed("curl") if each.page == "docs/api.md"], ids=str)
def test_a_call_of_curl_is_answered(each: tuple[str, tuple[str, ...], bool], gate: GateProcess) -> None:
    words = [word.replace("127.0.0.1:8000", f"127.0.0.1:{gate.port}") for word in each[1]]
    done = subprocess.run([*words, "-i"], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.startswith("HTTP/1.1 200 ")
    if "completions" in words[2]:
        assert re.search(r"^x-cellgate-unit: [ab]\r?$", done.stdout, re.MULTILINE)
        assert re.search(r"^x-request-id: \S+", done.stdout, re.MULTILINE)
