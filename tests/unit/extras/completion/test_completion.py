"""Completions: every command and flag in each script; bash is asked what it would offer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cellgate.proxy.cli.main import COMMANDS, main
from tests.extras import needs
from tests.unit.cli.test_commands import UNIT_A1, UNIT_B1, gate


def test_names_for_completions_are_those_of_the_gate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gate(200, [UNIT_B1, UNIT_A1]) as played:
        monkeypatch.setenv("CELLGATE_ADMIN", played.address)
        assert [main(["completion", kind]) for kind in ("units", "cells")] == [0, 0]
    assert capsys.readouterr().out == "a1\nb1\na\nb\n"


@needs("operator")
@needs("planner")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_has_all_commands_and_their_flags(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in text] == []
    assert all(flag in text for flag in ("watch", "prompt-tokens", "tensor-parallel-size", "wide"))
    if program := shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([program, "-n", tmp_path / "script"], check=True, timeout=30)


OFFERED = {
    "cellgate un": "undrain units",
    "cellgate units -": "--admin --help --json --output --watch -h -o",
    "cellgate units -o ": "json table wide",
    "cellgate units --watch --out": "--output",
    "cellgate completion ": "--help -h bash cells fish units zsh",
    "cellgate why a": "a1 a2",
    "cellgate drain b": "b1",
    "cellgate engine pause b": "b1",
    "cellgate drain --cell ": "a b",
    "cellgate help unit": "units",
    "cellgate serve --policy ran": "random",
    "cellgate check --json --pol": "--policy",
}


def test_bash_offers_what_may_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    code = f"cellgate() {{ [[ $2 == units ]] && echo a1 a2 b1 || echo a b; }}\nsource {tmp_path}/script\n"
    for typed in OFFERED:
        words = f"{typed}''" if typed.endswith(" ") else typed
        code += f"COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMPREPLY=()\n"
        code += "_cellgate; echo ${COMPREPLY[@]}\n"
    env = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, check=True)
    offered = [" ".join(sorted(line.split())) for line in done.stdout.splitlines()]
    assert dict(zip(OFFERED, offered, strict=True)) == {
        typed: " ".join(sorted(words.split())) for typed, words in OFFERED.items()
    }
