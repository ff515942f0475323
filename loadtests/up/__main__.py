"""deploy/compose as plain processes: two simulated units, the gate, Redis, HAProxy, Prometheus.

The files are those of deploy/compose, with the addresses that things have here. Grafana is left out, as
Debian does not have it. `--drill` sees an alert fire and clear (drill.py). What must stay true: nothing
outlives this process, and it ends by itself.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from loadtests.kit import processes
from loadtests.kit.processes import stop, tail, usual_or_free, wait_ready
from loadtests.simunit.process import SimUnit, SimUnitError, sim_units
from loadtests.up.alerts import RULES, Prometheus, sped_up
from loadtests.up.drill import drill
from loadtests.wire.blocking import answers

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "compose"
PROGRAMS = ("haproxy", "prometheus", "redis-server")
TIMING = {"step_ms": 20, "prefill_tokens_per_s": 8000}
TOKEN_VARIABLE = "CELLGATE_ADMIN_TOKEN"
LOOK_EVERY_S = 0.2
FASTER = 20
"""In a drill a minute of the alerts' rules passes in three seconds."""
SCRAPE_S = 5
"""As in prometheus.yaml."""
ALERT_PAGES = ("/alerts", "/classic/alerts")
"""Where Prometheus may show its alerts: Debian's build has the classic pages alone."""


class Ports(NamedTuple):
    """Where things listen on 127.0.0.1: as in compose.yaml, or anywhere where that is taken."""

    ingress: int = 8080
    gate: int = 8000
    admin: int = 9901
    agent_check: int = 9902
    redis: int = 6379
    prometheus: int = 9090


class Process(NamedTuple):
    """One program that runs, and what it prints to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until Ctrl-C, until the time is over (0), or until one of the programs ends (1)."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.up", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, metavar="S", help="then all ends (3600)")
    parser.add_argument(
        "--drill", action="store_true", help="freeze a follower, see alerts fire and clear, end"
    )
    told = f"rules so much faster in a drill ({FASTER}; 1: as shipped, a quarter of an hour)"
    parser.add_argument("--faster", type=int, default=FASTER, metavar="N", choices=range(1, 31), help=told)
    options = parser.parse_args(arguments)
    processes.end_on_sigterm()
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        print(f"make up: {', '.join(missing)} is not installed; type:  make up", file=sys.stderr)
        return 1
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cellgate-up-")))
            return _run(stack, folder, options)
    except (SimUnitError, RuntimeError) as error:
        print(f"make up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _run(stack: ExitStack, folder: Path, options: argparse.Namespace) -> int:
    faster = options.faster if options.drill else 1
    # What is seen once in five seconds cannot fire within three.
    scrape_s = SCRAPE_S if faster == 1 else 1
    ports = Ports(*map(usual_or_free, Ports()))
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(4)
    print("starting 2 simulated units, Redis, the gate, HAProxy and Prometheus ...", flush=True)
    units = stack.enter_context(sim_units(["a1", "a2"], **TIMING))
    _write_files(folder, ports, {unit.name: unit.url for unit in units}, scrape_s)
    (folder / "rules.yaml").write_text(sped_up(RULES.read_text(), faster))
    programs = [
        stack.enter_context(_running(name, command, folder, token))
        for name, command in _commands(folder, ports).items()
    ]
    for program, (port, path) in zip(programs, _ready(ports), strict=True):
        if port:
            wait_ready(program.process, port, path, program.log)
    if options.drill:
        ingress = f"http://127.0.0.1:{ports.ingress}"
        return drill(Prometheus(ports.prometheus), ingress, units, faster=faster, scrape_s=scrape_s)
    _explain(ports, token, units)
    return _watch(programs, time.monotonic() + options.seconds)


def _commands(folder: Path, ports: Ports) -> dict[str, list[str]]:
    """In the order in which they start, and the other way round in which they end."""
    local = "127.0.0.1"
    gate = [sys.executable, "-m", "cellgate", "serve", "-c", str(folder / "cellgate.yaml")]
    prometheus = ["prometheus", f"--config.file={folder / 'prometheus.yaml'}"]
    return {
        "redis": [
            "redis-server",
            "--bind",
            local,
            "--port",
            str(ports.redis),
            "--save",
            "",
            "--dir",
            str(folder),
        ],
        "gate": [*gate, "--listen", f"{local}:{ports.gate}", "--admin", f"{local}:{ports.admin}"],
        "haproxy": ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")],
        "prometheus": [
            *prometheus,
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={local}:{ports.prometheus}",
        ],
    }


def _ready(ports: Ports) -> list[tuple[int, str]]:
    """What says that each of them is there; port 0: nothing speaks HTTP."""
    return [(0, ""), (ports.admin, "/readyz"), (ports.ingress, "/v1/models"), (ports.prometheus, "/-/ready")]


def _write_files(folder: Path, ports: Ports, urls: Mapping[str, str], scrape_s: int) -> None:
    """The files of deploy/compose, with other addresses."""
    local = "127.0.0.1"
    gate = {f"http://{name}:8000": url for name, url in urls.items()}
    gate |= {"redis:6379": f"{local}:{ports.redis}", "0.0.0.0:9902": f"{local}:{ports.agent_check}"}
    ingress = {
        "bind :8080": f"bind {local}:{ports.ingress}",
        "gate:8000": f"{local}:{ports.gate}",
        "agent-addr gate agent-port 9902": f"agent-addr {local} agent-port {ports.agent_check}",
    }
    prometheus = {
        "gate:9901": f"{local}:{ports.admin}",
        "/etc/prometheus/rules.yaml": str(folder / "rules.yaml"),
        f"_interval: {SCRAPE_S}s": f"_interval: {scrape_s}s",
    }
    for name, changes in (
        ("cellgate.yaml", gate),
        ("haproxy.cfg", ingress),
        ("prometheus.yaml", prometheus),
    ):
        text = (FILES / name).read_text()
        for before, after in changes.items():
            if before not in text:
                raise RuntimeError(f"deploy/compose/{name} has no {before!r} to be replaced")
            text = text.replace(before, after)
        (folder / name).write_text(text)


@contextmanager
def _running(name: str, command: Sequence[str], folder: Path, token: str) -> Iterator[Process]:
    """A program in a group of its own: Ctrl-C comes to us alone, and each is told by us, in its turn."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=ROOT,
            env=os.environ | {TOKEN_VARIABLE: token},
        )
    try:
        yield Process(name, process, log)
    finally:
        if name == "gate" and process.poll() is None:
            # Nobody waits for its streams any more.
            process.send_signal(signal.SIGINT)
        stop(process)


