"""One load on one target: the generator is driven, and the clocks of all processes are read around it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any

from loadtests.bench import leaks
from loadtests.bench.figures import Figure
from loadtests.bench.loads import LOADS, Agents, Bursts, Load, Requests
from loadtests.bench.stage import Stage
from loadtests.bench.targets import TARGETS
from loadtests.kit import processes
from loadtests.kit.routers import Running

TRIES = 3
QUIET_LIMIT = 0.10
"""Share of the machine that others may take; beyond it, wake-ups and backlogs change what a byte costs."""


@dataclass(slots=True)
class Patience:
    """How many seconds more may go into repeating; a busy machine must not make a run endless."""

    left_s: float


@dataclass(frozen=True, slots=True)
class Clocks:
    """CPU times at one moment, in seconds: target, engine, generator, all of the benchmark, the machine."""

    at_s: float
    target_s: float
    engine_s: float
    generator_s: float
    own_s: float
    machine_s: float

    @classmethod
    def read(cls, target: int | None, engine: int, generator: int) -> "Clocks":
        own_s = processes.cpu_s(os.getpid())
        machine_s = processes.machine_cpu_s()
        return cls(
            at_s=time.monotonic(),
            target_s=processes.cpu_s(target) if target else 0.0,
            engine_s=processes.cpu_s(engine),
            generator_s=processes.cpu_s(generator),
            own_s=own_s,
            machine_s=machine_s,
        )

    def others_until(self, after: "Clocks") -> float:
        """The share of the machine that processes outside the benchmark used meanwhile, 0 to 1."""
        others_s = (after.machine_s - self.machine_s) - (after.own_s - self.own_s)
        return max(0.0, others_s / (after.at_s - self.at_s) / (os.cpu_count() or 1))


def in_quiet(stage: Stage, name: str, load_name: str, requests: int, patience: Patience) -> Figure:
    """The first of `TRIES` measurements that the rest of the machine left alone, else the least disturbed.

    What is kept is chosen by the others' CPU alone, never by the figure.
    """
    tries: list[Figure] = []
    while not tries or (tries[-1].others > QUIET_LIMIT and len(tries) < TRIES and patience.left_s > 0):
        began_at = time.monotonic()
        tries.append(measured(stage, name, load_name, LOADS[load_name], requests))
        print(tries[-1].line(), flush=True)
        if len(tries) > 1:
            patience.left_s -= time.monotonic() - began_at
    return min(tries, key=lambda each: each.others)


def measured(stage: Stage, name: str, load_name: str, load: Load, requests: int) -> Figure:
    """One load on one target. Raises RuntimeError on any answer that is missing or wrong."""
    target = stage.running[name]
    with _generator(name, target.ports[0], load, requests) as generator:
        before = _ready(stage, target, generator)
        tally = _line(generator)
        after = Clocks.read(target.pid, stage.engine, generator.pid)
        loaded_mb = processes.resident_mb(target.pid) if target.pid else 0.0
    if tally["errors"]:
        log = stage.folder_of(name) / "router.log"
        printed = f"\nIt printed:\n{processes.tail(log)}" if log.exists() else ""
        wrong = f"{len(tally['errors'])} of {load.about} went wrong, first: {tally['errors'][0]}"
        raise RuntimeError(f"{wrong}{printed}")
    figure = _figure(stage, name, load_name, tally, before, after)
    if isinstance(load, Requests) and not isinstance(load, Agents):
        return figure
    figure = replace(
        figure,
        ttft_p50_ms=_percentile(tally["ttfts_s"], 50) * 1000,
        ttft_p99_ms=_percentile(tally["ttfts_s"], 99) * 1000,
    )
    if isinstance(load, (Agents, Bursts)):
        return figure
    left = leaks.wait(target.pid, target.ports[0], stage.units) if target.pid else leaks.Left(0, 0, 0)
    return replace(
        figure,
        pace=load.tokens_s * tally["seconds"] / tally["answers"],
        stall_ms=max(0.0, tally["gap_s"] * 1000 - load.interval_ms),
        idle_mb=stage.idle_mb[name],
        loaded_mb=loaded_mb,
        stream_kib=(loaded_mb - stage.idle_mb[name]) * 1e6 / 1024 / load.streams,
        leaked_clients=left.clients,
        leaked_generating=left.generating,
        kept_idle=left.idle,
    )


def _figure(
    stage: Stage, name: str, load_name: str, tally: dict[str, Any], before: Clocks, after: Clocks
) -> Figure:
    answers = tally["answers"]
    return Figure(
        target=name,
        load=load_name,
        round=stage.number,
        answers=answers,
        seconds=tally["seconds"],
        cpu_us=(after.target_s - before.target_s) / answers * 1e6,
        engine_us=(after.engine_s - before.engine_s) / answers * 1e6,
        generator_us=(after.generator_s - before.generator_s) / answers * 1e6,
        reads_each=tally["reads"] / answers,
        lag_ms=_percentile(tally["lags_s"], 99) * 1000,
        others=before.others_until(after),
    )


def _percentile(values: Sequence[float], part: int) -> float:
    return quantiles(values, n=100, method="inclusive")[part - 1] if len(values) > 1 else 0.0


@contextmanager
def _generator(name: str, port: int, load: Load, requests: int) -> Iterator[subprocess.Popen[str]]:
    """The load generator; when this ends its clients leave."""
    target = TARGETS[name]
    flags = {"port": port, **load.flags(requests, target.share)}
    command = [sys.executable, "-m", "loadtests.bench.generator", load.kind]
    command += [f"--{flag}={value}" for flag, value in flags.items()]
    command += [] if target.is_exact else ["--text-only"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as generator:
        try:
            yield generator
        finally:
            generator.kill()


def _ready(stage: Stage, target: Running, generator: subprocess.Popen[str]) -> Clocks:
    """Wait for the warm-up, and let the load begin."""
    assert generator.stdin is not None
    assert generator.stdout is not None
    if not generator.stdout.readline():
        raise RuntimeError(f"the load generator ended early, code {generator.wait()}")
    before = Clocks.read(target.pid, stage.engine, generator.pid)
    generator.stdin.write("go\n")
    generator.stdin.flush()
    return before


def _line(generator: subprocess.Popen[str]) -> dict[str, Any]:
    assert generator.stdout is not None
    line = generator.stdout.readline()
    if not line:
        raise RuntimeError(f"the load generator ended early, code {generator.wait()}")
    tally: dict[str, Any] = json.loads(line)
    return tally
