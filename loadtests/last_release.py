"""The last release, run beside this version with the packages that are installed for this one."""

import subprocess
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path

from loadtests.kit.gate import Program

ROOT = Path(__file__).resolve().parents[1]
STANDS_FOR = "765b2c5e22349176014def3cb62c9bfd1250cfc2"
"""While nothing has been released: a commit whose gates have the heartbeat that this version's look for."""


def name() -> str:
    """The tag of the last release before this commit, else the commit that stands for it."""
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD~1")
    return tag.stdout.decode().strip() if tag.returncode == 0 else STANDS_FOR


_RUN = """\
import sys, {module} as entry
assert entry.__file__.startswith({folder!r}), entry.__file__
sys.exit(entry.{function}())
"""


def is_here() -> bool:
    """Whether this clone has it; a shallow one does not."""
    return _git("cat-file", "-e", f"{name()}^{{commit}}").returncode == 0


def unpack(folder: Path) -> Program:
    """Its gate, from its tree in `folder`. Raises RuntimeError when this clone does not have it."""
    archive = _git("archive", "--format=tar", name())
    if archive.returncode != 0:
        raise RuntimeError(f"{name()} is not in this clone; type:  git fetch --unshallow --tags")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["cellgate"].partition(":")
    # What is in the folder comes before what is installed; that it does, is asserted.
    code = _RUN.format(module=module, function=function, folder=str(folder))
    return Program((sys.executable, "-c", code), folder)


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
