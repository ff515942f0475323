"""What becomes of a request whose unit is out: told when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.request.ports import Left, Observer, Reports
from cellgate.router.nouns import USABLE, Outcome

if TYPE_CHECKING:
    from cellgate.proxy.observe.access_log import Finished
    from cellgate.proxy.request.exchange import Exchange


class Departed(Observer):
    """Of one request, from then on."""

    __slots__ = ("_reports", "unit", "unit_lines")

    def __init__(self, unit: str, reports: Reports) -> None:
        self.unit = unit
        self._reports = reports
        self.unit_lines = b""

    def over(self, record: Finished, _at: float) -> None:
        self._reports.send(Left(self.unit, became(record, self.unit)))


def follow(exchange: Exchange) -> None:
    """Its unit is out, or on hold: if it is out, the request is followed from now on."""
    response, state = exchange.response, exchange.in_flight().lease.unit_state
    unit = state.unit.name
    known = any(isinstance(each, Departed) and each.unit == unit for each in response.observers)
    if not known and state.case.verdict not in USABLE:
        response.observers = (*response.observers, Departed(unit, exchange.gate.reports))


def became(record: Finished, unit: str) -> str:
    """In two words."""
    if record.outcome is Outcome.CLIENT_LEFT:
        return "left early"
    if record.status >= 400:
        return f"answered {record.status}"
    if record.outcome is not Outcome.OK:
        return "cut off"
    if record.resumed:
        return "continued elsewhere"
    return "went on" if record.unit == unit else "answered elsewhere"
