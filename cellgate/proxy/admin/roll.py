"""Rolls by the admin port: what is under way, and what an operator asks of it."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from cellgate.proxy.admin.error_replies import error_reply
from cellgate.proxy.admin.responses import reply
from cellgate.proxy.ingress.ready import as_json
from cellgate.proxy.rolling.orders import Order, OrderError, Verb
from cellgate.proxy.rolling.roller import Roller

OFF = "no roll is configured at this gate: the key `roll` has its command (docs/rolling.md)"


async def roll_page(roller: Roller | None, _request: web.BaseRequest, _name: str) -> web.Response:
    """The roll under way, or the last one."""
    if roller is None:
        return error_reply(HTTPStatus.CONFLICT, OFF)
    return reply(as_json({"roll": roller.shown()}))


async def order_roll(
    roller: Roller | None, request: web.BaseRequest, _name: str, *, verb: Verb
) -> web.Response:
    """Ask for it; the gate that conducts does it within a second or two."""
    if roller is None:
        return error_reply(HTTPStatus.CONFLICT, OFF)
    query = request.query
    cells = tuple(cell for cell in query.get("cells", "").split(",") if cell)
    order = Order(verb, request.remote or "?", cells, query.get("version", ""), query.get("dry_run") == "1")
    try:
        await roller.order(order)
    except OrderError as error:
        return error_reply(HTTPStatus.CONFLICT, str(error))
    return reply(as_json({"asked": verb}), HTTPStatus.ACCEPTED)
