"""Two cells of simulated leader/follower units, their agents and the gate, in the foreground.

`python -m loadtests.run URL …` puts the gate before real units instead. Nothing outlives this process: gate
and agents are waited for, and the units end with the pipe they were started with.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml

from loadtests.kit import processes
from loadtests.kit.agents import Agents
from loadtests.simunit.process import SimUnit, SimUnitError, sim_units
from loadtests.wire.blocking import fetch

READY_S = 60.0
CELLS = {"a": ("a1", "a2"), "b": ("b1", "b2")}
TIMING = {"step_ms": 20, "prefill_tokens_per_s": 8000}
TOKEN_VARIABLE = "CELLGATE_ADMIN_TOKEN"
_GATE = (sys.executable, "-m", "cellgate", "serve")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until Ctrl-C; returns the exit code of the gate."""
    options = _options(arguments)
    processes.end_on_sigterm()
    try:
        with ExitStack() as stack:
            units, source = [], [part for url in options.urls for part in ("--unit", url)]
            if not options.urls:
                print("starting 4 simulated units (leader, follower and an agent each) ...", flush=True)
                names = [name for cell in CELLS.values() for name in cell]
                units = stack.enter_context(sim_units(names, **TIMING))
                agents = stack.enter_context(Agents(units))
                config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "cellgate.yaml"
                config.write_text(_configuration(units, agents))
                source = ["-c", str(config)]
            return _run_gate([*_GATE, *_addresses(options), *source], options, units)
    except SimUnitError as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.run", description=__doc__)
    parser.add_argument("urls", nargs="*", metavar="URL", help="real units; none: simulated ones")
    for name, port in (("listen", 8000), ("admin", 9901)):
        default = f"127.0.0.1:{port}, or a free port when that is taken"
        parser.add_argument(f"--{name}", metavar="HOST:PORT", help=f"default: {default}")
    options = parser.parse_args(arguments)
    options.listen = options.listen or f"127.0.0.1:{processes.usual_or_free(8000)}"
    options.admin = options.admin or f"127.0.0.1:{processes.usual_or_free(9901)}"
    return options


def _addresses(options: argparse.Namespace) -> list[str]:
    return ["--listen", options.listen, "--admin", options.admin]


def _configuration(units: Sequence[SimUnit], agents: Agents) -> str:
    """The gate's file: with agents, so that the status page shows which node is at fault."""
    known = {
        unit.name: {"name": unit.name, "url": unit.url, "nodes": agents.nodes(unit.name)} for unit in units
    }
    cells = [{"name": cell, "units": [known[name] for name in names]} for cell, names in CELLS.items()]
    return yaml.safe_dump({"cells": cells}, sort_keys=False)


def _run_gate(command: list[str], options: argparse.Namespace, units: Sequence[SimUnit]) -> int:
    # The status page's drain buttons need a token, even here: a page in a browser could be anybody's.
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(4)
    # A group of its own: Ctrl-C comes to us alone.
    gate = subprocess.Popen(command, start_new_session=True, env=os.environ | {TOKEN_VARIABLE: token})
    try:
        model = _wait_until_ready(gate, options)
        if model is not None:
            _explain(options, units, model, token)
        return gate.wait()
    finally:
        # At once and without a word: who tries a gate has no streams to finish.
        with suppress(ProcessLookupError):
            os.killpg(gate.pid, signal.SIGKILL)
        gate.wait()
        for unit in units:
            unit.kill()


def _wait_until_ready(gate: subprocess.Popen[bytes], options: argparse.Namespace) -> str | None:
    """The first model served once a unit is up; "" when none came up in time; None when the gate ended."""
    deadline = time.monotonic() + READY_S
    while gate.poll() is None and time.monotonic() < deadline:
        # In this order: what a unit serves may be known only after it is up.
        if _get(options.admin, "/readyz") and (body := _get(options.listen, "/v1/models")):
            models = yaml.safe_load(body)["data"]
            if models:
                return str(models[0]["id"])
        time.sleep(0.1)
    return "" if gate.poll() is None else None


def _get(address: str, path: str) -> bytes:
    """The body of a 200, else nothing."""
    with suppress(OSError):
        reply = fetch(f"http://{address}{path}", silence_s=2.0)
        return reply.body if reply.status == 200 else b""
    return b""


def _explain(options: argparse.Namespace, units: Sequence[SimUnit], model: str, token: str) -> None:
    if not model:
        print(f"\nno unit is up yet; see why:  curl -s http://{options.admin}/units", flush=True)
        return
    messages = '[{"role": "user", "content": "Why is the sky blue?"}]'
    body = f'{{"model": "{model}", "stream": true, "max_tokens": 100, "messages": {messages}}}'
    print(f"\ncellgate is up:   http://{options.listen}")
    print(f"the status page:  http://{options.admin}/   (its drain buttons ask for the token: {token})")
    print("\nstream a completion:\n")
    print(f"  curl -N http://{options.listen}/v1/chat/completions \\")
    print(f"    -H 'content-type: application/json' -d '{body}'")
    print("\nlook, in a second terminal:\n")
    print(f"  .venv/bin/cellgate units --admin {options.admin}    what is believed of each unit, and why")
    print(f"  curl -s http://{options.admin}/events     the last changes")
    print(f"  curl -s http://{options.admin}/metrics    for Prometheus")
    if units:
        print("\nhurt a unit, and watch the gate move its requests:\n")
        for unit in units:
            print(
                f"  kill -STOP {unit.follower_pids[0]}    # the follower of {unit.name}; kill -CONT heals it"
            )
    print("\nCtrl-C stops everything.\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
