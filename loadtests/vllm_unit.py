"""Real vLLM leader/follower units in the foreground, on this machine's CPU.

Sets up what is missing, starts the units, says how to put the gate before them, and keeps them until Ctrl-C.
What must stay true: short of a SIGKILL, no process that was started here outlives it.
"""

import argparse
import json
import signal
import socket
import sys
import time
from pathlib import Path

from loadtests.vllm import VllmUnitError, processes
from loadtests.vllm.install import RUN, set_up
from loadtests.vllm.unit import HOST, Unit, log_of, start

START_TIMEOUT_S = 600.0
UNIT_MEMORY_GB = 4.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Return 0 after an orderly end, 1 after an error that was printed."""
    options = _options()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        set_up()
        if not options.setup_only:
            _serve(range(options.base_port, options.base_port + options.units), options.state)
    except KeyboardInterrupt:
        print("\nStopping.", flush=True)
    except (VllmUnitError, OSError) as error:
        print(f"vllm-units: {error}", file=sys.stderr)
        return 1
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # Nothing may cut the clean-up short.
        processes.stop(processes.children())
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="loadtests.vllm_unit", description="Real vLLM units on CPU.")
    parser.add_argument(
        "--units", type=int, default=2, choices=range(1, 17), metavar="N", help="how many (2)"
    )
    parser.add_argument("--base-port", type=int, default=8101, metavar="PORT", help="the first API's (8101)")
    parser.add_argument(
        "--setup-only", action="store_true", help="make the venv and the model, start nothing"
    )
    parser.add_argument("--state", type=Path, metavar="FILE", help="write URLs and pids there as JSON")
    return parser.parse_args()


def _serve(ports: range, state: Path | None) -> None:
    """Run a unit on each port until a signal ends it. Raises VllmUnitError when they cannot start."""
    _check_ports(ports)
    _check_memory(len(ports))
    print(f"Starting {len(ports)} unit(s), which takes about a minute. Their logs are in {RUN}", flush=True)
    began = time.monotonic()
    units = [start(port) for port in ports]
    _await_ready(units)
    _tell(units, time.monotonic() - began)
    try:
        if state:
            _write_state(units, state)
        _watch(units)
    finally:
        if state:
            state.unlink(missing_ok=True)


def _await_ready(units: list[Unit]) -> None:
    """Wait until each answers. Raises VllmUnitError as soon as any of them has broken."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for unit in units:
        while not (unit.healthy() and unit.warmed_up()):
            for each in units:
                _refuse_broken(each)
            if time.monotonic() > deadline:
                raise VllmUnitError(
                    f"{unit.name} does not answer after {START_TIMEOUT_S:.0f} s. "
                    f"Look into {log_of(unit.port, 'leader')}, or try fewer units (--units)."
                )
            time.sleep(0.5)


def _refuse_broken(unit: Unit) -> None:
    for role in unit.lost():
        log = log_of(unit.port, role)
        raise VllmUnitError(f"{unit.name}: its {role} ended while starting. The end of {log} says why.")


def _tell(units: list[Unit], seconds: float) -> None:
    for unit in units:
        pids = ", ".join(f"{role} {pid}" for role, pid in unit.pids().items())
        print(f"{unit.name}  {unit.url}  {pids}")
    print(f"All answered a request after {seconds:.0f} s. Put the gate before them, in another terminal:\n")
    print(f'  make run UNITS="{" ".join(unit.url for unit in units)}"\n')
    print("Ctrl-C stops them all.", flush=True)


def _write_state(units: list[Unit], state: Path) -> None:
    """Write it whole or not at all: drills wait for the file to appear."""
    draft = state.with_name(f"{state.name}.draft")
    entries = [{"name": unit.name, "url": unit.url, "pids": unit.pids()} for unit in units]
    draft.write_text(json.dumps({"units": entries}, indent=2) + "\n")
    draft.replace(state)


def _watch(units: list[Unit]) -> None:
    """Say when a unit loses its leader or its follower. What is left of it stays: drills look at that."""
    whole = list(units)
    while True:
        for unit in tuple(whole):
            if lost := unit.lost():
                print(f"{unit.name}: its {' and '.join(lost)} ended; it cannot answer any more.", flush=True)
                whole.remove(unit)
        time.sleep(1.0)


def _check_ports(ports: range) -> None:
    for port in ports:
        try:
            socket.create_server((HOST, port)).close()
        except (OSError, OverflowError) as error:
            raise VllmUnitError(
                f"port {port} cannot be used ({error}). End what listens there, or choose --base-port."
            ) from error


def _check_memory(count: int) -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_gb = int(meminfo["MemAvailable"].split()[0]) * 1024 / 1e9
    needed_gb = count * UNIT_MEMORY_GB
    if free_gb < needed_gb:
        raise VllmUnitError(
            f"{count} unit(s) need {needed_gb:.1f} GB of memory and {free_gb:.1f} GB are free. "
            "Start fewer (--units), or end something else."
        )


if __name__ == "__main__":
    sys.exit(main())
