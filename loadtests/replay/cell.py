"""One cell of the replay: fresh units, a fresh router, the whole trace, and all of them ended again."""

import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import uvloop

from loadtests.bench import processes
from loadtests.replay import client
from loadtests.replay.client import Answer
from loadtests.replay.figures import LATE_LIMIT_MS, Cell, figures_of, quantile
from loadtests.replay.routers import ROUTERS, MissingError, Running, Setup
from loadtests.replay.trace import Request
from loadtests.replay.units import LATE_BINS_MS, SLOW_SPEED

TRIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What all cells have in common. `gate` are keys of its configuration, `slow` the unit at half speed."""

    requests: Sequence[Request]
    bodies: Sequence[bytes]
    units: int
    speed_up: float
    patience_s: float
    gate: dict[str, Any] = field(default_factory=dict)
    slow: int | None = None


def run_in_quiet(plan: Plan, router: str, *, scale: float, load: float, seed: int) -> Cell:
    """The first of `TRIES` runs that was not disturbed by other work on the machine, else the least late one.

    What is kept is chosen by lateness alone, never by a router's figures.
    """
    tries: list[Cell] = []
    while not tries or (tries[-1].late_p99_ms > LATE_LIMIT_MS and len(tries) < TRIES):
        tries.append(run(plan, router, scale=scale, load=load, seed=seed))
    return min(tries, key=lambda each: each.late_p99_ms)


def run(plan: Plan, router: str, *, scale: float, load: float, seed: int) -> Cell:
    """The figures of one router; a router that is missing or does not start gives a cell that says so.

    The seed decides in which order the units are named to the router: by that, many break ties.
    """
    with tempfile.TemporaryDirectory(prefix="replay-") as folder, units_process(plan) as (engine, ports):
        order = list(range(plan.units))
        random.Random(seed).shuffle(order)
        speeds = [SLOW_SPEED if index == plan.slow else 1.0 for index in order]
        setup = Setup([ports[index] for index in order], Path(folder), plan.gate, speeds, plan.speed_up)
        try:
            with ROUTERS[router](setup) as running:
                return _measure(plan, running, engine, ports, Cell(router, load, seed, None), scale)
        except (MissingError, RuntimeError) as error:
            return Cell(router, load, seed, None, missing=f"no figures: {_last_line(error)}")


def _last_line(error: Exception) -> str:
    """What a program said at last, where it did not start."""
    return str(error).strip().splitlines()[-1]


def _measure(
    plan: Plan, running: Running, engine: int, ports: Sequence[int], cell: Cell, scale: float
) -> Cell:
    before = _Clocks.read(engine, running.pid)
    answers = uvloop.run(
        client.replay(
            plan.requests,
            plan.bodies,
            running.ports,
            scale=scale,
            speed_up=plan.speed_up,
            patience_s=plan.patience_s,
        )
    )
    after = _Clocks.read(engine, running.pid)
    wall_s = after.wall_s - before.wall_s
    return Cell(
        router=cell.router,
        load=cell.load,
        seed=cell.seed,
        figures=figures_of(answers, plan.units),
        answers=answers,
        engine_cpu=(after.engine_s - before.engine_s) / wall_s,
        client_cpu=(after.client_s - before.client_s) / wall_s,
        router_cpu=(after.router_s - before.router_s) / wall_s,
        late_p99_ms=max(_units_late_ms(ports), _client_late_ms(answers, plan.speed_up)),
    )


@dataclass(frozen=True, slots=True)
class _Clocks:
    """CPU times of the processes at one moment, in seconds."""

    wall_s: float
    engine_s: float
    client_s: float
    router_s: float

    @classmethod
    def read(cls, engine: int, router: int | None) -> "_Clocks":
        own_s = time.process_time()
        router_s = processes.cpu_s(router) if router else 0.0
        return cls(time.monotonic(), processes.cpu_s(engine), own_s, router_s)


@contextmanager
def units_process(plan: Plan) -> Iterator[tuple[int, list[int]]]:
    """The process of the units: its pid and its ports."""
    command = [sys.executable, "-m", "loadtests.replay.units", "--units", str(plan.units)]
    command += ["--speed-up", str(plan.speed_up)]
    if plan.slow is not None:
        command += ["--slow", str(plan.slow)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            line = engine.stdout.readline()
            if not line:
                raise RuntimeError(f"the units ended early, code {engine.wait()}")
            yield engine.pid, json.loads(line)
        finally:
            processes.stop(engine)


def _client_late_ms(answers: Sequence[Answer], speed_up: float) -> float:
    """The 99th percentile of how late requests were sent, in whole real milliseconds."""
    return ceil(quantile(sorted(each.late_s for each in answers), 0.99) / speed_up * 1000)


def _units_late_ms(ports: Sequence[int]) -> float:
    """The end of the bin in which the 99th percentile of the units' lateness lies, in real milliseconds."""
    bins = [sum(counts) for counts in zip(*(_told(port)["late"] for port in ports), strict=True)]
    seen = 0
    for count, end_ms in zip(bins, LATE_BINS_MS, strict=False):
        seen += count
        if seen >= 0.99 * sum(bins):
            return float(end_ms)
    return float("inf")


def _told(port: int) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/replay")
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()
