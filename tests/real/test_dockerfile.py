"""The image without an engine that builds it: the steps of the Dockerfile, run in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from cellgate.proxy.cli.main import COMMANDS
from tests.extras import needs
from tests.real.programs import ROOT, free_port, running
from tests.wire.process import eventually

pytestmark = pytest.mark.nightly

EXTRAS = "k8s jwt"
PATHS_OF_THE_IMAGE = re.compile(r"(?<![\w.])/(opt|src|wheels)\b")


class Step(NamedTuple):
    """One line of the Dockerfile, continuations joined."""

    stage: str
    word: str
    rest: str


def steps() -> Iterator[Step]:
    """All of them; the last stage has no name."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    stage = ""
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.partition(" AS ")[2]
        yield Step(stage, word, rest)


def only(word: str, stage: str = "") -> str:
    """The only such line of a stage; of the last one, which is the image."""
    [step] = [step for step in steps() if (step.stage, step.word) == (stage, word)]
    return step.rest


def copied(step: Step) -> list[str]:
    """What a COPY takes from the folder of the sources."""
    return [] if step.rest.startswith("--from") else shlex.split(step.rest)[:-1]


def is_sent(path: str) -> bool:
    """Whether .dockerignore, read from its end, lets it in."""
    for line in reversed((ROOT / ".dockerignore").read_text().split()):
        if fnmatch(path, line.removeprefix("!")):
            return line.startswith("!")
    return True


def test_whatever_is_copied_is_there_and_is_sent_to_the_builder() -> None:
    paths = [path for step in steps() if step.word == "COPY" for path in copied(step)]
    assert "cellgate" in paths
    assert [path for path in paths if not (ROOT / path).exists() or not is_sent(path)] == []


def test_there_is_a_lock_for_each_extra_with_the_versions_that_are_tested() -> None:
    tested = set(re.findall(r"^\S+==\S+", (ROOT / "requirements/dev.lock").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"dev", "load", "test"}
    assert len(extras) == 6
    for extra in extras:
        pinned = re.findall(r"^\S+==\S+", (ROOT / f"requirements/{extra}.lock").read_text(), re.MULTILINE)
        assert pinned
        assert set(pinned) <= tested


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stage `build` leaves in /opt/cellgate, under another root."""
    root = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", root / "python"], check=True)
    environ = {**os.environ, "PATH": f"{root}/python/bin:{os.environ['PATH']}", "EXTRAS": EXTRAS}
    for step in steps():
        if step.stage == "build" and step.word == "RUN":
            command = PATHS_OF_THE_IMAGE.sub(rf"{root}/\1", step.rest)
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=root / "src",
                env=environ,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        elif step.stage == "build" and step.word == "WORKDIR":
            (root / step.rest.lstrip("/")).mkdir()
        elif step.stage == "build" and step.word == "COPY":
            copy(copied(step), root / "src" / shlex.split(step.rest)[-1])
    return root / "opt" / "cellgate"


def copy(paths: list[str], target: Path) -> None:
    """As COPY does, .dockerignore heeded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        source = ROOT / path
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def test_the_image_has_the_gate_its_extras_and_nothing_to_install_with(image: Path) -> None:
    files = [str(ROOT / "deploy" / "kubernetes" / "cell" / "cellgate.yaml"), "no-such-file"]
    good, bad = (
        subprocess.run([image / "bin" / "cellgate", "check", "-c", file], capture_output=True, check=False)
        for file in files
    )
    assert (good.returncode, bad.returncode) == (0, 2), good.stderr
    code = (
        "import jwt, kubernetes_asyncio, importlib.util as u, cellgate; print(u.find_spec('pip'), cellgate)"
    )
    out = subprocess.run(
        [image / "bin" / "python", "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert out.stdout.startswith("None ")
    assert str(image) in out.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_works_with_what_the_image_has(command: str, image: Path) -> None:
    run = subprocess.run(
        [image / "bin" / "cellgate", command, "--help"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


@needs("top")
def test_top_draws_with_what_the_image_has(image: Path) -> None:
    command = [str(image / "bin" / "cellgate"), "top", "--once", "--admin", "127.0.0.1:1"]
    assert "no gate answers" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_image_tells_what_it_is_made_of(image: Path) -> None:
    bill = json.loads((image / "sbom.cdx.json").read_text())
    named = {component["name"] for component in bill["components"]}
    assert {"aiohttp", "kubernetes-asyncio", "pyjwt"} <= named
    assert not named & {"pip", "setuptools", "pytest"}


def test_the_image_runs_as_a_user_with_labels_on_a_base_that_can_be_pinned() -> None:
    assert only("USER", "runtime") == "10001"
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", only("LABEL"))
    assert labels == ["title", "description", "licenses", "version", "revision", "source"]
    bases = [step.rest.split()[0] for step in steps() if step.word == "FROM"]
    assert bases == ["$BASE", "$BASE", "runtime", "runtime"]


def test_the_health_check_sees_whether_the_gate_is_alive(image: Path, tmp_path: Path) -> None:
    port = free_port()
    command = json.loads(only("HEALTHCHECK").partition(" CMD ")[2])
    check = [str(image / "bin" / command[0]), *(word.replace("9901", str(port)) for word in command[1:])]
    assert json.loads(only("ENTRYPOINT")) == ["cellgate"]
    words = json.loads(only("CMD"))
    (tmp_path / "cellgate.yaml").write_text(
        "cells: [{name: a, units: [{name: a1, url: 'http://127.0.0.1:1'}]}]"
    )
    places = {"/etc/cellgate/cellgate.yaml": str(tmp_path / "cellgate.yaml")}
    places |= {"0.0.0.0:8000": "127.0.0.1:0", "0.0.0.0:9901": f"127.0.0.1:{port}"}
    serve = [str(image / "bin" / "cellgate"), *(places.get(word, word) for word in words)]

    def alive() -> bool:
        return subprocess.run(check, capture_output=True, check=False).returncode == 0

    assert not alive()
    with running(serve, tmp_path / "log") as gate:
        assert eventually(alive), (tmp_path / "log").read_text()
        gate.send_signal(signal.SIGINT)
        gate.wait(30)
    assert not alive()


def test_a_unit_of_compose_starts_with_what_its_stage_has(image: Path, tmp_path: Path) -> None:
    for step in steps():
        if (step.stage, step.word) == ("simunit", "COPY"):
            copy(copied(step), tmp_path / shlex.split(step.rest)[-1])
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())
    python, *words = json.loads(only("ENTRYPOINT", "simunit"))
    places = {"0.0.0.0": "127.0.0.1", "8000": "0"}
    command = [*(places.get(word, word) for word in words), *compose["services"]["a1"]["command"]]
    unit = subprocess.Popen([image / "bin" / python, *command], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert unit.stdout is not None
        assert json.loads(unit.stdout.readline())["name"] == "a1"
    finally:
        unit.terminate()
        unit.communicate(timeout=10)
