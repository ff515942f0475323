"""Drill: a unit answers fast and wrong. What do clients get, behind the gate, HAProxy and SMG in one run?

`python -m loadtests.nonsense` plays a few kinds of nonsense on three units, `--whole` all kinds on all fleets
(hours; `--lanes` at the same time), `--clients` the other side: bad requests against healthy units. What must
hold is in the constants. The exit code is 1 when something of it does not hold behind the gate.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import orjson
import uvloop

from loadtests.drill.routers import ROUTERS, running
from loadtests.kit import processes
from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.report import columns, machine, print_problems
from loadtests.kit.waiting import until, wait_until
from loadtests.simunit.nonsense import KINDS
from loadtests.simunit.process import SimUnit, sim_units
from loadtests.wire.blocking import fetch
from loadtests.wire.client import Connections
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

CLIENTS = 6
FIRST_S, LATER_S = 20.0, 10.0
SERVED_FIRST, SERVED_LATER = 0.9, 0.99
OUT_S = BACK_S = 5.0
WAIT_S = 20.0
"""So long the return of a unit is awaited."""
PATIENCE_S = 2.5
"""A client gives up on an answer after this: then it was not served."""
PAUSE_S = 0.05
"""As SDKs do: they wait a moment before they ask again."""
TIMING = {"followers": 0, "step_ms": 20, "max_model_len": 2048}
PEERS = ("haproxy", "smg")
FEW = ("status_401", "status_400", "html", "error_json", "nothing_said", "empty_deltas", "same_token")
FLEETS = ((2, 1), (3, 1), (8, 1), (8, 4))
"""How many units, and how many of them answer nonsense."""
NO_FAULT = ("no_path",)
"""Units of a mixed fleet say so: their requests go to others, and they stay."""

SHARES = (0.05, 0.5, 1.0)
STATUSES = (400, 401, 402, 403, 404, 405, 410, 413, 415, 422, 451)
CLIENTS_S = 20.0
EXTRA, SLOWER = 0.03, 1.2
"""What bad requests may cost units, as a share of all, and clients, beside one unit alone."""
LACKED = {"user": "nobody"}
_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*[1-9]')
_numbers = count()


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    kind: str
    stream: bool
    units: int
    bad: int

    def __str__(self) -> str:
        shape = "stream" if self.stream else "whole"
        return f"{self.kind}, {shape}, {self.bad} of {self.units}"


@dataclass(slots=True)
class Outcome:
    """What came of a cell: shares served by router, early and late, and what became of the bad units."""

    cell: Cell
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    out_s: float | None = None
    back_s: float | None = None
    words: str = ""
    others_out: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What does not hold."""
        first, later = self.shares["gate"]
        found = [f"healthy unit out: {line}" for line in self.others_out]
        found += [f"{first:.1%} served in the first {FIRST_S:.0f} s"] * (first < SERVED_FIRST)
        found += [f"{later:.1%} served later"] * (later < SERVED_LATER)
        if self.cell.kind not in NO_FAULT:
            found += [f"out after {_s(self.out_s)}"] * (self.out_s is None or self.out_s > OUT_S)
            found += [f"back after {_s(self.back_s)}"] * (self.back_s is None or self.back_s > BACK_S)
        return [f"{self.cell}: {each}" for each in found]

    def row(self) -> list[str]:
        """The line of the table."""
        shape = "stream" if self.cell.stream else "whole"
        shares = [f"{share:.1%}" for name in ("gate", *PEERS) for share in self.shares[name]]
        fleet = f"{self.cell.bad} of {self.cell.units}"
        return [self.cell.kind, shape, fleet, *shares, _s(self.out_s), _s(self.back_s), self.words]


HEAD = ["kind", "", "bad", "gate 20 s", "later", "HAProxy", "later", "SMG", "later", "out", "back", "why"]


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


