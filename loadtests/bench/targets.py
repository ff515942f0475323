"""What can stand between the load generator and the engine, and how each is started.

Every target is one process, one worker, before the same two ports of the engine, with no access log.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.bench import processes

_HAPROXY = """\
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend gate
  bind 127.0.0.1:{port}
  default_backend units
backend units
  balance leastconn
  option httpchk GET /health
  server unit1 127.0.0.1:{units[0]} check
  server unit2 127.0.0.1:{units[1]} check
"""
_INSTALL_HAPROXY = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "haproxy"]


@dataclass(frozen=True, slots=True)
class Target:
    """A running target: the port to send to, the process whose CPU counts (None: no proxy), its log."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path(os.devnull)

    def cpu_s(self) -> float:
        """CPU the proxy has used so far, in seconds."""
        return processes.cpu_s(self.process.pid) if self.process else 0.0

    def stop(self) -> None:
        """End the target's process."""
        if self.process:
            processes.stop(self.process)


def start(name: str, units: Sequence[int], folder: Path) -> Target:
    """Start the target `name` before the engine's ports `units` and wait for it; its files go to `folder`."""
    return STARTERS[name](units, folder)


def _direct(units: Sequence[int], _folder: Path) -> Target:
    return Target("direct", units[0])


def _haproxy(units: Sequence[int], folder: Path) -> Target:
    _need_haproxy()
    port = processes.free_port()
    config = folder / "haproxy.cfg"
    config.write_text(_HAPROXY.format(port=port, units=units))
    return _launch("haproxy", ["haproxy", "-db", "-f", str(config)], port, (port, "/health"), folder)


def _bare(units: Sequence[int], folder: Path) -> Target:
    port = processes.free_port()
    command = [sys.executable, "-m", "loadtests.bench.bare", str(port), *map(str, units)]
    return _launch("bare", command, port, (port, "/health"), folder)


def _cellgate(units: Sequence[int], folder: Path) -> Target:
    port, admin = processes.free_port(), processes.free_port()
    command = [sys.executable, "-m", "proxy", "serve", "--policy", "least_load"]
    command += ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
    for unit in units:
        command += ["--unit", f"http://127.0.0.1:{unit}"]
    return _launch("cellgate", command, port, (admin, "/readyz"), folder)


STARTERS: dict[str, Callable[[Sequence[int], Path], Target]] = {
    "haproxy": _haproxy,
    "bare": _bare,
    "cellgate": _cellgate,
    "direct": _direct,
}


def _launch(name: str, command: Sequence[str], port: int, ready: tuple[int, str], folder: Path) -> Target:
    log = folder / f"{name}.log"
    process = processes.start(command, log)
    try:
        processes.wait_ready(process, *ready, log)
    except BaseException:
        processes.stop(process)
        raise
    return Target(name, port, process, log)


def _need_haproxy() -> None:
    if shutil.which("haproxy"):
        return
    if os.geteuid() != 0:
        raise RuntimeError(f"HAProxy is not installed. Type:  sudo {' '.join(_INSTALL_HAPROXY)}")
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(_INSTALL_HAPROXY, check=True, stdout=subprocess.DEVNULL)
