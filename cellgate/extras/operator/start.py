"""All that acts on units and load balancers by itself: `operate` makes it. Imported where its file is named.

In this order: `operate`, `roll_page`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web

from cellgate.extras.operator.actions import action_runner
from cellgate.extras.operator.alb import AlbWeight, alb_metrics
from cellgate.extras.operator.plan import Acting, Alone
from cellgate.extras.operator.recovery import attend
from cellgate.extras.operator.roll_plan import Order, OrderError, OwnRoll, RollStore, verb_of
from cellgate.extras.operator.roller import Roller, roll_units
from cellgate.proxy.admin.http import error_reply, reply
from cellgate.proxy.app import OperatorPart
from cellgate.proxy.ingress.reports import as_json

if TYPE_CHECKING:
    from cellgate.proxy.admin.pages import PageHandler
    from cellgate.proxy.control.plane import Plane


def operate(plane: Plane, gate: str, tls: Callable[[], ssl.SSLContext]) -> OperatorPart:
    """The operator of this gate: recovery, rolls, and the gate's weight at a load balancer of AWS.

    `tls` makes the context that verifies webhooks.
    """
    settings, run_action = plane.settings, action_runner(tls)
    acting, rolls = _agreed(plane, gate)
    roller = None if settings.roll is None else roll_units(plane, settings.roll, rolls, run_action)
    recovery = attend(plane, run_action, acting)
    alb = None
    if settings.alb is not None:
        alb = AlbWeight(settings.alb, plane.board, plane.now, plane.is_stopping, plane.events)
        plane.metrics.include(partial(alb_metrics, alb))

    def start(courses: Mapping[str, Any] | None) -> None:
        if courses is not None:
            recovery.take_over(courses)
        if alb is not None:
            alb.start()

    async def close() -> None:
        if roller is not None:
            await roller.close()
        await recovery.close()
        if alb is not None:
            await alb.close()

    return OperatorPart(
        start=start,
        configure=recovery.configure,
        hand_over=recovery.hand_over,
        carry_on=recovery.carry_on,
        close=close,
        roll=roller.shown if roller is not None else lambda: None,
        pages=_pages(roller) if roller is not None else {},
    )


def _agreed(plane: Plane, gate: str) -> tuple[Acting, RollStore]:
    """What gates agree on; without Redis this one is alone, or agrees by Leases."""
    if plane.settings.redis is None:
        return _acting(plane, gate), OwnRoll()
    # Imported late: the client takes a quarter of a second and ten megabytes.
    from cellgate.extras.operator.agreement import agree

    return agree(plane, plane.settings.redis, gate)


def _acting(plane: Plane, gate: str) -> Acting:
    if plane.settings.leases is None:
        return Alone()
    # Imported late, because it brings an HTTP client.
    from cellgate.extras.operator.leases import agree_by_leases

    return agree_by_leases(plane, plane.settings.leases, gate)


# Rolls by the admin port: what is under way, and what is asked of it.


def _pages(roller: Roller) -> Mapping[str, PageHandler]:
    """What answers on the admin port, by path."""
    return {"/roll": partial(roll_page, roller), "/roll/{name}": partial(order_roll, roller)}


async def roll_page(roller: Roller, _request: web.BaseRequest, _name: str) -> web.Response:
    """The roll under way, or the last one."""
    return reply(as_json({"roll": roller.shown()}))


async def order_roll(roller: Roller, request: web.BaseRequest, verb: str) -> web.Response:
    """Ask for it; the gate that conducts does it within a second or two."""
    query = request.query
    cells = tuple(cell for cell in query.get("cells", "").split(",") if cell)
    try:
        order = Order(
            verb_of(verb), request.remote or "?", cells, query.get("version", ""), query.get("dry_run") == "1"
        )
        await roller.order(order)
    except OrderError as error:
        return error_reply(HTTPStatus.CONFLICT, str(error))
    return reply(as_json({"asked": verb}), HTTPStatus.ACCEPTED)
