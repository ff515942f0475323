"""The pauses of a unit, as vLLM has them in its development mode: `/pause`, `/resume` and `/is_paused`.

What must stay true: `/health` says 200 meanwhile, and what comes waits until the unit goes on.
"""

from aiohttp import web

from loadtests.simunit.requests import ApiError
from loadtests.simunit.unit import PAUSES, Unit


class Pausing:
    """The handlers of one leader."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def add_to(self, app: web.Application) -> None:
        """Register every route."""
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_get("/is_paused", self._is_paused)

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in PAUSES:
            raise ApiError(400, f"mode must be one of {', '.join(PAUSES)}, not {mode!r}")
        await self._unit.pause(mode)
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        await self._unit.pause("")
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": bool(self._unit.paused)})
