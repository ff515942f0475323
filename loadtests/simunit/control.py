"""The commands: `POST /sim/fault` hurts or heals the unit, `GET /sim/state` says how it is.

`POST /sim/hold` keeps long answers from ending, until `POST /sim/release`. They go on at their pace, past the
tokens that they were asked for: a test decides when a stream ends, and a unit at work looks as one does.
"""

import json
import os
from dataclasses import asdict

from aiohttp import web

from loadtests.simunit.door import Door
from loadtests.simunit.faults import apply_command
from loadtests.simunit.requests import ApiError
from loadtests.simunit.transfer import Transfers
from loadtests.simunit.unit import Unit


class Control:
    """Handlers beside the API. They answer on the control port too, which no fault shuts."""

    def __init__(self, unit: Unit, door: Door, transfers: Transfers) -> None:
        self._unit = unit
        self._transfers = transfers
        self._door = door

    def add_to(self, app: web.Application) -> None:
        """Register every route."""
        app.router.add_post("/sim/fault", self._fault)
        app.router.add_post("/sim/hold", self._hold)
        app.router.add_post("/sim/release", self._release)
        app.router.add_get("/sim/state", self._state)

    async def _fault(self, request: web.Request) -> web.Response:
        try:
            self._unit.set_faults(apply_command(self._unit.faults, json.loads(await request.read())))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        if self._unit.faults.refusing:
            self._door.shut()
        else:
            await self._door.open()
        return await self._state(request)

    async def _hold(self, request: web.Request) -> web.Response:
        over_tokens = json.loads(await request.read()).get("over_tokens")
        if isinstance(over_tokens, bool) or not isinstance(over_tokens, int) or over_tokens < 0:
            raise ApiError(400, f"over_tokens must be a number of tokens, not {over_tokens!r}")
        self._unit.engine.held_over = over_tokens
        return await self._state(request)

    async def _release(self, request: web.Request) -> web.Response:
        self._unit.engine.held_over = None
        return await self._state(request)

    async def _state(self, _: web.Request) -> web.Response:
        engine = self._unit.engine
        return web.json_response(
            {
                "name": self._unit.name,
                "pid": os.getpid(),
                "port": self._door.port,
                "followers": self._unit.collective.pids(),
                "death": self._unit.death,
                "struck": self._unit.poison.struck,
                "journal": self._unit.journal,
                "held_over": engine.held_over,
                "running": len(engine.running),
                "waiting": len(engine.waiting),
                "kv_blocks_used": engine.pool.used,
                "counts": asdict(engine.counts),
                "moved": asdict(engine.moved),
                "links": self._transfers.links(),
                "faults": asdict(self._unit.faults),
            }
        )
