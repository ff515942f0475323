"""How scaling attends a control plane: its pages on the admin port have signals for autoscalers, and a drain
of the unit that is missed least.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from math import isfinite
from typing import TYPE_CHECKING

from aiohttp import web

from cellgate.extras.scaling.demand import least_valued
from cellgate.extras.scaling.pool_signals import Scaling
from cellgate.proxy.admin.http import error_reply, reply
from cellgate.proxy.admin.views import unit_view
from cellgate.proxy.ingress.reports import as_json
from cellgate.proxy.observe.events import Action

if TYPE_CHECKING:
    from cellgate.proxy.admin.pages import PageHandler
    from cellgate.proxy.control.plane import Plane

GOAL_S = 2.0
"""The 90th percentile of waits that there should be at most, unless the caller says another one."""


def attend(plane: Plane) -> Scaling:
    """Begin to compute them for a control plane: at its ticks, for its metrics and its admin port."""
    scaling = Scaling(plane.board, plane.router.queue, plane.last_requests)
    plane.ticker.looks.append(scaling.tick)
    plane.metrics.include(scaling.collect)
    plane.pages.update(scaling_pages(plane, scaling))
    return scaling


def scaling_pages(plane: Plane, scaling: Scaling) -> Mapping[str, PageHandler]:
    """By path."""
    return {
        "/scaling": partial(scaling_page, scaling),
        "/scaling/drain": partial(drain_least_valued, plane, scaling),
    }


async def scaling_page(scaling: Scaling, request: web.BaseRequest, _name: str) -> web.Response:
    """What KEDA's metrics-api scaler reads (`valueLocation: desired_units`)."""
    try:
        goal_s = float(request.query.get("p90_s", GOAL_S))
    except ValueError:
        goal_s = 0.0
    if not isfinite(goal_s) or goal_s <= 0.0:
        return error_reply(HTTPStatus.BAD_REQUEST, "p90_s is a number of seconds above 0, such as p90_s=2")
    return reply(as_json(await scaling.view(goal_s, request.query.get("model"))))


async def drain_least_valued(
    plane: Plane, scaling: Scaling, request: web.BaseRequest, _name: str
) -> web.Response:
    """Drain it; answers with the unit, as the drain of a unit does."""
    pools = scaling.pools(request.query.get("model"))
    if len(pools) > 1:
        models = ", ".join(sorted({model for pool in pools for model in pool.models}))
        return error_reply(HTTPStatus.BAD_REQUEST, f"say for which model a unit less is needed: {models}")
    least = least_valued(pools[0].all) if pools else None
    if least is None:
        return error_reply(HTTPStatus.CONFLICT, "there is no unit to spare: at most one is not drained")
    plane.set_drain(least.unit, True)
    plane.events.add(Action("drain", request.remote or "?", unit=least.unit))
    return reply(as_json(unit_view(plane.board.units[least.unit], plane.now())))
