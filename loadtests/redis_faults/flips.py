"""A gate finds a unit dead: how long until another gate, which can reach it, has heard of that?

Both gates are before one mock fleet, the first by way of a door for each unit. A door that shuts refuses
connections: fatal evidence, there alone. The times are those of the two gates' own events.
"""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from statistics import median, quantiles
from urllib.parse import urlsplit

from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.mock_fleet import mock_fleet
from loadtests.kit.redis_server import redis_server
from loadtests.wire.scripted import port_of

UNITS = 60
AT_ONCE = 20
"""Less than half of them: it is the units that are lost, not the gate's network."""
APART_S = 0.025
LIMIT_S = 0.05
_LINGER_S = 2.5
_UP_PATIENCE_S = 15.0
_LOOK_S = 0.1


class Door:
    """A way to one server on a port that stays the same; while it is shut, connections are refused."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._host, self._to = place.hostname, place.port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._visits: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Let everyone through. The first time finds the port."""
        self._server = await asyncio.start_server(self._let_in, "127.0.0.1", self.port)
        self.port = port_of(self._server)

    async def shut(self) -> None:
        """Throw everyone out, and refuse whoever comes."""
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        if self._visits:
            await asyncio.wait(self._visits)

    def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.create_task(self._visit(reader, writer))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(OSError):
            there, to = await asyncio.open_connection(self._host, self._to)
            self._open.add(to)
            await asyncio.gather(_carry(reader, to), _carry(there, writer))
            self._open.discard(to)
        self._open.discard(writer)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


async def flips(rounds: int) -> list[str]:
    """Shut some doors at a time; what must not have been."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server())
        units = stack.enter_context(mock_fleet(UNITS, 2.0))
        doors = {unit.name: Door(unit.url) for unit in units}
        for door in doors.values():
            await door.open()
            stack.push_async_callback(door.shut)
        behind = [Named(name, f"http://127.0.0.1:{door.port}") for name, door in doors.items()]
        settings = {"redis": server.url}
        first, second = GateProcess(behind, settings=settings), GateProcess(units, settings=settings)
        for gate in (first, second):
            await asyncio.to_thread(stack.enter_context, gate)
        took_s: list[float] = []
        problems: list[str] = []
        for number in range(rounds):
            begin = number * AT_ONCE % UNITS
            names = [unit.name for unit in units[begin : begin + AT_ONCE]]
            heard, missed = await _round(first, second, names, doors)
            took_s += heard
            problems += missed
    if len(took_s) < 2:
        return [*problems, "proves nothing: no flip was heard"]
    p99_s = quantiles(took_s, n=100, method="inclusive")[98]
    print(
        f"{len(took_s)} flips heard by the other gate: median {1000 * median(took_s):.1f} ms, "
        f"p99 {1000 * p99_s:.1f} ms, worst {1000 * max(took_s):.1f} ms",
        flush=True,
    )
    return problems if p99_s <= LIMIT_S else [*problems, f"the p99 is {1000 * p99_s:.0f} ms"]


async def _round(
    first: GateProcess, second: GateProcess, names: list[str], doors: dict[str, Door]
) -> tuple[list[float], list[str]]:
    """How long it took for each unit, and for which it never came."""
    since = time.time()
    for name in names:
        await doors[name].shut()
        await asyncio.sleep(APART_S)
    await asyncio.sleep(_LINGER_S)
    found, missed = [], []
    for name in names:
        down_at = await asyncio.to_thread(first.flipped, name, "down", since)
        told = [
            flip
            for flip in await asyncio.to_thread(second.flips, since, name)
            if "reports it as down" in flip["line"]
        ]
        if down_at is None or not told:
            missed.append(f"{name}: down at {down_at} at the first gate, heard by the second: {bool(told)}")
        else:
            found.append(told[0]["at"] - down_at)
    for name in names:
        await doors[name].open()
    for gate in (first, second):
        await asyncio.to_thread(gate.wait_up)
    return found, missed
