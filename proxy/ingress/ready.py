"""What the gate tells load balancers: is it ready, and is one unit. Pure, the same on both ports."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from cellgate.router.board import Board
from cellgate.router.unit_state import Desk


def readiness(board: Board, stopping: bool, *, full: bool = False) -> tuple[bool, dict[str, Any]]:
    """Whether to send the gate requests (one unit is usable, it is not stopping, nor `full`: out of
    descriptors), and why.
    """
    usable = sum(desk.is_usable() for desk in board)
    ready = usable > 0 and not stopping and not full
    units = {
        desk.unit.name: {"usable": desk.is_usable(), "verdict": desk.case.verdict.value, "reason": why(desk)}
        for desk in board
    }
    return ready, {
        "ready": ready,
        "stopping": stopping,
        "full": full,
        "panic": board.panic_at is not None,
        "usable_units": usable,
        "units": units,
    }


def as_json(value: Any) -> bytes:
    """A page of JSON. Indented: who reads this at night has curl and nothing else."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def unit_health(board: Board, name: str) -> tuple[HTTPStatus, str]:
    """The status a load balancer that addresses single units gets, and why.

    200: send it requests; 503: do not; 404: drained or unknown, which HAProxy (`http-check disable-on-404`)
    reads as: no new requests, but let the running ones end.
    """
    desk = board.desks.get(name)
    if desk is None:
        return HTTPStatus.NOT_FOUND, f"no unit is named {name!r}"
    if desk.drained:
        return HTTPStatus.NOT_FOUND, why(desk)
    return (HTTPStatus.OK if desk.is_usable() else HTTPStatus.SERVICE_UNAVAILABLE), why(desk)


def why(desk: Desk) -> str:
    """The reason behind what is believed of a unit, in one line."""
    if desk.drained:
        return "drained by an operator"
    if desk.is_usable() and desk.is_doubted():
        return "it ended a connection out of turn and may have started anew; a canary asks"
    because = desk.case.because
    return (
        f"{because.reason} (source {because.source})" if because is not None else "no probe has answered yet"
    )
