"""`cellgate demo`, its arguments and how it runs: a gate with simulated leader/follower units and their
agents, in the foreground.

With URLs it is a gate before these units instead. Nothing outlives this process: the kernel ends what it has
started with it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import yaml

from cellgate.proxy.cli.terminal import shown
from cellgate.proxy.config.load_process import ADMIN_TOKEN_VARIABLE
from cellgate.proxy.ingress.reasons import NOTHING_YET

READY_S = 60.0
SILENT_START_S = 2.0
"""So long nothing is said of units that are not up yet."""
REASONS = 5
CELLS = {"a": ("a1", "a2"), "b": ("b1",)}
_LEADER = "cellgate.extras.demo.demo_unit"
_FOLLOWER = "import os\nwhile os.read(0, 1): os.write(0, b'.')"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Real units, and where to listen."""
    parser.add_argument("urls", metavar="URL", nargs="*", help="real units; none: simulated ones")
    for name, port in (("listen", 8000), ("admin", 9901)):
        default = f"127.0.0.1:{port}, or a free port when that is taken"
        parser.add_argument(f"--{name}", metavar="HOST:PORT", help=f"default: {default}")


def run(args: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM; the exit code of the gate."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    args.listen = args.listen or f"127.0.0.1:{_usual_or_free(8000)}"
    args.admin = args.admin or f"127.0.0.1:{_usual_or_free(9901)}"
    try:
        with _children() as children, tempfile.TemporaryDirectory(prefix="cellgate-demo-") as folder:
            return _run(args, children, Path(folder))
    except KeyboardInterrupt:
        return 0


def _run(args: argparse.Namespace, children: Children, folder: Path) -> int:
    source, units = [part for url in args.urls for part in ("--unit", url)], list[DemoUnit]()
    if not args.urls:
        print("starting 3 simulated units (leader, follower and an agent each) ...", flush=True)
        units = [children.unit(name, folder) for names in CELLS.values() for name in names]
        file = folder / "cellgate.yaml"
        file.write_text(_configuration(units))
        source = ["-c", str(file)]
    # The status page's drain buttons need a token, even here: a page in a browser could be anybody's.
    token = os.environ.get(ADMIN_TOKEN_VARIABLE) or secrets.token_hex(4)
    command = ["-m", "cellgate", "serve", "--listen", args.listen, "--admin", args.admin, *source]
    gate = children.start(command, environ={ADMIN_TOKEN_VARIABLE: token})
    model = _wait_until_ready(gate, args)
    if model is not None:
        _explain(args, units, model, token)
    return gate.wait()


@dataclass(frozen=True, slots=True)
class DemoUnit:
    """A simulated unit that runs: the process of each node, and where its agent listens."""

    name: str
    url: str
    nodes: dict[str, int]
    agents: dict[str, str]


class Children:
    """What this process has started."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    def start(
        self, words: Sequence[str], *, environ: Mapping[str, str] = MappingProxyType({}), **options: Any
    ) -> subprocess.Popen[bytes]:
        """Python with these words, in a session of its own: Ctrl-C comes to this process alone."""
        child = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | environ,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            **options,
        )
        self._all.append(child)
        return child

    def unit(self, name: str, folder: Path) -> DemoUnit:
        """Start both nodes of a unit, and an agent for each."""
        port, (leader, follower) = _usual_or_free(0), socket.socketpair()
        with leader, follower:
            started = (
                self.start(["-m", _LEADER, "--port", str(port)], stdin=leader),
                self.start(["-c", _FOLLOWER], stdin=follower),
            )
        nodes = {f"{name}-{rank}": process.pid for rank, process in enumerate(started)}
        agents = {node: self._agent(node, pid, folder) for node, pid in nodes.items()}
        return DemoUnit(name, f"http://127.0.0.1:{port}", nodes, agents)

    def _agent(self, node: str, pid: int, folder: Path) -> str:
        file, address = folder / f"{node}.pid", f"127.0.0.1:{_usual_or_free(0)}"
        file.write_text(f"{pid}\n")
        quiet = subprocess.DEVNULL
        self.start(["-m", "cellgate", "agent", "--pid-file", str(file), "--listen", address], stderr=quiet)
        return address

    def end(self) -> None:
        """At once and without a word: who tries a gate has no streams to finish."""
        # The gate first, which would tell of the others.
        for child in reversed(self._all):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self._all:
            child.wait()


@contextmanager
def _children() -> Iterator[Children]:
    children = Children()
    try:
        yield children
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        children.end()


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent dies; it takes effect on a stopped process too."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _usual_or_free(port: int) -> int:
    """This port of 127.0.0.1 when nothing listens on it, else a free one."""
    with socket.socket() as probe:
        # Connections that have ended are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _configuration(units: Sequence[DemoUnit]) -> str:
    """The gate's file: with agents, so that the status page shows which node is at fault."""
    known = {
        unit.name: {
            "name": unit.name,
            "url": unit.url,
            "nodes": [
                {"name": node, "role": "follower" if number else "leader", "agent": address}
                for number, (node, address) in enumerate(unit.agents.items())
            ],
        }
        for unit in units
    }
    cells = [{"name": cell, "units": [known[name] for name in names]} for cell, names in CELLS.items()]
    return yaml.safe_dump({"cells": cells}, sort_keys=False)


def _wait_until_ready(gate: subprocess.Popen[bytes], args: argparse.Namespace) -> str | None:
    """The first model served once a unit is up; "" when none came up in time; None when the gate ended."""
    deadline = time.monotonic() + READY_S
    printed = PrintedReasons()
    while gate.poll() is None and time.monotonic() < deadline:
        # In this order: what a unit serves may be known only after it is up.
        if _get(args.admin, "/readyz") and (body := _get(args.listen, "/v1/models")):
            models = orjson.loads(body)["data"]
            if models:
                return str(models[0]["id"])
        printed.look(args.admin)
        time.sleep(0.05)
    return "" if gate.poll() is None else None


class PrintedReasons:
    """Says why units are not up, once they have had a while; each reason once."""

    def __init__(self) -> None:
        self._next = time.monotonic() + SILENT_START_S
        self._printed = {NOTHING_YET}

    def look(self, admin: str) -> None:
        """Say what is new, at most once a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        body = _get(admin, "/units")
        for unit in orjson.loads(body) if body else ():
            if unit["verdict"] == "up" or unit["reason"] in self._printed or len(self._printed) > REASONS:
                continue
            self._printed.add(unit["reason"])
            said = f"unit {unit['name']} ({unit['url']}) is {unit['verdict']}: {unit['reason']}"
            print(f"still waiting: {shown(said)}", flush=True)


def _get(address: str, path: str) -> bytes:
    """The body of a 200, else nothing."""
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), straight.open(f"http://{address}{path}", timeout=2.0) as reply:
        return bytes(reply.read())
    return b""


def _explain(args: argparse.Namespace, units: Sequence[DemoUnit], model: str, token: str) -> None:
    program = os.path.relpath(sys.argv[0]) if "/" in sys.argv[0] else "cellgate"
    if not model:
        print(f"\nno unit is up yet; see why:  {program} why UNIT --admin {args.admin}", flush=True)
        return
    messages = '[{"role": "user", "content": "Why is the sky blue?"}]'
    body = f'{{"model": "{model}", "stream": true, "max_tokens": 100, "messages": {messages}}}'
    print(f"\ncellgate is up:   http://{args.listen}")
    print(f"the status page:  http://{args.admin}/   (its drain buttons ask for the token: {token})")
    print("\nstream a completion:\n")
    print(f"  curl -N http://{args.listen}/v1/chat/completions \\")
    print(f"    -H 'content-type: application/json' -d '{body}'")
    print("\nlook, in a second terminal:\n")
    print(f"  {program} units --admin {args.admin}    what is believed of each unit, and why")
    print(f"  curl -s http://{args.admin}/events     the last changes")
    print(f"  curl -s http://{args.admin}/metrics    for Prometheus")
    if units:
        print("\nhurt a unit, and watch the gate move its requests:\n")
        for unit in units:
            follower = list(unit.nodes.values())[-1]
            print(f"  kill -STOP {follower}    # the follower of {unit.name}; kill -CONT heals it")
    print("\nCtrl-C stops everything.\n", flush=True)
