"""What the gate tells load balancers: is it ready, and is one unit. Pure, the same on both ports."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from cellgate.router.board import Board
from cellgate.router.hold import spoken
from cellgate.router.judge import CANARY_SOURCE, READINESS_SOURCE
from cellgate.router.nouns import Evidence, Sign, Verdict
from cellgate.router.unit_state import UnitState


def readiness(board: Board, stopping: bool, *, full: bool = False) -> tuple[bool, dict[str, Any]]:
    """Whether to send the gate requests (one unit is usable, it is not stopping, nor `full`: out of
    descriptors), and why.
    """
    usable = sum(state.is_usable() for state in board)
    ready = usable > 0 and not stopping and not full
    units = {
        state.unit.name: {
            "usable": state.is_usable(),
            "verdict": state.case.verdict.value,
            "reason": why(state),
        }
        for state in board
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

    200: send it requests; 503: do not; 404: drained, on hold or unknown, which HAProxy
    (`http-check disable-on-404`) reads as: no new requests, but let the running ones end.
    """
    state = board.units.get(name)
    if state is None:
        return HTTPStatus.NOT_FOUND, f"no unit is named {name!r}"
    if state.drained or state.hold is not None:
        return HTTPStatus.NOT_FOUND, why(state)
    return (HTTPStatus.OK if state.is_usable() else HTTPStatus.SERVICE_UNAVAILABLE), why(state)


def why(state: UnitState) -> str:
    """The reason behind what is believed of a unit, in one line."""
    if state.drained:
        return "drained by an operator"
    if state.hold is not None:
        return f"{spoken(state.hold)}; it gets requests when it goes on and shows work"
    if state.is_usable() and state.is_restart_suspected():
        return "it closed a connection unexpectedly and may have restarted; a canary is sent"
    said = present_reason(state)
    if said is None:
        return "no probe has answered yet"
    reason = f"{said.reason} (source {said.source})"
    ready = state.last_evidence.get((None, READINESS_SOURCE))
    if state.case.verdict is Verdict.UP and ready is not None and ready.sign is Sign.BAD:
        reason += f"; but its readiness says: {ready.reason}"
    return reason


def present_reason(state: UnitState) -> Evidence | None:
    """What speaks for the verdict, as it was last said; before the first verdict, what the canary found."""
    because, last = state.case.because, state.last_evidence
    if because is None:
        return last.get((None, CANARY_SOURCE)) or last.get((None, READINESS_SOURCE))
    newest = last.get((because.node, because.source), because)
    return newest if newest.sign is because.sign else because
