"""The operator's hand on rotation: units, and whole cells, drained and put back."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from cellgate.proxy.admin.admin_view import AdminView
from cellgate.proxy.admin.error_replies import unknown
from cellgate.proxy.admin.responses import reply
from cellgate.proxy.admin.unit_view import unit_view
from cellgate.proxy.ingress.ready import as_json
from cellgate.proxy.logs.events import Action
from cellgate.router.unit_state import Desk


async def drain_unit(view: AdminView, request: web.BaseRequest, name: str, *, drained: bool) -> web.Response:
    """Take a unit out of rotation, what runs there finishes; or put it back. Raises NotHereError."""
    desk = view.board.desks.get(name)
    if desk is None:
        raise unknown("unit", name, view.board.desks)
    if _set_drain(view, [desk], drained=drained):
        _note(view, request, drained=drained, unit=name)
    return reply(as_json(unit_view(desk, view.now())))


async def drain_cell(view: AdminView, request: web.BaseRequest, name: str, *, drained: bool) -> web.Response:
    """The same for all units of a cell, at once. Raises NotHereError."""
    desks = [desk for desk in view.board if desk.unit.cell == name]
    if not desks:
        raise unknown("cell", name, {desk.unit.cell: None for desk in view.board})
    # One event, however many units it has.
    if changed := _set_drain(view, desks, drained=drained):
        _note(view, request, drained=drained, cell=name, detail=", ".join(changed))
    now = view.now()
    return reply(as_json({"cell": name, "units": [unit_view(desk, now) for desk in desks]}))


def _set_drain(view: AdminView, desks: Sequence[Desk], *, drained: bool) -> list[str]:
    """Do what the operator wants; the units that it has changed anything for."""
    changed = [desk.unit.name for desk in desks if desk.drained is not drained]
    for desk in desks:
        view.set_drain(desk.unit.name, drained)
    return changed


def _note(view: AdminView, request: web.BaseRequest, *, drained: bool, **about: str) -> None:
    view.events.add(Action("drain" if drained else "undrain", request.remote or "?", **about))
