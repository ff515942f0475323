"""Completions: every command and flag in each script; bash is asked what it would offer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cellgate.proxy.cli.main import COMMANDS, main


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script for bash."""
    assert main(["completion", "bash"]) == 0
    (tmp_path / "cellgate.bash").write_text(capsys.readouterr().out)
    return tmp_path / "cellgate.bash"


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


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("cellgate un", "undrain units"),
        ("cellgate units -", "--admin --help --json --output --watch -h -o"),
        ("cellgate units -o ", "json table wide"),
        ("cellgate units --watch --out", "--output"),
        ("cellgate completion ", "--help -h bash cells fish units zsh"),
        ("cellgate why a", "a1 a2"),
        ("cellgate why a1 b", "b1"),
        ("cellgate drain b", "b1"),
        ("cellgate engine pause b", "b1"),
        ("cellgate drain --cell ", "a b"),
        ("cellgate help unit", "units"),
        ("cellgate serve --policy ran", "random"),
        ("cellgate check --json --pol", "--policy"),
    ],
)
def test_bash_offers_what_may_follow(script: Path, typed: str, offered: str) -> None:
    names = "[[ $2 == units ]] && echo a1 a2 b1 || echo a b"
    code = f"""
cellgate() {{ {names}; }}
source {script}
COMP_WORDS=({typed}{"''" if typed.endswith(" ") else ""})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_cellgate
printf '%s\\n' "${{COMPREPLY[@]}}" | sort
"""
    done = subprocess.run(
        ["bash", "-c", code],
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.split() == sorted(offered.split())
