"""The files of deploy/: schemas know every field, configurations are good, and what they name exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import cast

import boto3  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from moto import mock_aws

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides
from tests.manifests import (
    DEPLOY,
    KUSTOMIZED,
    ROOT,
    Thing,
    by_folder,
    compose,
    containers,
    pod_templates,
    selects,
    things,
    validate,
)

TASKS = [
    DEPLOY / "agent" / "ecs-task.json",
    *(DEPLOY / "ecs" / f"{name}.json" for name in ("gate", "leader", "follower", "sidecar")),
]
# That of recovery/ names files which recovery/test_examples.py makes.
CONFIGURATIONS = sorted(set(DEPLOY.rglob("cellgate*.yaml")) - set(DEPLOY.glob("recovery/*")))


@pytest.mark.parametrize("folder", KUSTOMIZED, ids=by_folder)
def test_kubernetes_knows_every_field_selectors_mean_pods_and_gates_have_time_for_streams(
    folder: Path,
) -> None:
    described = things(folder)
    pods = [template["metadata"]["labels"] for thing in described for template in pod_templates(thing)]
    for thing in described:
        validate(thing)
        if thing["kind"] in ("Service", "PodDisruptionBudget"):
            assert any(selects(thing["spec"]["selector"], labels) for labels in pods), thing
    gates = [pod for container, pod in containers(described) if container["name"] == "cellgate"]
    assert gates
    assert all(pod["terminationGracePeriodSeconds"] > needed_s(folder / "cellgate.yaml") for pod in gates)


def needed_s(file: Path) -> float:
    """What a gate with this configuration needs to end."""
    timeouts = yaml.safe_load(file.read_text())["timeouts"]
    found: float = timeouts["drain_delay_s"] + timeouts["drain_s"]
    return found


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containerz": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(pod)


def test_the_gate_of_a_cell_may_read_pods_and_nothing_else() -> None:
    [role] = [thing for thing in things(DEPLOY / "kubernetes" / "cell") if thing["kind"] == "Role"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_what_stays_for_the_gate_goes_when_the_gate_has_gone() -> None:
    sidecar = things(DEPLOY / "kubernetes" / "sidecar")
    waits = [
        container["lifecycle"]["preStop"]["exec"]["command"]
        for container, _ in containers(sidecar)
        if container["name"] != "cellgate"
    ]
    assert len(waits) == 4
    with socket.create_server(("127.0.0.1", 0)) as gate:
        port = gate.getsockname()[1]
        environ = {**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"}
        waiting = [
            subprocess.Popen([word.replace("9901", str(port)) for word in command], env=environ)
            for command in waits
        ]
        for _ in waiting:
            gate.accept()[0].close()
        assert all(each.poll() is None for each in waiting)
    assert [each.wait(30) for each in waiting] == [0] * 4


def test_every_configuration_is_good(tmp_path: Path) -> None:
    """Where its pod has its secrets."""
    assert len(CONFIGURATIONS) > 3
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("helm"))
    for file in CONFIGURATIONS:
        here = tmp_path / "deploy" / file.relative_to(DEPLOY)
        for name in re.findall(r"/etc/cellgate-secrets/([\w-]+)", file.read_text()):
            (tmp_path / name).write_text("t" * 32)
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_text(file.read_text().replace("/etc/cellgate-secrets", str(tmp_path)))
        assert load(str(here), Overrides(), {"POD_NAME": "big-0"}).fleet is not None, file


def test_ecs_takes_every_task_definition_and_a_gate_ends_before_it_is_killed() -> None:
    with mock_aws():
        # boto3 checks all fields against the API's own model before it asks.
        client = boto3.client("ecs", "eu-west-1", aws_access_key_id="none", aws_secret_access_key="none")
        for file in TASKS:
            definition = cast("Thing", json.loads(file.read_text()))
            made = client.register_task_definition(**definition)["taskDefinition"]
            assert made["family"] == definition["family"]
            assert all(container.get("stopTimeout", 0) <= 120 for container in made["containerDefinitions"])
    for task, name in (("gate", "cellgate"), ("sidecar", "cellgate-sidecar")):
        gate = ecs_containers(task)["cellgate"]
        assert needed_s(DEPLOY / "ecs" / f"{name}.yaml") < gate["stopTimeout"]


def ecs_containers(task: str) -> dict[str, Thing]:
    """Those of a task definition, by name."""
    made = json.loads((DEPLOY / "ecs" / f"{task}.json").read_text())["containerDefinitions"]
    return {container["name"]: container for container in made}


def test_beside_a_gate_on_ecs_nothing_is_reached_but_by_it_and_the_engine_ends_last() -> None:
    found = ecs_containers("sidecar")
    [unit] = load(str(DEPLOY / "ecs" / "cellgate-sidecar.yaml"), Overrides(), {}).fleet.units
    host, port = unit.url.removeprefix("http://").split(":")
    assert {f"--host={host}", f"--port={port}"} <= set(found["engine"]["command"])
    assert unit.nodes[0].agent in found["cellgate-agent"]["command"]
    assert [name for name, container in found.items() if "portMappings" in container] == ["cellgate"]
    # ECS stops what depends on others before those.
    assert found["cellgate"]["dependsOn"] == [{"containerName": "engine", "condition": "START"}]


def test_compose_has_all_that_it_mounts_and_builds_and_is_reached_from_this_machine_alone() -> None:
    stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for service in compose().values():
        for volume in service.get("volumes", ()):
            assert (DEPLOY / "compose" / volume.partition(":")[0]).is_file(), volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service.get("build", {}).get("target", "runtime") in stages
    gate = yaml.safe_load((DEPLOY / "compose" / "cellgate.yaml").read_text())
    assert gate["trusted"] == [compose()["ingress"]["networks"]["cell"]["ipv4_address"]]


def test_haproxy_of_compose_is_the_one_that_is_tested() -> None:
    """But for the addresses, and the lines that say why."""

    def lines(path: Path) -> list[str]:
        text = path.read_text()
        return [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]

    ours, tested = lines(DEPLOY / "compose" / "haproxy.cfg"), lines(DEPLOY / "ingress" / "haproxy.cfg")
    assert ours[:-1] == tested[: len(ours) - 1]
    assert ours[-1].replace("gate", "x").split()[3:] == ["agent-addr", "x", "agent-port", "9902"]


def test_what_stands_on_the_pages_of_others_is_good(tmp_path: Path) -> None:
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("with-*.md"))]
    for block in [block for page in pages for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]:
        thing = yaml.safe_load(block)
        if "kind" in thing:
            validate(thing)
            continue
        file = tmp_path / "cellgate.yaml"
        file.write_text(yaml.safe_dump({"cells": thing.get("config", thing)["cells"]}))
        assert load(str(file), Overrides(), {}).fleet is not None, block
