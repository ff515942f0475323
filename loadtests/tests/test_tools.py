"""The list of load tools: each says in a line what it does."""

from __future__ import annotations

import subprocess
import sys

from loadtests.__main__ import HELPERS, HERE, PARTS, tools
from tests.documented import ROOT


def test_what_is_left_out_of_the_list_is_there() -> None:
    assert [name for name in PARTS if not (HERE / name).is_dir()] == []
    assert [name for name in HELPERS if not (HERE / f"{name.replace('.', '/')}.py").is_file()] == []


def test_each_tool_has_a_line_of_its_own_that_does_not_name_its_command() -> None:
    listed = list(tools())
    lines = [first for _, first in listed]
    assert len(set(lines)) == len(lines) > 50
    assert [line for line in lines if len(line) < 20 or line.startswith("`")] == []


def test_the_list_is_printed() -> None:
    command = [sys.executable, "-m", "loadtests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("loadtests.")] == [
        f"{module:<32}{first}" for module, first in tools()
    ]
