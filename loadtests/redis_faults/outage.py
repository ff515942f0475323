"""Redis is killed, then frozen, while users stream through four gates: two share it, two know of none.

What must stay true: requests go to the four gates in turns, to the same engine at the same time, so that what
differs between the pairs is Redis alone; and every byte of every answer is compared.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, cycle
from statistics import median, quantiles

from loadtests.bench import payload
from loadtests.bench.tally import MeasuredConnection
from loadtests.kit import processes
from loadtests.kit.gate import GateProcess, Named, metric_sum
from loadtests.kit.redis_server import redis_server

INTERVAL_MS = 10.0
TOKENS = 16
WARM_UP_S = 4.0
ENOUGH = 50
"""Answers with and without Redis: fewer have no p99."""
ADDED_LIMIT_S = 0.001
HEAL_LIMIT_S = 0.5
"""Two heartbeats."""
_HEAL_PATIENCE_S = 10.0
LOOK_S = 0.01


@dataclass(slots=True)
class Lane:
    """The users of one gate: connections that are kept, and what came of all requests."""

    gate: GateProcess
    shares: bool
    idle: list[MeasuredConnection] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def ask(self, user: str) -> None:
        """One stream, on a connection of its own as long as it lasts."""
        port = self.gate.port
        sent_at = time.perf_counter()
        try:
            # One that was idle for long has been closed by its gate.
            self.idle = [connection for connection in self.idle if connection.is_usable]
            if self.idle:
                connection = self.idle.pop()
            else:
                connection = await MeasuredConnection.open(port)
                sent_at = time.perf_counter()
            failure = await connection.exchange(payload.request(user, port, stream=True, tokens=TOKENS))
        except OSError as error:
            failure = repr(error)
        if failure is None and b"".join(connection.body) != payload.stream(user, TOKENS):
            failure = "not what the engine sent"
        if failure is None:
            self.ttfts_s.append(connection.first_body_at - sent_at)
            self.idle.append(connection)
        else:
            self.errors.append(f"{user}: {failure}")


@dataclass(frozen=True, slots=True)
class Phase:
    """Some seconds of load: TTFT with Redis and without, and what went wrong with either."""

    name: str
    with_s: list[float]
    without_s: list[float]
    errors: list[str]

    @property
    def added_s(self) -> float:
        """What Redis adds to the p99 of TTFT."""
        return p99(self.with_s) - p99(self.without_s)

    @property
    def proves_something(self) -> bool:
        """Whether there is anything to compare."""
        return min(len(self.with_s), len(self.without_s)) >= ENOUGH

    def line(self) -> str:
        """The phase for people."""
        if not self.proves_something:
            return f"{self.name}: {len(self.with_s)} answers with Redis, {len(self.without_s)} without"
        shown = " ".join(
            f"{how} {1000 * median(ttfts_s):.2f} / {1000 * p99(ttfts_s):.2f} ms"
            for how, ttfts_s in (("with", self.with_s), ("without", self.without_s))
        )
        requests = len(self.with_s) + len(self.without_s) + len(self.errors)
        return (
            f"{self.name}: {requests} requests, {len(self.errors)} failed; TTFT p50 / p99: {shown}; "
            f"added to p99: {1000 * self.added_s:+.2f} ms"
        )

    def problems(self) -> list[str]:
        """Why it fails; empty when it passes."""
        problems = [f"{self.name}: {error}" for error in self.errors[:5]]
        if not self.proves_something:
            problems.append(f"{self.name}: proves nothing, too few were answered")
        elif self.added_s >= ADDED_LIMIT_S:
            problems.append(f"{self.name}: {1000 * self.added_s:.2f} ms added to the p99 of TTFT")
        return problems


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100)[98]


async def outage(seconds: float, rps: float) -> list[str]:
    """All phases; what must not have been."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        lanes = await four_gates(stack, server.url)
        problems = await healed(lanes, time.monotonic())
        await load_phase("warm-up", lanes, WARM_UP_S, rps)
        phases = [await load_phase("Redis is well", lanes, seconds, rps)]
        server.kill()
        phases.append(await load_phase("Redis is killed", lanes, seconds, rps))
        await asyncio.to_thread(server.start)
        problems += await healed(lanes, time.monotonic())
        server.freeze()
        phases.append(await load_phase("Redis is frozen", lanes, seconds, rps))
        server.thaw()
        problems += await healed(lanes, time.monotonic())
        problems += _told(lanes)
    print(*(phase.line() for phase in phases), sep="\n", flush=True)
    return problems + [problem for phase in phases for problem in phase.problems()]


async def four_gates(stack: ExitStack, url: str) -> list[Lane]:
    """Gates before the same engine, two of which share the Redis at a URL."""
    engine = processes.announcing("loadtests.bench.engine", "--interval-ms", INTERVAL_MS)
    _, ports = stack.enter_context(engine)
    units = [Named(f"u{number}", f"http://127.0.0.1:{port}") for number, port in enumerate(ports)]
    lanes = []
    for shares in (True, False, True, False):
        settings = {"redis": url} if shares else {}
        gate = await asyncio.to_thread(
            stack.enter_context, GateProcess(units, max_in_flight=10_000, settings=settings)
        )
        lanes.append(Lane(gate, shares))
    return lanes


async def load_phase(name: str, lanes: Sequence[Lane], seconds: float, rps: float) -> Phase:
    """A steady stream of requests, to the gates in turns, each sent on time whatever became of the others."""
    for lane in lanes:
        lane.ttfts_s, lane.errors = [], []
    loop = asyncio.get_running_loop()
    began_at, asked = loop.time(), []
    for number, lane in zip(count(), cycle(lanes)):
        if number >= seconds * rps:
            break
        await asyncio.sleep(max(0.0, began_at + number / rps - loop.time()))
        asked.append(asyncio.create_task(lane.ask(f"{name.split()[-1]}-{number:06}")))
    await asyncio.gather(*asked)
    return Phase(
        name,
        [ttft_s for lane in lanes if lane.shares for ttft_s in lane.ttfts_s],
        [ttft_s for lane in lanes if not lane.shares for ttft_s in lane.ttfts_s],
        [error for lane in lanes for error in lane.errors],
    )


async def healed(lanes: Sequence[Lane], since: float, limit_s: float = HEAL_LIMIT_S) -> list[str]:
    """Wait until the gates that share hear each other again."""
    while not all([await _hears(lane.gate) for lane in lanes if lane.shares]):
        if time.monotonic() - since > _HEAL_PATIENCE_S:
            return ["the gates do not hear each other again"]
        await asyncio.sleep(LOOK_S)
    healed_s = time.monotonic() - since
    print(f"the gates hear each other after {healed_s:.2f} s", flush=True)
    return [] if healed_s <= limit_s else [f"the gates heard each other only after {healed_s:.2f} s"]


async def _hears(gate: GateProcess) -> bool:
    page = await asyncio.to_thread(gate.metrics)
    return metric_sum(page, "cellgate_redis_up") == 1 and metric_sum(page, "cellgate_redis_peers") == 1


def _told(lanes: Sequence[Lane]) -> list[str]:
    """Each change of state is one line in the log of each gate."""
    problems = []
    for lane in lanes:
        lines = [line for line in lane.gate.log.read_text().splitlines() if " Redis " in line]
        said = [line.partition(" Redis ")[2].split()[0] for line in lines]
        if said != (["answers:", "does", "answers:", "does", "answers:"] if lane.shares else []):
            problems.append(f"a gate said of Redis: {lines}")
    return problems
