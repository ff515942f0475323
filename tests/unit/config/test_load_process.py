"""The configuration read in a process of its own: the same settings and problems, no word when it is late."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides, read_settings

FLAGS = Overrides(units=("http://127.0.0.1:8001", "b=http://127.0.0.1:8002"))


def test_it_finds_the_same_settings() -> None:
    assert read_settings(None, FLAGS) == load(None, FLAGS)


def test_all_problems_are_told_as_if_they_were_found_here(tmp_path: Path) -> None:
    file = tmp_path / "cellgate.yaml"
    file.write_text("lissten: 127.0.0.1:1\nworkers: 0\n")
    with pytest.raises(ConfigError) as there:
        read_settings(str(file), Overrides())
    with pytest.raises(ConfigError) as here:
        load(str(file), Overrides())
    assert there.value.problems == here.value.problems
    assert len(here.value.problems) > 1


@pytest.mark.parametrize(
    "asked", [b"", pickle.dumps((None, FLAGS))], ids=["before it asked", "while it waited"]
)
def test_a_gate_that_ends_meanwhile_leaves_no_traceback(asked: bytes) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "cellgate.proxy.config.load"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(asked)
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
