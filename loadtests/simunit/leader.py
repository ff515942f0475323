"""The leader process: starts the followers, opens the ports, runs the engine, and leaves nothing behind."""

import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from loadtests.simunit.api import Api, tell_errors
from loadtests.simunit.collective import start_collective
from loadtests.simunit.control import Control
from loadtests.simunit.door import Door
from loadtests.simunit.faults import Faults
from loadtests.simunit.pausing import Pausing
from loadtests.simunit.poison import Poison
from loadtests.simunit.sequence import Timing
from loadtests.simunit.transfer import Transfers
from loadtests.simunit.unit import Unit

KEEP_ALIVE_S = 5.0
"""How long an idle connection stays open, as in vLLM."""

DEATH_TO_EXIT_S = 0.5
BODY_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """What the command line says. `until_stdin_ends`: exit when whoever started the leader is gone.
    `await_port`: the port is another's; say on stdout that all else is ready, and listen once it is free.
    """

    name: str
    model: str
    host: str
    port: int
    followers: int
    warm_up_s: float
    until_stdin_ends: bool
    await_port: bool
    poison: str = ""
    can_pause: int = 0
    logprobs: int = 0
    blind: int = 0


async def run_leader(options: LeaderOptions, timing: Timing) -> int:
    """Serve until told to stop (exit status 0) or until the engine has died (1)."""
    collective = await start_collective(options.followers)
    unit = Unit(options.name, options.model, timing, collective, Faults(warm_up_s=options.warm_up_s))
    unit.poison = Poison(options.poison)
    unit.shows_logprobs, unit.is_blind = bool(options.logprobs), bool(options.blind)
    stop = _stop_event(options.until_stdin_ends)
    engine = asyncio.create_task(unit.run())
    stopped = asyncio.create_task(stop.wait())
    try:
        await _open_ports(unit, options)
        await asyncio.wait((engine, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            return 0
        engine.result()
        print(f"{unit.name}: {unit.death}; exiting", file=sys.stderr)
        await asyncio.sleep(DEATH_TO_EXIT_S)
        return 1
    finally:
        await collective.close()


async def _open_ports(unit: Unit, options: LeaderOptions) -> None:
    """Listen, then say so in one line of JSON on stdout."""
    logging.getLogger("aiohttp.server").addFilter(_is_not_the_clients_fault)
    app = web.Application(middlewares=[tell_errors], client_max_size=BODY_LIMIT_BYTES)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=KEEP_ALIVE_S)
    door = Door(runner, options.host, options.port)
    control_door = Door(runner, "127.0.0.1", 0)
    transfers = Transfers(unit.name, unit.engine, door)
    transfers.add_to(app)
    Api(unit, transfers).add_to(app)
    Control(unit, door, transfers).add_to(app)
    if options.can_pause:
        Pausing(unit).add_to(app)
    await runner.setup()
    if options.await_port:
        print(json.dumps({"awaits": options.port}), flush=True)
        await door.open_when_free()
    else:
        await door.open()
    await control_door.open()
    ready = {"name": unit.name, "port": door.port, "control_port": control_door.port, "pid": os.getpid()}
    print(json.dumps(ready | {"followers": unit.collective.pids()}), flush=True)


def _stop_event(until_stdin_ends: bool) -> asyncio.Event:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_ends:
        loop.add_reader(sys.stdin.fileno(), _read_stdin, stop)
    return stop


def _read_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def _is_not_the_clients_fault(record: logging.LogRecord) -> bool:
    """A request that does not parse is answered 400: there is nothing to look into."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
