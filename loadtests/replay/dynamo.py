"""The gate and others beside NVIDIA Dynamo's routing, on its workers.

Dynamo takes no workers but its own. Here its simulated workers (`dynamo.mocker`) serve everybody: each behind
a plain frontend of its own, which makes it a unit for the gate and others, or all behind one that routes.
What must stay true: workers and requests are the same for all, and all processes are ended.
"""

import argparse
import hashlib
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loadtests.gym.loads import LOADS
from loadtests.gym.loads_traces import Mooncake
from loadtests.gym.nouns import Request
from loadtests.kit import dynamo, processes, progress
from loadtests.kit.report import machine
from loadtests.kit.routers import ROUTERS, MissingError, Running, Setup
from loadtests.kit.waiting import wait_until
from loadtests.replay import figures
from loadtests.replay.cell import least_late, measured, no_figures
from loadtests.replay.client import bodies_of, read_answer
from loadtests.replay.figures import Result
from loadtests.replay.plan import PlanError, asks_for_more
from loadtests.replay.plays import Play
from loadtests.replay.shapes import MODEL
from loadtests.wire.blocking import fetch

GATE = "cellgate"
UNITS = 4
_SAMPLE = Path(__file__).parent / "sample.jsonl"
_SIZES = ("--num-gpu-blocks-override", "7812", "--max-num-seqs", "64", "--max-num-batched-tokens", "4096")
"""Those of the gym's units, in blocks of 64 tokens. Speed is the mocker's default."""
_READY_S = 30.0
_WORKER = re.compile(rb'"decode_worker_id":(\d+)')
_ASK_WORKER = {"nvext": {"extra_fields": ["worker_id"]}}


class Load(NamedTuple):
    """A load of the gym, at so many requests a second."""

    name: str
    rate: float


LOADS_RUN = (Load("zipf", 32.0), Load("bursts", 32.0), Load("mooncake", 7.0))
"""About 0.8, 0.5 and 0.8 of what least connections can take; --saturate measures that."""
MODES = {
    "dynamo kv": ("kv",),
    "dynamo kv without events": ("kv", "--no-router-kv-events"),
    "dynamo least-loaded": ("least-loaded",),
    "dynamo power-of-two": ("power-of-two",),
    "dynamo round-robin": ("round-robin",),
}
"""How one frontend routes: the value of --router-mode, and more flags."""
_DEFAULT = (GATE, "haproxy leastconn", "smg cache_aware", "dynamo kv", "dynamo least-loaded")


class Units(NamedTuple):
    """The processes that make up all units, and what clients ask."""

    pids: Sequence[int]
    names: Mapping[str, str]
    """Of each worker, by the number that Dynamo gives it."""
    router: Running


@progress.shown("replay.dynamo")
def main() -> int:
    """Run all loads through all routers. The exit code is 1 if the gate broke an answer or did not start."""
    args = _arguments()
    print(machine(), flush=True)
    if args.saturate:
        for load in args.loads:
            print(f"{load.name}: {saturation(load.name, args.saturate):.3g} requests a second", flush=True)
        return 0
    results: list[Result] = []
    try:
        plays = [play_of(load, seed, args.span_s) for load in args.loads for seed in range(1, args.seeds + 1)]
    except PlanError as error:
        print(error, file=sys.stderr)
        return 1
    for play in plays:
        for router in args.routers:
            progress.phase(f"{play.cell} through {router}, {len(results)} runs so far")
            results.append(least_late(partial(run, play, router), args.tries))
            print(figures.line(results[-1]), flush=True)
    print(f"\nMeans of {args.seeds} seeds:")
    print(figures.as_text(figures.table(results, GATE)))
    gates = [each.figures for each in results if each.router == GATE]
    return int(any(found is None or found.broken > 0 for found in gates))


def play_of(load: Load, seed: int, span_s: float) -> Play:
    """As many requests as come in `span_s` seconds, in words that the workers' tokenizer knows. Raises
    PlanError.
    """
    LOADS["mooncake"] = Mooncake(_SAMPLE)
    rng = random.Random(f"{load.name} {seed}")
    requests = LOADS[load.name].make(rng, load.rate, max(int(load.rate * span_s), 1))
    if why := asks_for_more(requests):
        raise PlanError(f"{load.name}: {why}")
    return _play(f"{load.name}, {load.rate:g}/s", seed, requests)


def saturation(name: str, count: int) -> float:
    """Requests a second that least connections can do: all come at once, and those that end between the 10th
    and the 90th percentile of ends are counted, as in the gym.
    """
    made = play_of(Load(name, 1000.0), 0, count / 1000.0).requests
    result = run(_play(name, 0, [replace(each, at=0.0) for each in made]), "direct leastconn")
    ends = sorted(each.e2e_s for each in result.answers if not each.trouble)
    first, last = len(ends) // 10, 9 * len(ends) // 10
    return (last - first) / (ends[last] - ends[first])


def run(play: Play, router: str) -> Result:
    """The figures of one router before fresh workers; where something does not start, the result says so."""
    units = (
        partial(_behind_one, MODES[router]) if router in MODES else partial(_each_its_own, router, play.seed)
    )
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        try:
            with units(Path(folder)) as (pids, names, running):
                return measured(play, router, running, pids, UNITS, partial(read, names=names))
        except (MissingError, RuntimeError) as error:
            return no_figures(play, router, error)


