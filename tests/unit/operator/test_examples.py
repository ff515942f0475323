"""The examples of deploy/recovery: they are what they claim to be, and call what they should."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides

FOLDER = Path(__file__).parents[3] / "deploy" / "recovery"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
TOOL = """#!/bin/sh
for word in "$0" "$@"; do printf "[%s]" "${word##*/}"; done >> "$CALLS"
echo >> "$CALLS"
"""


class Ran(NamedTuple):
    """What became of a script: its code, the calls of its tools, its errors."""

    code: int
    calls: list[str]
    said: str


def run(folder: Path, script: str, word: str, tool: tuple[str, str], **about: str) -> Ran:
    """Run a script with `tool`, a name and some more of a script, in the place of the real one."""
    (folder / tool[0]).write_text(TOOL + tool[1])
    (folder / tool[0]).chmod(0o700)
    calls = folder / "calls"
    calls.touch()
    told = {f"CELLGATE_{name.upper()}": value for name, value in about.items()}
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), **told}
    done = subprocess.run([FOLDER / script, word], env=env, capture_output=True, text=True, check=False)
    return Ran(done.returncode, calls.read_text().splitlines(), done.stderr)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_every_script_can_be_read_by_a_shell(script: Path, shell: str) -> None:
    assert subprocess.run([shell, "-n", script], check=False).returncode == 0
    assert os.access(script, os.X_OK)


def test_there_are_examples() -> None:
    assert [script.name for script in SCRIPTS] == ["ecs-stop-task.sh", "lws-delete-group.sh"]


def test_a_group_of_a_leader_worker_set_is_deleted_as_one(tmp_path: Path) -> None:
    kubectl = ("kubectl", 'printf "%s\\n" "$8" >> "$CALLS"\n')
    ran = run(tmp_path, "lws-delete-group.sh", "inference", kubectl, unit="my-llama-12")
    call, selector = ran.calls
    assert ran.code == 0
    assert call.startswith(
        "[kubectl][--namespace][inference][--request-timeout=20s][delete][pod][--wait=false]"
    )
    labels = "leaderworkerset.sigs.k8s.io"
    assert selector == f"{labels}/name=my-llama,{labels}/group-index=12"


@pytest.mark.parametrize("unit", ["llama", "llama-", "llama-0a"])
def test_a_unit_that_is_no_group_is_left_alone(tmp_path: Path, unit: str) -> None:
    ran = run(tmp_path, "lws-delete-group.sh", "inference", ("kubectl", ""), unit=unit)
    assert (ran.code, ran.calls) == (2, [])
    assert f"unit {unit} is not named SET-INDEX" in ran.said


AWS = """
case "$2 $6" in
  "list-tasks n0") echo arn:0 arn:1 ;;
  "list-tasks n1") echo arn:2 ;;
  "list-tasks n9") echo None ;;
esac
"""
ABOUT = {"id": "a1-7", "reason": "gone " * 100}


def test_the_tasks_of_all_nodes_are_stopped(tmp_path: Path) -> None:
    ran = run(tmp_path, "ecs-stop-task.sh", "gpus", ("aws", AWS), nodes="n0,n1", **ABOUT)
    stopped = [call.split("][") for call in ran.calls if "stop-task" in call]
    assert ran.code == 0
    assert [call[1:7] for call in stopped] == [
        ["ecs", "stop-task", "--cluster", "gpus", "--task", f"arn:{number}"] for number in range(3)
    ]
    assert all(call[8].startswith("cellgate a1-7: gone gone") for call in stopped)
    assert all(len(call[8]) == 200 for call in stopped)


def test_a_task_that_cannot_be_stopped_spares_no_other(tmp_path: Path) -> None:
    refuses = AWS + 'case "$2 $6" in "stop-task arn:1") exit 5 ;; esac\n'
    ran = run(tmp_path, "ecs-stop-task.sh", "gpus", ("aws", refuses), nodes="n0,n1", **ABOUT)
    assert ran.code == 1
    assert sum("stop-task" in call for call in ran.calls) == 3


def test_no_task_at_all_is_a_failure(tmp_path: Path) -> None:
    ran = run(tmp_path, "ecs-stop-task.sh", "gpus", ("aws", AWS), nodes="n9", **ABOUT)
    assert ran.code == 3
    assert "no task of n9 runs in gpus" in ran.said


def test_the_example_of_a_configuration_is_one(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    text = (FOLDER / "operator.yaml").read_text()
    for there, here in {
        "/etc/cellgate/webhook-secret": str(tmp_path / "secret"),
        "/etc/cellgate/": f"{FOLDER}/",
        "/var/log/cellgate/": f"{tmp_path}/",
    }.items():
        text = text.replace(there, here)
    (tmp_path / "operator.yaml").write_text(text)
    gate = (FOLDER / "cellgate.yaml").read_text().replace("/etc/cellgate/", f"{tmp_path}/")
    (tmp_path / "gate.yaml").write_text(gate)
    remedies = load(str(tmp_path / "gate.yaml"), Overrides(), {}).remedies
    assert list(remedies) == ["kubernetes", "elsewhere"]
    assert remedies["kubernetes"].dry_run


def test_the_rights_are_those_that_the_script_needs() -> None:
    role, binding = yaml.safe_load_all((FOLDER / "lws-rbac.yaml").read_text())
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
