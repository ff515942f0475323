"""Signals for autoscalers on the admin port, and the drain of the unit that is missed least."""

from __future__ import annotations

from http import HTTPStatus
from math import isfinite

from aiohttp import web

from cellgate.proxy.admin.admin_view import AdminView
from cellgate.proxy.admin.drain import drain_unit
from cellgate.proxy.admin.error_replies import error_reply
from cellgate.proxy.admin.responses import reply
from cellgate.proxy.control.scaling_signals import Scaling
from cellgate.proxy.ingress.ready import as_json
from cellgate.router.least_valued import least_valued

GOAL_S = 2.0
"""The 90th percentile of waits that there should be at most, unless the caller says another one."""


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
    view: AdminView, scaling: Scaling, request: web.BaseRequest, _name: str
) -> web.Response:
    """Drain it; answers with the unit, as the drain of a unit does. Raises NotHereError."""
    pools = scaling.pools(request.query.get("model"))
    if len(pools) > 1:
        models = ", ".join(sorted({model for pool in pools for model in pool.models}))
        return error_reply(HTTPStatus.BAD_REQUEST, f"say for which model a unit less is needed: {models}")
    least = least_valued(pools[0].all) if pools else None
    if least is None:
        return error_reply(HTTPStatus.CONFLICT, "there is no unit to spare: at most one is not drained")
    return await drain_unit(view, request, least.unit, drained=True)
