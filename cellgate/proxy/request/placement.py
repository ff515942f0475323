"""Placement: how a request names its unit, and what a gate answers that cannot use that unit. Pure.

`x-cellgate-unit: NAME` is sent by a gate to another gate, for one of its units. The other fields are those
of the Gateway API Inference Extension, whose endpoint pickers know units by ADDRESS:PORT. An address proves
nothing here: what comes from an ingress may have been written by its clients. So a token is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from cellgate.proxy.config.settings import gates_token, is_token
from cellgate.proxy.http.errors import Failure, FailureKind, Fault
from cellgate.proxy.http.heads import TOKEN_FIELD, UNIT_FIELD, Fields
from cellgate.router.board import Board

ENDPOINT_FIELD = b"x-gateway-destination-endpoint"
"""ADDRESS:PORT of units, the best first; the others are used when it fails."""
SUBSET_FIELD = b"x-gateway-destination-endpoint-subset"
"""ADDRESS:PORT of the units among which the gate may choose."""
REASON_FIELD = b"x-cellgate-reason"
"""In a 503 of a gate: why the unit is not available there, in one word."""
_FOR_ANOTHER_UNIT = frozenset({FailureKind.NO_UNIT, FailureKind.FULL, FailureKind.LATE, FailureKind.EVICTED})
_FINAL_KIND = FailureKind.POISON_SUSPECTED
_PLACEMENT_BUSY = frozenset(
    kind.value.encode() for kind in (FailureKind.BUSY, FailureKind.FULL, FailureKind.LATE)
)


class Placement(NamedTuple):
    """The units a request may go to; `ordered`: they are to be tried in this order."""

    units: tuple[str, ...]
    ordered: bool


def may_place(fields: Fields, token: str | None, secret: bytes, url: str) -> bool:
    """Whether a request may choose its unit, or ask for an explanation: it has the admin token, or that which
    a router with the secret of the fleet makes for this gate, at its `url`.
    """
    given = next((value for name, value in fields if name == TOKEN_FIELD), None)
    if given is None:
        return False
    if token is not None and is_token(given, token):
        return True
    return secret != b"" and url != "" and is_token(given, gates_token(secret, url))


def read_placement(fields: Fields, board: Board) -> Placement:
    """The units that the fields of a request name, as far as they exist."""
    given = dict(fields)
    if (name := given.get(UNIT_FIELD)) is not None:
        unit = name.decode("utf-8", "replace")
        return Placement((unit,) if unit in board.units else (), ordered=True)
    at = {_authority(state.unit.url): state.unit.name for state in board}
    inside, wanted = (_named(given.get(field), at) for field in (SUBSET_FIELD, ENDPOINT_FIELD))
    if wanted is None:
        return Placement(inside or (), ordered=False)
    return Placement(tuple(unit for unit in wanted if inside is None or unit in inside), ordered=True)


def not_trusted(*, is_placed: bool) -> Failure:
    """The failure for a request without the token that chooses a unit or asks for an explanation."""
    what = "chooses its unit" if is_placed else "asks why its unit was chosen"
    return Failure(
        FailureKind.NOT_TRUSTED, f"a request that {what} needs the admin token in x-cellgate-token"
    )


def not_here(failure: Failure, board: Board, unit: str | None) -> tuple[Failure, str]:
    """A refusal for a client that has chosen the unit and may choose another; and its reason in one word."""
    kind = failure.kind
    if kind not in _FOR_ANOTHER_UNIT and kind.row.fault is not Fault.UNIT:
        return failure, ""
    reason = why_not(board, unit) if kind is FailureKind.NO_UNIT else kind.value
    return Failure(FailureKind.NOT_HERE, f"{reason}: {failure.message}"), reason


def why_not(board: Board, unit: str | None) -> str:
    """Why a unit cannot take a request, in one word; `unit` None: no particular one."""
    if unit is None:
        return FailureKind.NO_UNIT.value
    if (state := board.units.get(unit)) is None:
        return "unknown"
    if state.drained:
        return "drained"
    return state.case.verdict.value if state.hold is None else "on_hold"


def is_final(status: int, fields: Fields) -> bool:
    """Whether a refusal of a unit's own gate must reach the client: no other unit may get the request."""
    return status == _FINAL_KIND.row.status and (REASON_FIELD, _FINAL_KIND.value.encode()) in fields


def gate_refusal(status: int, fields: Fields) -> FailureKind | None:
    """The kind of a refusal by the gate in front of a unit; None when the answer is the unit's own."""
    reason = next((value for name, value in fields if name == REASON_FIELD), None) if status == 503 else None
    if reason is None:
        return None
    # A full unit is healthy: this is no evidence, and asking the next unit draws on the retry budget.
    return FailureKind.BUSY if reason in _PLACEMENT_BUSY else FailureKind.NOT_HERE


def _named(value: bytes | None, at: Mapping[str, str]) -> tuple[str, ...] | None:
    """The units at a list of addresses; None when there is no list."""
    if value is None:
        return None
    parts = (part.strip() for part in value.decode("latin-1").split(","))
    return tuple(at[part] for part in parts if part in at)


@lru_cache(4096)
def _authority(url: str) -> str:
    """ADDRESS:PORT of a unit's URL."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"
