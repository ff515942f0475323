"""The files of deploy/ as kubectl, Docker Compose and systemd read them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.manifests import DEPLOY, KUSTOMIZED, Thing, by_folder, containers, things, validate
from tests.real.programs import find


def rendered(folder: Path) -> list[Thing]:
    """The same as kustomize makes it, which adds the configuration and the images."""
    command = [find("kubectl"), "kustomize", str(folder)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(out))


@pytest.mark.nightly
@pytest.mark.parametrize("folder", KUSTOMIZED, ids=by_folder)
def test_kustomize_renders_what_kubernetes_knows(folder: Path) -> None:
    made = rendered(folder)
    kinds = sorted(thing["kind"] for thing in made)
    assert kinds == sorted([*(thing["kind"] for thing in things(folder)), "ConfigMap"])
    maps = {thing["metadata"]["name"] for thing in made if thing["kind"] == "ConfigMap"}
    for thing in made:
        validate(thing)
    for container, pod in containers(made):
        assert re.search(r":[\w.-]+$", container["image"]), container["image"]
        named = {volume["configMap"]["name"] for volume in pod.get("volumes", ()) if "configMap" in volume}
        assert named <= maps


@pytest.mark.nightly
def test_docker_compose_takes_the_file() -> None:
    file = str(DEPLOY / "compose" / "compose.yaml")
    command = [find("docker-compose"), "-f", file, "config", "--quiet"]
    environ = {"PATH": os.environ["PATH"], "CELLGATE_ADMIN_TOKEN": "word"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    del environ["CELLGATE_ADMIN_TOKEN"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert "a word that the status page asks for" in done.stderr


def test_systemd_knows_every_line_of_the_units(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed; type:  apt-get install systemd")
    for file in DEPLOY.rglob("*.service"):
        # The programs that it starts are not here, but something has to be.
        copy = tmp_path / file.name
        copy.write_text(re.sub(r"^(Exec\w+=)\S+", r"\1/bin/true", file.read_text(), flags=re.MULTILINE))
        done = subprocess.run([program, "verify", copy], capture_output=True, text=True, check=False)
        said = [line for line in done.stderr.splitlines() if copy.name in line]
        assert not said
