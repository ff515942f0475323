"""Draining and undraining of units and of whole cells."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from cellgate.proxy.admin.admin_view import AdminView
from cellgate.proxy.admin.error_replies import unknown
from cellgate.proxy.admin.responses import reply
from cellgate.proxy.admin.unit_view import unit_view
from cellgate.proxy.ingress.ready import as_json
from cellgate.proxy.logs.events import Action
from cellgate.router.unit_state import UnitState


async def drain_unit(view: AdminView, request: web.BaseRequest, name: str, *, drained: bool) -> web.Response:
    """Drain a unit (its requests in flight finish), or undrain it. Raises NotHereError."""
    state = view.board.units.get(name)
    if state is None:
        raise unknown("unit", name, view.board.units)
    if _set_drain(view, [state], drained=drained):
        _note(view, request, drained=drained, unit=name)
    return reply(as_json(unit_view(state, view.now())))


async def drain_cell(view: AdminView, request: web.BaseRequest, name: str, *, drained: bool) -> web.Response:
    """The same for all units of a cell, at once. Raises NotHereError."""
    states = [state for state in view.board if state.unit.cell == name]
    if not states:
        raise unknown("cell", name, {state.unit.cell: None for state in view.board})
    # One event, however many units it has.
    if changed := _set_drain(view, states, drained=drained):
        _note(view, request, drained=drained, cell=name, detail=", ".join(changed))
    now = view.now()
    return reply(as_json({"cell": name, "units": [unit_view(state, now) for state in states]}))


def _set_drain(view: AdminView, states: Sequence[UnitState], *, drained: bool) -> list[str]:
    """Drain or undrain; returns the units that changed."""
    changed = [state.unit.name for state in states if state.drained is not drained]
    for state in states:
        view.set_drain(state.unit.name, drained)
    return changed


def _note(view: AdminView, request: web.BaseRequest, *, drained: bool, **about: str) -> None:
    view.events.add(Action("drain" if drained else "undrain", request.remote or "?", **about))
