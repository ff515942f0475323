"""A gate before scripted units, without the probes, and what must be true when it is left.

In tests/sockets, and elsewhere with @live:

async def test_something() -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(chat())
"""

from __future__ import annotations

import asyncio
import functools
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

import uvloop

from cellgate.proxy.app import Gate, make_gate
from cellgate.proxy.config.settings import Address, Settings, Tls
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.observe.access_log import AccessLog, Finished
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.process.tls import LiveTls
from cellgate.proxy.request.body import read_ask, read_large_ask
from cellgate.proxy.request.one_meaning import ONCE
from cellgate.router.nouns import Ask, Evidence, Fleet, Sign, Strength, Unit
from tests.sim import world
from tests.wire.client import Client, connected
from tests.wire.unit import Script, ScriptedUnit, listening

P = ParamSpec("P")
Test = Callable[P, Coroutine[Any, Any, None]]

TEST_S = 60.0
PROCESSES_S = 180.0
"""For tests that start gates, units and more as processes, on a machine that may have else to do."""
PATIENCE_S = 30.0
NO_TLS = Tls()


def live_for(limit_s: float) -> Callable[[Test[P]], Callable[P, None]]:
    """Run an async test on real sockets and the loop that the gate uses, for at most so long."""

    def bound(test: Test[P]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            run_live(test(*args, **kwargs), limit_s)

        return run

    return bound


def run_live(test: Coroutine[Any, Any, None], limit_s: float = TEST_S) -> None:
    """What `live_for` makes of a test; tests/sockets runs all of its own so."""

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await test

    uvloop.run(bounded())


def live(test: Test[P]) -> Callable[P, None]:
    """The same for at most TEST_S."""
    return live_for(TEST_S)(test)


def simulated(test: Test[P]) -> Callable[P, None]:
    """Run an async test in virtual time, on the simulated network. Nothing may be left at its end."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        world.run(world.World(seed=1), test(*args, **kwargs))

    return run


async def until(is_so: Callable[[], object]) -> None:
    """Wait for what must come to be."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - nobody tells the test, so it has to look.
            await asyncio.sleep(0.001)


class Records(AccessLog):
    """An access log that keeps the records."""

    def __init__(self) -> None:
        super().__init__("off", _Nowhere(), lambda: 0.0)
        self.kept: list[Finished] = []

    def write(self, record: Finished) -> None:
        self.kept.append(record)


class _Nowhere:
    def write(self, data: memoryview, /) -> int | None:
        return len(data)


def unheard_gate(settings: Settings, loop: asyncio.AbstractEventLoop, records: Records) -> Gate:
    """A gate that parses large bodies at once and logs nowhere."""

    async def read(body: bytes, _payer: str, _why_not: object, route: str) -> Ask | Failure:
        return read_large_ask(body, route) if route == ONCE else read_ask(body)

    return make_gate(
        settings,
        loop,
        random.Random(1),
        events=EventLog(lambda: 0.0, settings.rules.passes, lambda *_: None),
        access_log=records,
        read=read,
        unit_tls=LiveTls(settings.tls).units,
    )


async def start_unwatched(gate: Gate) -> None:
    """Start a gate that sends no probe and believes every unit to be UP."""
    plane = gate.plane
    await gate.start(LiveTls(plane.settings.tls).clients())
    for state in plane.board:
        name = state.unit.name
        plane.prober.stop(name)
        plane.board.observe(
            Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "the test says so", plane.now())
        )


@dataclass
class Stage:
    """What a test plays on."""

    gate: Gate
    gateway: Gateway
    plane: Plane
    units: list[ScriptedUnit]
    records: Records

    @property
    def unit(self) -> ScriptedUnit:
        """The only unit."""
        (unit,) = self.units
        return unit

    @property
    def received(self) -> int:
        """How many requests have reached any unit."""
        return sum(len(unit.requests) for unit in self.units)

    @property
    def outcomes(self) -> list[str]:
        """How the requests that are over have ended."""
        return [record.outcome.value for record in self.records.kept]

    def client(self, tls: ssl.SSLContext | None = None) -> AbstractAsyncContextManager[Client]:
        """A new connection to the gate."""
        return connected(self.gateway.port, tls)

    def buffered(self) -> int:
        """Bytes that the gate holds for its clients."""
        transports = [client._transport for client in self.gateway.clients]
        return sum(transport.get_write_buffer_size() for transport in transports if transport is not None)

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait for what must come to be."""
        await until(is_so)

    async def until_quiet(self) -> None:
        """Wait until no client is connected and nothing is in flight; every account must then be even."""
        await self.until(lambda: not self.gateway.clients and not self.plane.board.in_flight)
        assert self.gateway.memory.used == 0
        assert self.plane.board.retries_in_flight == 0
        assert all(not state.leases for state in self.plane.board)


@asynccontextmanager
async def stage(
    *scripts: Script,
    tls: Tls = NO_TLS,
    unit_tls: ssl.SSLContext | None = None,
    defects: list[dict[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[Stage]:
    """A unit for each script, the gate before them (it takes them in turn), and the books when it is over.

    `defects` gets what is reported to the loop; without it there must be nothing. `options` are fields of
    Settings. `unit_tls` lets the units speak TLS.
    """
    loop = asyncio.get_running_loop()
    problems: list[dict[str, Any]] = [] if defects is None else defects
    loop.set_exception_handler(lambda _, context: problems.append(context))
    async with AsyncExitStack() as stack:
        units = [await stack.enter_async_context(listening(ScriptedUnit(s), unit_tls)) for s in scripts]
        origin = "http://127.0.0.1" if unit_tls is None else "https://localhost"
        fleet = Fleet(units=tuple(_unit(number, f"{origin}:{u.port}") for number, u in enumerate(units)))
        settings = Settings(
            fleet, listen=Address("127.0.0.1", 0), policy="round_robin", access_log="off", tls=tls, **options
        )
        records = Records()
        gate = unheard_gate(settings, loop, records)
        await start_unwatched(gate)
        here = Stage(gate, gate.gateway, gate.plane, units, records)
        try:
            yield here
            await here.until_quiet()
        finally:
            await gate.stop(delay_s=0.0, drain_s=0.0)
    assert defects is not None or not problems, problems


def _unit(number: int, url: str) -> Unit:
    return Unit(f"u{number}", "c", url, models=("tiny",))