class Load:
    """Closed-loop clients of one router: what they got, by when they asked."""

    def __init__(self, url: str, *, stream: bool, bad: float = 0.0, clients: int = CLIENTS) -> None:
        self.seen: list[tuple[float, bool, Reply, float]] = []
        """When it was asked, whether it was a bad request, the reply, and how long that took."""
        self._connections = Connections(url)
        self._stream, self._bad = stream, bad
        self._goes_on = True
        self._clients = [asyncio.create_task(self._use()) for _ in range(clients)]

    async def end(self) -> None:
        """No more requests; those that are open are awaited."""
        self._goes_on = False
        await asyncio.gather(*self._clients)
        self._connections.close()

    def share(self, since: float, until_at: float) -> float:
        """The share of the requests of that time that were served."""
        found = [is_served(reply, self._stream) for at, _, reply, _ in self.seen if since <= at < until_at]
        return sum(found) / max(1, len(found))

    async def _use(self) -> None:
        debt = 0.0
        while self._goes_on:
            debt += self._bad
            is_bad = debt >= 1.0
            debt -= is_bad
            reply, begun = Reply(), time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._connections.exchange(self._request(is_bad), reply)
            except (OSError, TimeoutError):
                pass
            self.seen.append((begun, is_bad, reply, time.monotonic() - begun))
            if not is_served(reply, self._stream):
                await asyncio.sleep(PAUSE_S)

    def _request(self, is_bad: bool) -> bytes:
        text = f"{next(_numbers)}: tell me of this number"
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return post(orjson.dumps(body | LACKED if is_bad else body))


def is_served(reply: Reply, stream: bool) -> bool:
    """Whether a good answer has come."""
    is_whole = reply.status == 200 and reply.is_whole and _TOKENS.search(reply.body) is not None
    return is_whole and (not stream or b"data: [DONE]" in reply.body)


# -- nonsense ----------------------------------------------------------------------------------------------


@contextmanager
def _routers(units: Sequence[SimUnit], folder: Path) -> Iterator[tuple[GateProcess, dict[str, str]]]:
    """All of them before the same units, and where each listens."""
    with ExitStack() as stack:
        gate = stack.enter_context(GateProcess(units))
        urls = {"gate": gate.url}
        for name in PEERS:
            starter = ROUTERS[name]
            assert starter is not None
            command = starter([unit.url for unit in units], folder)
            urls[name] = stack.enter_context(running(command, folder / f"{name}.log"))
        wait_until(lambda: _all_healthy(urls["smg"], len(units)), WAIT_S)
        yield gate, urls


def _all_healthy(url: str, units: int) -> bool:
    workers = orjson.loads(fetch(f"{url}/workers").body)["workers"]
    return sum(bool(worker["is_healthy"]) for worker in workers) == units


async def play(cell: Cell, units: Sequence[SimUnit], folder: Path) -> Outcome:
    """One cell of the table."""
    stack = ExitStack()
    gate, urls = await asyncio.to_thread(stack.enter_context, _routers(units, folder))
    try:
        return await _play(cell, units[: cell.bad], gate, urls)
    finally:
        await asyncio.to_thread(stack.close)


async def _play(cell: Cell, bad: Sequence[SimUnit], gate: GateProcess, urls: dict[str, str]) -> Outcome:
    names = {unit.name for unit in bad}
    for unit in bad:
        await asyncio.to_thread(unit.fault, "answers", kind=cell.kind, spare_canaries=1)
    begun, began = time.monotonic(), time.time()
    loads = {name: Load(url, stream=cell.stream) for name, url in urls.items()}
    await asyncio.sleep(FIRST_S + LATER_S)
    for unit in bad:
        await asyncio.to_thread(unit.fault, "heal")
    mended = time.monotonic()

    def are_up() -> bool:
        return all(unit["verdict"] == "up" for unit in gate.units() if unit["name"] in names)

    outcome = Outcome(cell)
    if await until(are_up, WAIT_S):
        outcome.back_s = time.monotonic() - mended
    await asyncio.gather(*(load.end() for load in loads.values()))
    for name, load in loads.items():
        later = begun + FIRST_S
        outcome.shares[name] = load.share(begun, later), load.share(later, later + LATER_S)
    for event in await asyncio.to_thread(gate.events):
        if event["kind"] == "flip" and event["after"] == "down" and gate.at(event) > began:
            if event["unit"] not in names:
                outcome.others_out.append(event["line"])
            elif outcome.out_s is None:
                outcome.out_s, outcome.words = gate.at(event) - began, event["reason"]
    return outcome


