"""What the gate answers itself on the data port: models, and health."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import orjson

from cellgate.proxy.ingress.envoy_health import lines, readyz_headers, unit_headers
from cellgate.proxy.ingress.ready import readiness, unit_health
from cellgate.proxy.request.model_choice import ModelChoice
from cellgate.proxy.request.model_names import ModelNames
from cellgate.router.board import Board

_MODEL = b"/v1/models/"
_UNIT_HEALTH = b"/healthz/unit/"


def unit_asked_about(path: bytes) -> str:
    """The unit whose health this path reports; empty for other paths."""
    if not path.startswith(_UNIT_HEALTH):
        return ""
    return unquote_to_bytes(path[len(_UNIT_HEALTH) :]).decode("utf-8", "replace")


def card(name: str) -> dict[str, object]:
    """A model as `/v1/models` shows it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "cellgate"}


class LocalEndpoints:
    """Answers from memory."""

    def __init__(self, board: Board, choice: ModelChoice | None = None) -> None:
        self._board = board
        self._models = ModelNames(board)
        self._own_names = choice.names if choice is not None else ()
        self._names: list[str] | None = None
        self._listed = b""

    def answer(self, path: bytes, *, stopping: bool) -> tuple[int, bytes, bytes]:
        """Status, JSON body and header lines for an own path."""
        if path == b"/v1/models":
            return 200, self._list(), b""
        if path == b"/livez":
            return 200, b'{"alive":true}', b""
        if name := unit_asked_about(path):
            status, _ = unit_health(self._board, name)
            headers = unit_headers(self._board, name)
            return status, orjson.dumps({"unit": name, "usable": status == 200}), lines(headers)
        ready, detail = readiness(self._board, stopping)
        # The state of each unit is on the admin port only: clients of the API must not learn addresses.
        del detail["units"]
        headers = readyz_headers(self._board, stopping=stopping)
        return (200 if ready else 503), orjson.dumps(detail), lines(headers)

    def model(self, path: bytes) -> bytes | None:
        """What `/v1/models/NAME` shows of a name of the gate's own; None: units know it, or nobody."""
        name = unquote_to_bytes(path.removeprefix(_MODEL)).decode("utf-8", "replace")
        return orjson.dumps(self._card(name)) if name in self._own_names else None

    def _card(self, name: str) -> dict[str, object]:
        """A model, with what units say of it. A name of the gate's own is made by the gate."""
        return card(name) | self._models.facts(name)

    def known(self, name: str | None) -> str | None:
        """The model that a path names; None if no unit is known for it: any of them says so itself."""
        return name if name in self._own_names or name in self._models.names() else None

    def _list(self) -> bytes:
        names = self._models.names()
        if names is not self._names:
            cards = [self._card(name) for name in dict.fromkeys((*names, *self._own_names))]
            self._names, self._listed = names, orjson.dumps({"object": "list", "data": cards})
        return self._listed
