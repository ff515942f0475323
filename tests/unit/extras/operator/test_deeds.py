"""Each way to act on a unit, its module and its time; ECS, Kubernetes, Leases, and deploy/recovery."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import yaml
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from cellgate.extras import orchestrators
from cellgate.extras.operator import actions, leases
from cellgate.extras.operator.action_settings import (
    CallWebhook,
    Remedy,
    ReplacePods,
    ReplaceTasks,
    RestartService,
    RunCommand,
    SetImage,
    UnitAction,
)
from cellgate.extras.operator.kubernetes import rolled
from cellgate.extras.operator.leases import CLAIMS, CLAIMS_MAX
from cellgate.extras.operator.plan import Claim, RecoveryReport, RecoveryResult
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides
from tests.aws import cluster, start
from tests.sockets.extras.operator.test_recovery_deeds import ABOUT


def act(remedy: Remedy) -> RecoveryReport:
    async def main() -> RecoveryReport:
        return await actions.action_runner(ssl.create_default_context)(remedy, ABOUT)

    return asyncio.run(main())


def test_a_service_is_restarted_by_systemctl_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orchestrator that takes too long is given up. Every way is known."""
    (tmp_path / "systemctl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "systemctl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    report = act(Remedy("audit", RestartService("vllm@{unit}.service")))
    assert report.result is RecoveryResult.OK
    assert report.output == "--no-ask-password --no-block restart -- vllm@a1.service\n"

    async def forever(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setitem(actions._ORCHESTRATED, ReplacePods, forever)
    report = act(Remedy("audit", ReplacePods(), timeout_s=0.05))
    assert report.result is RecoveryResult.TIMEOUT
    assert report.detail == "not finished within 0.05 s; a part may have been done"
    orchestrated = set(get_args(UnitAction)) - {RunCommand, CallWebhook, RestartService}
    assert set(actions._ORCHESTRATED) == orchestrated


# Units in Amazon ECS are acted on. The API is moto's, asked by boto3 as the real one is.

DEPLOY = Path(__file__).parents[4] / "deploy"
__all__ = ["cluster"]
ACTION = ReplaceTasks("prod", region="eu-west-1")
DEPLOYMENT = ReplaceTasks("prod", region="eu-west-1", deploy=True)
ABOUT_TASKS = {"unit": "big-0", "id": "big-0-7", "reason": "gone\n" * 200}


def replace_tasks(action: ReplaceTasks = ACTION, **about: Any) -> RecoveryReport:
    return asyncio.run(actions.replace_tasks(action, {**ABOUT_TASKS, **about}))


def described(cluster: Any, *arns: str) -> list[tuple[str, str]]:
    tasks = cluster.describe_tasks(cluster="prod", tasks=list(arns))["tasks"]
    return [(task["lastStatus"], task.get("stoppedReason", "")[:22]) for task in tasks]


def service_task(service: str, definition: str) -> dict[str, Any]:
    arn = f"arn:aws:ecs:eu-west-1:1:task-definition/{definition}"
    tags = [{"key": "cellgate:unit", "value": "big-0"}]
    return {"taskArn": "arn", "group": f"service:{service}", "taskDefinitionArn": arn, "tags": tags}


class Client:
    """The API that boto3 asks; which rights that takes. Only `granted` tasks may be stopped."""

    def __init__(self) -> None:
        self.real = orchestrators.connect("eu-west-1")
        self.used: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        self.granted = 2
        events = self.real.meta.events
        events.register("before-call.ecs", lambda model, **_: self.used.add(f"ecs:{model.name}"))
        events.register(
            "provide-client-params.ecs.UpdateService", lambda params, **_: self.asked.append(params)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def stop_task(self, **asked: Any) -> Any:
        if not self.granted:
            code = {"Code": "AccessDeniedException", "Message": "User: gate is not authorized"}
            raise ClientError({"Error": code}, "StopTask")
        self.granted -= 1
        return self.real.stop_task(**asked)


def test_all_tasks_of_the_unit_are_stopped_and_no_others(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exactly the rights that deploy/ gives; a right that is missing is named."""
    client = Client()
    monkeypatch.setattr(actions, "connect", lambda _: client)
    report = replace_tasks()
    assert report.result is RecoveryResult.REFUSED
    assert report.detail == (
        "0 tasks with the tag cellgate:unit=big-0 in cluster prod, expected 1 to 256; nothing was done"
    )
    arns = [start(cluster, "big-0", "leader", 2), start(cluster, "big-0", "follower", 2)]
    other = start(cluster, "big-1", "leader", 1)
    report = replace_tasks(DEPLOYMENT)
    assert report.result is RecoveryResult.REFUSED
    assert "belongs to no service; nothing was done" in report.detail
    report = replace_tasks()
    assert (report.result, report.detail) == (RecoveryResult.OK, "stopped 2 of 2 tasks")
    assert sorted(report.output.splitlines()) == sorted(arns)
    assert described(cluster, *arns) == [("STOPPED", "cellgate big-0-7: gone")] * 2
    assert described(cluster, other)[0][0] != "STOPPED"
    assert client.used == allowed("recovery/ecs-recovery-role.json")
    for role in ("leader", "follower"):
        start(cluster, "big-0", role, 2)
    for number, result in enumerate((RecoveryResult.REFUSED, RecoveryResult.FAILED)):
        client.granted = number
        report = replace_tasks()
        assert report.result is result
        assert report.detail.startswith(
            f"stopped {number} of 2 tasks; the gate's role lacks a right: allow ecs:StopTask ("
        )


def test_the_services_of_a_unit_get_the_newest_revision(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exactly the rights that deploy/ gives."""
    client = Client()
    monkeypatch.setattr(actions, "connect", lambda _: client)
    tasks = [service_task(service, "engine:1") for service in ("lead", "follow", "follow")]
    for name in ("lead", "follow"):
        cluster.create_service(cluster="prod", serviceName=name, taskDefinition="engine:1", desiredCount=1)
    monkeypatch.setattr(actions, "running_tasks", lambda *_: tasks)
    report = replace_tasks(DEPLOYMENT)
    assert (report.result, report.detail) == (RecoveryResult.OK, "deployed 2 of 2 services")
    common = {"cluster": "prod", "taskDefinition": "engine", "forceNewDeployment": True}
    assert client.asked == [{"service": "follow"} | common, {"service": "lead"} | common]
    read = {"ecs:ListTasks", "ecs:DescribeTasks", "iam:PassRole"}
    assert client.used | read == allowed("recovery/ecs-roll-role.json")


def allowed(name: str) -> set[str]:
    policy = json.loads((DEPLOY / name).read_text())
    return {action for statement in policy["Statement"] for action in statement["Action"]}


# What a set is changed to so that one of its groups gets another image.


@pytest.mark.parametrize("strategy", [None, {"type": "RollingUpdate", "rollingUpdateConfiguration": None}])
def test_fields_that_are_null_are_as_if_they_were_not_there(strategy: dict[str, Any] | None) -> None:
    template = {"metadata": {"annotations": None}, "spec": {"containers": [{"name": "e", "image": "old"}]}}
    spec = {"leaderWorkerTemplate": {"workerTemplate": template}, "rolloutStrategy": strategy}
    after = rolled({"spec": spec}, [], SetImage("new"), 2)["spec"]
    assert after["rolloutStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"partition": 2},
    }
    assert after["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["image"] == "new"


# What is written into a Lease, and read from it.

CLAIM = Claim("u1", "c", "g1", "u1-1", attempt=2, rest_s=30.0)


def test_cells_have_names_of_their_own_and_a_token_grows_with_each_holder_and_not_with_renewals() -> None:
    names = [leases.lease_name(cell) for cell in ("east", "East", "e_st", "e-st", "e.st", "e-", "x" * 128)]
    assert names[0] == "cellgate-east"
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[a-z0-9]([a-z0-9-]{,251}[a-z0-9])?", name) for name in names)
    lease = leases.new_lease("c")
    for gate, token in (("g1", 1), ("g1", 1), ("g2", 2), ("g1", 3)):
        lease = leases.held(lease, gate, 10.0, "2026-01-01T00:00:00.000Z")
        assert (leases.holder(lease), leases.lease_token(lease)) == (gate, token)
    assert leases.holder(leases.released(lease)) == ""


def test_the_last_claim_of_a_unit_is_kept_with_its_time_and_only_so_many_are() -> None:
    lease = leases.claimed(leases.new_lease("c"), CLAIM, 100.0)
    (found,) = leases.claims(lease, "c", 105.0)
    assert (found.unit, found.id, found.attempt, found.rest_s, found.age_s) == ("u1", "u1-1", 2, 30.0, 5.0)
    assert leases.claims(leases.withdrawn(lease, CLAIM), "c", 105.0) == []
    for number in range(CLAIMS_MAX + 3):
        lease = leases.claimed(lease, Claim(f"u{number}", "c", "g", "id", 1, 1.0), 100.0)
    units = [claim.unit for claim in leases.claims(lease, "c", 100.0)]
    assert (len(units), units[0]) == (CLAIMS_MAX, "u3")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"u": 5}', '{"u": {"gate": "g"}}', '{"u": {"gate": 1, "id": 2, "attempt": "x"}}']
)
def test_what_is_no_claim_is_left_out(text: str) -> None:
    lease = leases.new_lease("c")
    lease["metadata"]["annotations"] = {CLAIMS: text}
    assert leases.claims(lease, "c", 1.0) == []


# The examples of deploy/recovery: they are what they claim to be, and call what they should.

FOLDER = Path(__file__).parents[4] / "deploy" / "recovery"
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
    calls.write_text("")
    told = {f"CELLGATE_{name.upper()}": value for name, value in about.items()}
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), **told}
    done = subprocess.run([FOLDER / script, word], env=env, capture_output=True, text=True, check=False)
    return Ran(done.returncode, calls.read_text().splitlines(), done.stderr)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_every_script_can_be_read_by_a_shell(shell: str) -> None:
    scripts = sorted(FOLDER.glob("*.sh"))
    assert [script.name for script in scripts] == ["ecs-stop-task.sh", "lws-delete-group.sh"]
    for script in scripts:
        assert subprocess.run([shell, "-n", script], check=False).returncode == 0
        assert os.access(script, os.X_OK)


def test_a_group_of_a_leader_worker_set_is_deleted_as_one_and_no_other_unit(tmp_path: Path) -> None:
    kubectl = ("kubectl", 'printf "%s\\n" "$8" >> "$CALLS"\n')
    for unit in ("llama", "llama-", "llama-0a"):
        ran = run(tmp_path, "lws-delete-group.sh", "inference", kubectl, unit=unit)
        assert (ran.code, ran.calls) == (2, [])
        assert f"unit {unit} is not named SET-INDEX" in ran.said
    ran = run(tmp_path, "lws-delete-group.sh", "inference", kubectl, unit="my-llama-12")
    call, selector = ran.calls
    assert ran.code == 0
    assert call.startswith(
        "[kubectl][--namespace][inference][--request-timeout=20s][delete][pod][--wait=false]"
    )
    labels = "leaderworkerset.sigs.k8s.io"
    assert selector == f"{labels}/name=my-llama,{labels}/group-index=12"


AWS = """
case "$2 $6" in
  "list-tasks n0") echo arn:0 arn:1 ;;
  "list-tasks n1") echo arn:2 ;;
  "list-tasks n9") echo None ;;
esac
"""
ABOUT_EXAMPLE = {"id": "a1-7", "reason": "gone " * 100}


def test_the_tasks_of_all_nodes_are_stopped(tmp_path: Path) -> None:
    """One that cannot be stopped spares no other, and no task at all is a failure."""
    ran = run(tmp_path, "ecs-stop-task.sh", "gpus", ("aws", AWS), nodes="n0,n1", **ABOUT_EXAMPLE)
    stopped = [call.split("][") for call in ran.calls if "stop-task" in call]
    assert ran.code == 0
    assert [call[1:7] for call in stopped] == [
        ["ecs", "stop-task", "--cluster", "gpus", "--task", f"arn:{number}"] for number in range(3)
    ]
    assert all(call[8].startswith("cellgate a1-7: gone gone") for call in stopped)
    assert all(len(call[8]) == 200 for call in stopped)
    ran = run(tmp_path, "ecs-stop-task.sh", "gpus", ("aws", AWS), nodes="n9", **ABOUT_EXAMPLE)
    assert ran.code == 3
    assert "no task of n9 runs in gpus" in ran.said
    refuses = AWS + 'case "$2 $6" in "stop-task arn:1") exit 5 ;; esac\n'
    ran = run(tmp_path, "ecs-stop-task.sh", "gpus", ("aws", refuses), nodes="n0,n1", **ABOUT_EXAMPLE)
    assert ran.code == 1
    assert sum("stop-task" in call for call in ran.calls) == 3


def test_the_example_of_a_configuration_is_one_and_the_rights_are_those_that_the_script_needs(
    tmp_path: Path,
) -> None:
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
    role, binding = yaml.safe_load_all((FOLDER / "lws-rbac.yaml").read_text())
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