async def nonsense(cells: Sequence[Cell], lanes: int) -> list[str]:
    """All cells, so many at the same time; what does not hold. Each line is printed as it comes."""
    rows, problems, left = [HEAD], [], list(cells)

    async def lane(folder: Path) -> None:
        while left:
            cell = left.pop(0)
            names = [f"u{number}" for number in range(cell.units)]
            stack = ExitStack()
            units = await asyncio.to_thread(stack.enter_context, sim_units(names, **TIMING))
            try:
                outcome = await play(cell, units, folder)
            finally:
                await asyncio.to_thread(stack.close)
            rows.append(outcome.row())
            print("  ".join(rows[-1]), flush=True)
            print_problems(found := outcome.problems())
            problems.extend(found)

    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(lanes)]
        await asyncio.gather(*map(lane, folders))
    print(f"\n{machine()}\n{columns(rows)}\n{len(cells)} cells, {len(problems)} problems")
    return problems


# -- bad requests ------------------------------------------------------------------------------------------


async def bad_requests(statuses: Sequence[int]) -> list[str]:
    """Some, half or all requests are at fault, with each status: what does not hold."""
    rows, problems = [["status", "bad", "requests", "extra load", "time", "flips"]], []
    with sim_units(["u0", "u1", "u2"], **TIMING) as units:
        for status in statuses:
            for unit in units:
                unit.fault("lacks", status=status)
            for share in SHARES:
                row, found = await _clients(status, share, units)
                rows.append(row)
                print("  ".join(row), flush=True)
                print_problems(found)
                problems += found
    print(columns(rows))
    return problems


async def _clients(status: int, share: float, units: Sequence[SimUnit]) -> tuple[list[str], list[str]]:
    stack = ExitStack()
    gates = [await asyncio.to_thread(stack.enter_context, GateProcess(some)) for some in (units, units[:1])]
    try:
        before, began = await asyncio.to_thread(_attempts, gates[0]), time.time()
        clients = CLIENTS if share > 0.1 else 3 * CLIENTS
        loads = [Load(gate.url, stream=False, bad=share, clients=clients) for gate in gates]
        await asyncio.sleep(CLIENTS_S)
        await asyncio.gather(*(load.end() for load in loads))
        attempts = await asyncio.to_thread(_attempts, gates[0]) - before
        flips = await asyncio.to_thread(gates[0].flips, began)
    finally:
        await asyncio.to_thread(stack.close)
    seen = loads[0].seen
    extra = attempts / len(seen) - 1
    many, alone = (_mean([took for _, bad, _, took in load.seen if bad]) for load in loads)
    said = {reply.body for _, bad, reply, _ in seen if bad}
    told = {reply.body for _, bad, reply, _ in loads[1].seen if bad}
    wrong = [reply for _, bad, reply, _ in seen if reply.status != (status if bad else 200)]
    row = [
        str(status),
        f"{share:.0%}",
        str(len(seen)),
        f"{extra:.1%}",
        f"{many / alone:.2f} x",
        str(len(flips)),
    ]
    found = [f"{len(wrong)} wrong answers, as {wrong[0].status} {wrong[0].body[:80]!r}"] if wrong else []
    found += ["the error has changed"] * (said != told)
    found += [f"extra load of {extra:.1%}"] * (extra > EXTRA)
    found += [f"{many / alone:.2f} times as long"] * (many > SLOWER * alone)
    found += [flip["line"] for flip in flips]
    return row, [f"{status}, {share:.0%}: {each}" for each in found]


def _attempts(gate: GateProcess) -> float:
    return metric_sum(gate.metrics(), "cellgate_attempts_total")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> int:
    """Play what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.nonsense", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="all kinds, on all fleets")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="these alone")
    parser.add_argument("--fleets", nargs="+", type=int, choices=range(len(FLEETS)), help="by number")
    parser.add_argument("--lanes", type=int, default=2, help="cells at the same time")
    parser.add_argument("--clients", action="store_true", help="bad requests against healthy units")
    args = parser.parse_args()
    processes.end_on_sigterm()
    if args.clients:
        statuses = STATUSES if args.whole else STATUSES[:2]
        return int(bool(uvloop.run(bad_requests(statuses))))
    fleets = [FLEETS[number] for number in args.fleets or (range(len(FLEETS)) if args.whole else [1])]
    kinds = args.kinds or (KINDS if args.whole else FEW)
    cells = [Cell(kind, stream, *fleet) for fleet in fleets for kind in kinds for stream in (False, True)]
    return int(bool(uvloop.run(nonsense(cells, args.lanes))))


if __name__ == "__main__":
    sys.exit(main())