def _play(cell: str, seed: int, requests: Sequence[Request]) -> Play:
    bodies = bodies_of(requests, words=known_words, more=_ASK_WORKER)
    return Play(cell, "", seed, requests, bodies, speed_up=1.0)


def known_words(number: int, tokens: int, _: int) -> bytes:
    """So many of the words w0 to w999, of five bytes with the space behind them, mostly."""
    drawn = hashlib.shake_256(b"%d" % number).digest(2 * tokens)
    numbers = (int.from_bytes(drawn[at : at + 2]) % 1000 for at in range(0, 2 * tokens, 2))
    return b"".join(b"w%d " % number for number in numbers)


def read(body: bytes, request: Request, names: Mapping[str, str]) -> tuple[str, dict[str, Any], str]:
    """What `read_answer` says of an answer of the mocker, whose tokens are any words of its tokenizer."""
    trouble, usage, _ = read_answer(body, request, token=b" w")
    worker = _WORKER.search(body)
    return trouble, usage, names.get(worker[1].decode(), "") if worker else ""


@contextmanager
def _behind_one(mode: Sequence[str], folder: Path) -> Iterator[Units]:
    """All workers behind one frontend, which is router and API."""
    meeting = folder / "meeting"
    with _workers(folder, [meeting] * UNITS) as pids:
        flags = ("--router-mode", *mode, "--router-min-initial-workers", str(UNITS))
        with _frontend(folder / "frontend.log", meeting, UNITS, *flags) as (running, numbers):
            yield Units(pids, _named(numbers), running)


@contextmanager
def _each_its_own(router: str, seed: int, folder: Path) -> Iterator[Units]:
    """Each worker behind a frontend of its own, and a router before all; the seed decides on their order."""
    meetings = [folder / f"meeting-{number}" for number in range(UNITS)]
    with _workers(folder, meetings) as workers, ExitStack() as stack:
        frontends = [
            stack.enter_context(
                _frontend(folder / f"{each.name}.log", each, 1, "--router-mode", "round-robin")
            )
            for each in meetings
        ]
        numbers = [number for _, own in frontends for number in own]
        ports = [running.ports[0] for running, _ in frontends]
        random.Random(seed).shuffle(ports)
        setup = Setup(ports, folder, {}, [1.0] * UNITS, 1.0)
        pids = [*workers, *(running.pid for running, _ in frontends if running.pid)]
        yield Units(pids, _named(numbers), stack.enter_context(ROUTERS[router](setup)))


@contextmanager
def _workers(folder: Path, meetings: Sequence[Path]) -> Iterator[list[int]]:
    """A worker at each of the meeting places, once all take requests: their pids."""
    model = dynamo.word_model(folder)
    with ExitStack() as stack:
        started = []
        for number, meeting in enumerate(meetings):
            log = folder / f"worker-{number}.log"
            process = processes.start(dynamo.mocker(model, MODEL, meeting, *_SIZES), log)
            stack.callback(processes.stop, process)
            started.append((process, log))
        for process, log in started:
            dynamo.wait_registered(process, log)
        yield [process.pid for process, _ in started]


@contextmanager
def _frontend(log: Path, meeting: Path, workers: int, *flags: str) -> Iterator[tuple[Running, list[str]]]:
    """A frontend that knows so many workers, and their numbers."""
    port = processes.free_port()
    with processes.serving(dynamo.frontend(port, meeting, *flags), port, "/health", log) as pid:
        if not wait_until(lambda: len(_numbers(port)) == workers and _serves(port), _READY_S):
            raise RuntimeError(f"a frontend of Dynamo does not find its workers:\n{processes.tail(log)}")
        yield Running([port], pid), _numbers(port)


def _numbers(port: int) -> list[str]:
    """What Dynamo calls the workers that a frontend knows."""
    instances = orjson.loads(fetch(f"http://127.0.0.1:{port}/health").body)["instances"]
    return sorted(str(each["instance_id"]) for each in instances if each["endpoint"] == "generate")


def _serves(port: int) -> bool:
    models = orjson.loads(fetch(f"http://127.0.0.1:{port}/v1/models").body)["data"]
    return any(each["id"] == MODEL for each in models)


def _named(numbers: Sequence[str]) -> dict[str, str]:
    return {number: f"unit-{index}" for index, number in enumerate(numbers)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.replay.dynamo", description=__doc__)
    add = parser.add_argument
    add("--loads", type=_loads, default=list(LOADS_RUN), metavar="NAME[=RATE],...", help="of the gym")
    add("--routers", type=_routers, default=list(_DEFAULT), metavar="NAME,NAME")
    add(
        "--seeds",
        type=int,
        default=1,
        help="repetitions, each with other requests and another order of units",
    )
    add("--span-s", type=float, default=22.0, help="in which requests come")
    add("--saturate", type=int, metavar="COUNT", help="only: so many requests at once, what comes of them")
    add("--tries", type=int, default=2, help="how often a disturbed run is run at most")
    return parser.parse_args()


def _loads(text: str) -> list[Load]:
    usual = {each.name: each.rate for each in LOADS_RUN}
    found = []
    for name, _, rate in (each.partition("=") for each in text.split(",")):
        if name not in LOADS or not (rate or name in usual):
            raise argparse.ArgumentTypeError(f"{name!r} is no load, or has no usual rate: NAME=RATE")
        found.append(Load(name, float(rate or usual[name])))
    return found


def _routers(text: str) -> list[str]:
    known, found = [*ROUTERS, *MODES], text.split(",")
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are {', '.join(known)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
