"""One run of the replay: fresh units, a fresh router, a load from its beginning, and all ended again."""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

import orjson
import uvloop

from loadtests.gym.fleets import FLEETS, MODEL
from loadtests.kit import processes
from loadtests.kit.routers import ROUTERS, MissingError, Running, Setup
from loadtests.replay import client
from loadtests.replay.client import Answer, Read, read_answer
from loadtests.replay.figures import LATE_LIMIT_MS, Result, figures_of, quantile
from loadtests.replay.plays import Play
from loadtests.replay.units import LATE_BINS_MS
from loadtests.replay.virtual import RIVALS, run_virtually
from loadtests.wire.blocking import fetch

TRIES = 3


def run_in_quiet(play: Play, router: str, tries: int = TRIES) -> Result:
    """The first of `tries` runs that was not disturbed by other work on the machine, else the least late one.

    What is kept is chosen by lateness alone, never by a router's figures.
    """
    if router in RIVALS:
        return run_virtually(play, router)
    return least_late(partial(run, play, router), tries)


def least_late(one_run: Callable[[], Result], tries: int) -> Result:
    """The first run that was not disturbed, else the least late of `tries`."""
    results: list[Result] = []
    while not results or (results[-1].late_p99_ms > LATE_LIMIT_MS and len(results) < tries):
        results.append(one_run())
    return min(results, key=lambda each: each.late_p99_ms)


def run(play: Play, router: str) -> Result:
    """The figures of one router; a router that is missing or does not start gives a result that says so.

    The seed decides in which order the units are named to the router: by that, many break ties.
    """
    places = FLEETS[play.fleet].places
    with (
        tempfile.TemporaryDirectory(prefix="replay-") as folder,
        units_process(play.fleet, play.speed_up) as (engine, ports),
    ):
        order = list(range(len(places)))
        random.Random(play.seed).shuffle(order)
        speeds = [places[index].model.prefill_tokens_s / MODEL.prefill_tokens_s for index in order]
        setup = Setup([ports[index] for index in order], Path(folder), play.gate, speeds, play.speed_up)
        try:
            with ROUTERS[router](setup) as running:
                result = measured(play, router, running, [engine], len(ports))
                return replace(result, late_p99_ms=max(_units_late_ms(ports), result.late_p99_ms))
        except (MissingError, RuntimeError) as error:
            return no_figures(play, router, error)


def no_figures(play: Play, router: str, error: Exception) -> Result:
    """The result where a program did not start; what it said at last is why."""
    last_line = str(error).strip().splitlines()[-1]
    return Result(play.cell, router, play.seed, None, missing=f"no figures: {last_line}")


def measured(
    play: Play, router: str, running: Running, engines: Sequence[int], units: int, read: Read = read_answer
) -> Result:
    """The figures of a load through a router that runs before so many units, in the processes `engines`. Late
    is here the client alone.
    """
    before = _Clocks.read(engines, running.pid)
    answers = uvloop.run(
        client.replay(
            play.requests,
            play.bodies,
            running.ports,
            speed_up=play.speed_up,
            patience_s=play.patience_s,
            read=read,
        )
    )
    after = _Clocks.read(engines, running.pid)
    wall_s = after.wall_s - before.wall_s
    return Result(
        cell=play.cell,
        router=router,
        seed=play.seed,
        figures=figures_of(answers, units),
        answers=answers,
        engine_cpu=(after.engine_s - before.engine_s) / wall_s,
        client_cpu=(after.client_s - before.client_s) / wall_s,
        router_cpu=(after.router_s - before.router_s) / wall_s,
        late_p99_ms=_client_late_ms(answers, play.speed_up),
    )


@dataclass(frozen=True, slots=True)
class _Clocks:
    """CPU times of the processes at one moment, in seconds."""

    wall_s: float
    engine_s: float
    client_s: float
    router_s: float

    @classmethod
    def read(cls, engines: Sequence[int], router: int | None) -> "_Clocks":
        own_s = time.process_time()
        router_s = processes.cpu_s(router) if router else 0.0
        return cls(time.monotonic(), sum(map(processes.cpu_s, engines)), own_s, router_s)


def units_process(fleet: str, speed_up: float) -> AbstractContextManager[tuple[int, list[int]]]:
    """The process of a fleet's units: its pid and their ports."""
    return processes.announcing("loadtests.replay.units", "--fleet", fleet, "--speed-up", speed_up)


def _client_late_ms(answers: Sequence[Answer], speed_up: float) -> float:
    """The 99th percentile of how late requests were sent, in whole real milliseconds."""
    return ceil(quantile(sorted(each.late_s for each in answers), 0.99) / speed_up * 1000)


def _units_late_ms(ports: Sequence[int]) -> float:
    """The end of the bin in which the 99th percentile of the units' lateness lies, in real milliseconds."""
    pages = [orjson.loads(fetch(f"http://127.0.0.1:{port}/replay").body) for port in ports]
    bins = [sum(counts) for counts in zip(*(page["late"] for page in pages), strict=True)]
    seen = 0
    for count, end_ms in zip(bins, LATE_BINS_MS, strict=False):
        seen += count
        if seen >= 0.99 * sum(bins):
            return float(end_ms)
    return float("inf")
