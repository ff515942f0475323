"""What README and docs tell to type at a running gate is typed, at a real one with real units."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from loadtests.kit.gate import GateProcess
from loadtests.simunit.process import sim_units
from tests.documented import ROOT, Typed, typed
from tests.wire.process import PATIENCE_S, eventually

ASK = ["units", "why", "explain", "drain", "undrain", "engine", "poison", "events", "top"]
ORDERS = ["pause", "resume", "sleep", "wake"]
"""The commands that ask a gate; one that takes something away before the one that gives it back."""

ENDLESS = ("-f", "--watch")


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
    found = [each for each in typed("cellgate") if each.words[1:2] and each.words[1] in ASK]
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


@pytest.mark.parametrize("each", asked(), ids=str)
def test_it_does_what_it_should(each: Typed, gate: GateProcess) -> None:
    # A cell has another name than a unit here.
    pairs = zip(each.words, each.words[1:], strict=False)
    words = ["a" if before == "--cell" else word for before, word in pairs]
    command = [sys.executable, "-m", "cellgate", *words, "--admin", f"127.0.0.1:{gate.admin_port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if set(ENDLESS) & set(words):
        assert eventually(lambda: is_connected(process))
        process.send_signal(signal.SIGINT)
    said, wrong = process.communicate(timeout=PATIENCE_S)
    if words[1:2] in (["sleep"], ["wake"]) or (words[:2] == ["poison", "clear"] and len(words) > 2):
        # These engines cannot sleep, and there is no such prompt: one line says so.
        assert (process.returncode, wrong.count("\n")) == (1, 1)
        return
    assert process.returncode == 0, wrong
    assert said or words[0] == "events"


def test_the_first_request_of_the_readme_is_answered(gate: GateProcess) -> None:
    [first] = [each for each in typed("curl") if each.page == "README.md"]
    body = first.words[first.words.index("-d") + 1]
    url = first.words[2].replace("127.0.0.1:8000", f"127.0.0.1:{gate.port}")
    command = ["curl", "-sN", url, *first.words[3:5], "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")


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