def _watch(programs: Sequence[Process], until: float) -> int:
    while time.monotonic() < until:
        for program in programs:
            if (code := program.process.poll()) is not None:
                print(f"{program.name} ended with {code}; it printed:\n{tail(program.log)}", file=sys.stderr)
                return 1
        time.sleep(LOOK_EVERY_S)
    print("the time is over")
    return 0


def _explain(ports: Ports, token: str, units: Sequence[SimUnit]) -> None:
    url = "http://127.0.0.1"
    messages = '[{"role": "user", "content": "Why is the sky blue?"}]'
    prometheus = f"{url}:{ports.prometheus}"
    alerts = next((path for path in ALERT_PAGES if answers(f"{prometheus}{path}", silence_s=5.0)), "/")
    print(f"\nHAProxy, before the gate  {url}:{ports.ingress}")
    print(f"the gate                  {url}:{ports.gate}")
    print(f"the status page           {url}:{ports.admin}/   (its drain buttons ask for the token: {token})")
    print(f"Prometheus                {prometheus}{alerts}")
    print(f"Redis                     redis://127.0.0.1:{ports.redis}/0")
    print("Grafana                   only with Docker: deploy/compose/compose.yaml")
    print(f"\nstream a completion:\n\n  curl -N {url}:{ports.ingress}/v1/chat/completions \\")
    print("    -H 'content-type: application/json' \\")
    print(f"""    -d '{{"model": "sim", "stream": true, "max_tokens": 100, "messages": {messages}}}'""")
    print("\nhurt a unit; within seconds it is DOWN on the status page, then an alert fires in Prometheus:\n")
    for unit in units:
        print(f"  kill -STOP {unit.follower_pids[0]}    # the follower of {unit.name}; kill -CONT heals it")
    print("\nCtrl-C stops everything.\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
