"""The wheel: what it installs, and that it lives beside packages which are called as our folders are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.extras import needs
from tests.real.programs import ROOT, free_port
from tests.wire.process import eventually

pytestmark = pytest.mark.nightly

SOURCES = ("cellgate",)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed() -> list[str]:
    """All files of the package by the path they are imported from."""
    files = (path for name in SOURCES for path in (ROOT / name).rglob("*") if path.is_file())
    paths = [str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"]
    return sorted(path if path.startswith("cellgate/") else f"cellgate/{path}" for path in paths)


def build(kind: str, source: Path, target: Path) -> Path:
    """As `pip wheel` and `python -m build --sdist` do, with what is installed here."""
    code = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", code, target, cwd=source)
    [path] = target.iterdir()
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as a clone has them, so that no build leaves anything in this folder."""
    tree = tmp_path_factory.mktemp("tree")
    names = [*SOURCES, "pyproject.toml", "README.md", "LICENSE"]
    archive = subprocess.run(
        ["tar", "-c", "--exclude=__pycache__", *names], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def files_of(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        assert all(entry.external_attr >> 28 != 0o12 for entry in archive.infolist()), "a symbolic link"
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def test_a_wheel_holds_the_files_of_the_package_and_no_others(wheel: Path) -> None:
    assert files_of(wheel) == listed()


def test_a_wheel_tells_what_it_is(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
        told = archive.read(name).decode()
        assert "cellgate/py.typed" in archive.namelist()
    assert "License-Expression: Apache-2.0\n" in told
    for extra in ("dns", "ecs", "k8s", "kv-events", "otel"):
        assert f"Provides-Extra: {extra}\n" in told


def test_an_sdist_makes_the_same_wheel(tree: Path, tmp_path: Path) -> None:
    for name in ("sdist", "source", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        archive.extractall(tmp_path / "source", filter="data")
    [source] = (tmp_path / "source").iterdir()
    assert files_of(build("wheel", source, tmp_path / "wheel")) == listed()


def test_it_lives_beside_packages_called_proxy_and_router(wheel: Path, tmp_path: Path) -> None:
    for name in ("proxy", "router", "policies", "probes"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
        (tmp_path / "theirs" / name / "__init__.py").write_text("OWNER = 'others'\n")
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", "theirs"]
    run(sys.executable, *install, wheel, cwd=tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'theirs')!r})\n"
        "import proxy, router, policies, probes, cellgate\n"
        "print({each.OWNER for each in (proxy, router, policies, probes)}, cellgate.__file__)\n"
        "from cellgate.proxy.cli.main import main; main(['--version'])\n"
    )
    said = run(sys.executable, "-c", code, cwd=tmp_path)
    assert said.startswith(f"{{'others'}} {tmp_path}")
    assert "cellgate" in said.splitlines()[-1]


@needs("demo")
def test_a_demo_of_the_wheel_runs_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """With the packages that are installed here, and nothing of this repository."""
    (tmp_path / "empty").mkdir()
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", "installed"]
    run(sys.executable, *install, wheel, cwd=tmp_path)
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "cellgate", "demo", "--listen", f"127.0.0.1:{free_port()}"]
    with (tmp_path / "told").open("wb") as output:
        demo = subprocess.Popen(command, cwd=tmp_path / "empty", env=environ, stdout=output, stderr=output)
    told = (tmp_path / "told").read_text
    try:
        assert eventually(lambda: "Ctrl-C stops" in told() or demo.poll() is not None)
        typed = re.findall(r"(curl -N .*?-d '.*?')", told(), re.DOTALL)[0]
        assert run(*shlex.split(typed.replace("\\\n", " ")), cwd=tmp_path).endswith("data: [DONE]\n\n")
    finally:
        demo.terminate()
        demo.wait()
    assert demo.returncode == 0, told()
    assert list((tmp_path / "empty").iterdir()) == []
