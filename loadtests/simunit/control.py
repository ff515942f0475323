"""The fault commands: `POST /sim/fault` hurts or heals the unit, `GET /sim/state` says how it is."""

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
        """Register both routes."""
        app.router.add_post("/sim/fault", self._fault)
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
                "running": len(engine.running),
                "waiting": len(engine.waiting),
                "kv_blocks_used": engine.pool.used,
                "counts": asdict(engine.counts),
                "moved": asdict(engine.moved),
                "links": self._transfers.links(),
                "faults": asdict(self._unit.faults),
            }
        )
