"""Recovery and the file of keys: what may be configured, and a line for what may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellgate.extras.operator.action_settings import (
    CallWebhook,
    Remedy,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RollPolicy,
    RunCommand,
    SetImage,
)
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError, Overrides
from cellgate.proxy.config.settings import SECRET_VARIABLE, Settings
from tests.extras import needs
from tests.unit.config.files import without_line

GATE = "cells: [{name: a, units: [{name: a1, url: 'http://10.0.0.1:8000'}]}]"


def read(folder: Path, operator: str, more: str = "", **environ: str) -> Settings:
    """What a gate with this file of the operator is set to. AUDIT is a log that can be written."""
    path, file, secret = folder / "gate.yaml", folder / "operator.yaml", folder / "secret"
    secret.write_text("of-the-file\n")
    path.write_text(f"{GATE}\noperator: {file}\n{more}\n")
    file.write_text(operator.replace("AUDIT", f"audit: {__file__}").replace("SECRET", str(secret)))
    return load(str(path), Overrides(), environ)


def problem(folder: Path, operator: str, more: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, operator, more)
    (line,) = caught.value.problems
    return without_line(line).removeprefix(f"{folder}/operator.yaml: ")


def remedy(folder: Path, keys: str, **environ: str) -> Remedy:
    found: Remedy = read(folder, f"recovery: [{{cell: a, {keys}}}]", **environ).remedies["a"]
    return found


def test_a_command(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    found = remedy(tmp_path, f"command: [sh, -c, 'exit 0'], audit: {audit}, after_s: 5, dry_run: true")
    assert found == Remedy(str(audit), RunCommand(("sh", "-c", "exit 0")), after_s=5.0, dry_run=True)
    assert not audit.exists()


def test_a_webhook_is_signed_by_its_file_before_the_environment(tmp_path: Path) -> None:
    keys = "webhook: 'https://ops/hook', AUDIT"
    both = remedy(tmp_path, f"{keys}, secret_file: SECRET", CELLGATE_WEBHOOK_SECRET="other")
    assert both.action == CallWebhook("https://ops/hook", "of-the-file")
    other = remedy(tmp_path, keys, CELLGATE_WEBHOOK_SECRET="other")
    assert other.action == CallWebhook("https://ops/hook", "other")
    assert "of-the-file" not in repr(both)


ONE_OF = ": expected one of command, webhook, kubernetes, ecs, systemd, found"
WORDS = ".command: expected a command as a list of words, such as [/usr/local/bin/recover, --now], found"
WRONG = {
    "AUDIT": f"{ONE_OF} none",
    "command: [sh], webhook: 'https://x/y', AUDIT": f"{ONE_OF} command and webhook",
    "command: [sh]": ".audit: required key is missing",
    "command: [sh], audit: /no/where": (
        ".audit: expected a writable file in an existing directory, found '/no/where'"
    ),
    "command: 'kubectl delete', AUDIT": (
        f"{WORDS} 'kubectl delete'; did you mean [kubectl, delete]? There is no shell"
    ),
    "command: [sh, 5], AUDIT": f"{WORDS} a list; put each word that is not a string in quotes",
    "command: [/no/such, x], AUDIT": ".command: expected an executable program, found '/no/such'",
    "webhook: 'http://ops/hook', AUDIT": (
        ".webhook: expected https://HOST/PATH, or http:// on this machine, found 'http://ops/hook'; "
        "did you mean 'https://ops/hook'?"
    ),
    "webhook: 'https://ops/hook', AUDIT": (
        f": webhook requires secret_file, or the variable {SECRET_VARIABLE}"
    ),
    f"command: [sh], secret_file: {__file__}, AUDIT": (
        ".secret_file: expected a token of visible ASCII characters, found other characters"
    ),
    "command: [sh], secret_file: SECRET, AUDIT": (": secret_file signs webhooks: command does not take it"),
    "kubernetes: {selector: app=llama}, AUDIT": (
        ".kubernetes.selector: expected labels with {unit} for the unit's name, "
        "such as app=llama,unit={unit}, found 'app=llama'"
    ),
    "systemd: vllm, AUDIT": (
        ".systemd: expected the name of a service with {unit} for the unit's name, such as vllm@{unit}, "
        "found 'vllm'"
    ),
    "ecs: {}, AUDIT": ".ecs.cluster: required key is missing",
    "command: [sh], afters: 5, AUDIT": ".afters: unknown key; did you mean 'after_s'?",
    "command: [sh], max_share: 3, AUDIT": ".max_share: expected a share from 0 to 1, found 3",
}


@pytest.mark.parametrize(("keys", "said"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, keys: str, said: str) -> None:
    assert problem(tmp_path, f"recovery: [{{cell: a, {keys}}}]") == f"recovery[0]{said}"


@pytest.mark.parametrize(
    ("keys", "action"),
    [
        ("kubernetes: {}", ReplacePods()),
        (
            "kubernetes: {namespace: prod, selector: 'unit={unit}', evict: false}",
            ReplacePods("prod", "unit={unit}", evict=False),
        ),
        ("ecs: {cluster: prod, region: eu-west-1}", ReplaceTasks("prod", region="eu-west-1")),
    ],
)
def test_pods_are_of_a_group_or_chosen_by_labels_and_tasks_of_a_cluster(
    tmp_path: Path, keys: str, action: object
) -> None:
    assert remedy(tmp_path, f"{keys}, AUDIT").action == action


def test_a_service_has_the_name_of_its_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "systemctl").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    action = remedy(tmp_path, "systemd: 'vllm@{unit}', AUDIT").action
    assert isinstance(action, RestartService)
    assert action.command("a1").words[-2:] == ("--", "vllm@a1")


UNDO = RunCommand(("sh", "-c", "old"))


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        (
            "command: [sh, -c, new], undo: [sh, -c, old]",
            RollPolicy(RunCommand(("sh", "-c", "new")), __file__, UNDO),
        ),
        (
            "ecs: {cluster: prod}, undo: [sh, -c, old]",
            RollPolicy(ReplaceTasks("prod", deploy=True), __file__, UNDO),
        ),
        (
            "kubernetes: {image: 'e:2', undo_image: 'e:1', namespace: prod}, parallel: 2",
            RollPolicy(SetImage("e:2", "prod"), __file__, SetImage("e:1", "prod"), parallel=2),
        ),
        ("kubernetes: {image: 'e:2'}", RollPolicy(SetImage("e:2"), __file__)),
    ],
)
def test_a_roll_has_a_way_there_and_may_have_one_back(tmp_path: Path, keys: str, policy: RollPolicy) -> None:
    assert read(tmp_path, f"roll: {{{keys}, AUDIT}}").roll == policy


@pytest.mark.parametrize(
    ("operator", "more", "said"),
    [
        ("roll: {parallel: 2, AUDIT}", "", "expected one of command, kubernetes, ecs, found none"),
        ("roll: {command: [sh], ecs: {cluster: c}, AUDIT}", "", ", found command and ecs"),
        ("roll: {kubernetes: {image: e}, undo: [sh], AUDIT}", "", "kubernetes takes undo_image instead"),
        ("roll: {kubernetes: {}, AUDIT}", "", ".kubernetes.image: required key is missing"),
        ("recovery: [now]", "", "recovery[0]: expected a mapping, found 'now'; write {name: now, …}"),
        ("recovery: [{cell: b, command: [sh], AUDIT}]", "", "recovery[0].cell: no cell has the name 'b'"),
        (
            "recovery: [{cell: a, command: [sh], AUDIT}, {cell: a, command: [sh], AUDIT}]",
            "",
            "recovery: duplicate cell 'a'",
        ),
        pytest.param(
            "leases: {}",
            "redis: 'redis://r'",
            "leases: with redis, gates agree there on who acts",
            marks=needs("redis"),
        ),
        ("recover: []", "", "recover: unknown key; did you mean 'recovery'?"),
        ("- roll", "", "expected a mapping"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, operator: str, more: str, said: str) -> None:
    assert said in problem(tmp_path, operator, more)
