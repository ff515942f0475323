"""What the gate answers itself on the data port: models, health, and why there is no unit."""

from __future__ import annotations

from math import ceil
from urllib.parse import unquote_to_bytes

import orjson

from cellgate.proxy.ingress.envoy_health import lines, readyz_headers, unit_headers
from cellgate.proxy.ingress.ready import readiness, unit_health
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Refusal

RETRY_MAX_S = 600
NAMES_SHOWN = 20
_UNIT_HEALTH = b"/healthz/unit/"


class OwnAnswers:
    """Answers from memory."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: list[frozenset[str]] = []
        self._names: list[str] = []
        self._listed = b""

    def about(self, path: bytes) -> str:
        """The unit whose health a path is of; empty when it is of none."""
        if not path.startswith(_UNIT_HEALTH):
            return ""
        return unquote_to_bytes(path[len(_UNIT_HEALTH) :]).decode("utf-8", "replace")

    def answer(self, path: bytes, *, stopping: bool) -> tuple[int, bytes, bytes]:
        """Status, JSON body and header lines for an own path."""
        if path == b"/v1/models":
            return 200, self._list(), b""
        if path == b"/livez":
            return 200, b'{"alive":true}', b""
        if name := self.about(path):
            status, _ = unit_health(self._board, name)
            headers = unit_headers(self._board, name)
            return status, orjson.dumps({"unit": name, "usable": status == 200}), lines(headers)
        ready, detail = readiness(self._board, stopping)
        # Which unit is how, and why, is told on the admin port: clients of the API are not to know addresses.
        del detail["units"]
        headers = readyz_headers(self._board, stopping=stopping)
        return (200 if ready else 503), orjson.dumps(detail), lines(headers)

    def explain(self, refusal: Refusal, ask: Ask, drain_s: float) -> Failure:
        """The failure a refusal amounts to, in words. `drain_s`: until all who wait have been served."""
        if refusal is Refusal.UNKNOWN_MODEL:
            known = self._models()
            more = f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
            shown = ", ".join(known[:NAMES_SHOWN]) or "none"
            message = f"the model `{ask.model}` does not exist; the units here serve: {shown}{more}"
            return Failure(Kind.UNKNOWN_MODEL, message, param="model")
        # It never ends while there is no unit.
        after_s = ceil(min(max(drain_s, 1.0), RETRY_MAX_S))
        if refusal is Refusal.FULL:
            reason = "every usable unit is full, and so is the queue; retry after the time given"
            return Failure(Kind.FULL, reason, retry_after_s=after_s)
        if refusal is Refusal.LATE:
            reason = "it could not be answered in the time it may take; retry after the time given"
            return Failure(Kind.LATE, reason, retry_after_s=after_s)
        states = [f"{d.unit.name} is {'drained' if d.drained else d.case.verdict.value}" for d in self._board]
        more = f" and {len(states) - 5} more" if len(states) > 5 else ""
        reason = f"no unit can take this request: {', '.join(states[:5])}{more}; the gate's /units says why"
        return Failure(Kind.NO_UNIT, reason)

    def _models(self) -> list[str]:
        """All models, sorted anew when a unit has told others: a fleet may have thousands."""
        told = [desk.models for desk in self._board]
        if told != self._told:
            self._told, self._names = told, sorted(frozenset[str]().union(*told))
            self._listed = b""
        return self._names

    def _list(self) -> bytes:
        names = self._models()
        if not self._listed:
            cards = [{"id": name, "object": "model", "created": 0, "owned_by": "cellgate"} for name in names]
            self._listed = orjson.dumps({"object": "list", "data": cards})
        return self._listed
