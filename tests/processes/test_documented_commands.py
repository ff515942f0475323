"""What README and docs tell to type at a running gate, or to run, is: at a real one with real units."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cellgate.proxy.cli.main import COMMANDS, main
from loadtests.kit.gate import GateProcess
from loadtests.simunit.process import sim_units
from tests.documented import ROOT, Typed, typed
from tests.real.programs import python_of
from tests.wire.process import PATIENCE_S, eventually

ASK = ["units", "why", "explain", "drain", "undrain", "engine", "poison", "events", "top"]
ORDERS = ["pause", "resume", "sleep", "wake"]
"""The commands that ask a gate; one that takes something away before the one that gives it back."""

ENDLESS = ("-f", "--watch")
SNIPPETS = {
    re.findall(r"^from (\w+) import", code, re.MULTILINE)[0]: code
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
}
"""The first calls of an SDK. Anthropic's is not installed here: its snippet is read, but not run."""


@pytest.fixture(scope="module")
def gate() -> Iterator[GateProcess]:
    """One before cells a, b and c (a prefiller and a decoder) of two units, whose engines can be paused."""
    with (
        sim_units(["a1", "a2", "b1", "b2", "p1", "d1"], can_pause=1) as units,
        GateProcess(units, cell=lambda name: name[0] if name[0] in "ab" else "c") as started,
    ):
        yield started


def asked() -> list[Typed]:
    """Those of them that are whole."""
    found = [
        each
        for each in typed("cellgate")
        if each.words[1:2] and each.words[1] in ASK and each.words[1] in COMMANDS
    ]
    alone = ("units", "top", "events", "explain", "poison")
    whole = {each.words: each for each in found if len(each.words) > 2 or each.words[1] in alone}
    return sorted(
        whole.values(),
        key=lambda each: (
            ASK.index(each.words[1]),
            each.words[1] == "engine" and ORDERS.index(each.words[2]),
        ),
    )


def is_connected(process: subprocess.Popen[str]) -> bool:
    """Whether it has a socket, which leads to its gate."""
    with suppress(OSError):
        return any(
            os.readlink(each).startswith("socket:") for each in Path(f"/proc/{process.pid}/fd").iterdir()
        )
    return False


def run(words: list[str], gate: GateProcess, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """The exit code of a command, and what it prints; one without an end is interrupted once it is there."""
    command = [*words, "--admin", f"127.0.0.1:{gate.admin_port}"]
    if not set(ENDLESS) & set(words):
        try:
            code: object = main(command)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()
    command = [sys.executable, "-m", "cellgate", *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert eventually(lambda: is_connected(process))
    process.send_signal(signal.SIGINT)
    said, wrong = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said, wrong


def test_commands_calls_of_curl_and_snippets_do_what_they_should(
    gate: GateProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in asked():
        # A cell has another name than a unit here.
        pairs = zip(each.words, each.words[1:], strict=False)
        words = ["a" if before == "--cell" else word for before, word in pairs]
        code, said, wrong = run(words, gate, capsys)
        if words[1:2] in (["sleep"], ["wake"]) or (words[:2] == ["poison", "clear"] and len(words) > 2):
            # These engines cannot sleep, and there is no such prompt: one line says so.
            assert (code, wrong.count("\n")) == (1, 1), each
        else:
            assert code == 0, (each, wrong)
            assert said or words[0] == "events", each

    [first] = [each for each in typed("curl") if each.page == "README.md"]
    calls = [each for each in typed("curl") if each.page == "docs/api.md"]
    for each in (first, *calls):
        words = [
            word.replace("127.0.0.1:8000", f"127.0.0.1:{gate.port}") for word in each.words if word != "|"
        ]
        done = subprocess.run([*words, "-i"], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        assert done.stdout.startswith("HTTP/1.1 200 "), each
        if "completions" in words[2]:
            assert re.search(r"^x-cellgate-unit: [abpd]\d\r?$", done.stdout, re.MULTILINE), each
            assert re.search(r"^x-request-id: \S+", done.stdout, re.MULTILINE), each

    assert list(SNIPPETS) == ["openai", "langchain_openai", "anthropic"]
    ast.parse(SNIPPETS["anthropic"])
    prints_an_answer(sys.executable, SNIPPETS["openai"], gate)


@pytest.mark.nightly
def test_the_snippet_of_langchain_does_as_well(gate: GateProcess) -> None:
    prints_an_answer(python_of("langchain"), SNIPPETS["langchain_openai"], gate)


def prints_an_answer(python: str, snippet: str, gate: GateProcess) -> None:
    code = snippet.replace("127.0.0.1:8000", f"127.0.0.1:{gate.port}")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


def test_a_gate_is_served_as_the_pages_say() -> None:
    [plain] = [each for each in typed("cellgate") if each.words[1:3] == ("serve", "--unit")]
    command = [sys.executable, "-m", *plain.words, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        assert re.search(r"listening on 127\.0\.0\.1:\d+", first), first
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
