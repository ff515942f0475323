"""Operations of a unit's engine by the admin port: pause, resume, sleep, wake."""

from __future__ import annotations

from aiohttp import web

from cellgate.proxy.admin.admin_view import AdminView, Conduct
from cellgate.proxy.admin.error_replies import unknown
from cellgate.proxy.admin.responses import reply
from cellgate.proxy.admin.unit_view import unit_view
from cellgate.proxy.control.conduct import Deed
from cellgate.proxy.ingress.ready import as_json
from cellgate.proxy.logs.events import Action


async def conduct_unit(
    view: AdminView, conduct: Conduct, request: web.BaseRequest, name: str, *, deed: Deed
) -> web.Response:
    """Let the engine of a unit do it, in the mode of the query. Raises NotHereError, ConductError."""
    state = view.board.units.get(name)
    if state is None:
        raise unknown("unit", name, view.board.units)
    mode = await conduct(state, deed, request.query.get("mode", ""))
    detail = f"mode {mode}" if mode else ""
    view.events.add(Action(deed, request.remote or "?", unit=name, detail=detail))
    return reply(as_json(unit_view(state, view.now()) | {"mode": mode}))
