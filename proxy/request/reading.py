"""Reads the ask of a request from its path or its body. Large bodies are parsed off the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cellgate.proxy.request.ask import is_large, plain_ask, read_ask, stored_ask
from cellgate.proxy.request.routes import STICKY, Route
from cellgate.proxy.wire.failure import Failure

if TYPE_CHECKING:
    from cellgate.proxy.request.services import Services
    from cellgate.proxy.wire.request import Request
    from cellgate.router.nouns import Ask

OnRead = Callable[["Ask | Failure"], None]
Stop = Callable[[], None]
"""Stops the parsing of a body; its memory is then released."""


def begin_reading(gate: Services, request: Request, route: Route, tell: OnRead) -> Ask | Failure | Stop:
    """The ask or a failure; of a large body a function that stops the parsing, and `tell` is called later."""
    if route.json:
        return (
            gate.read_large(request, tell) if is_large(request.body) else read_ask(request.body, route.name)
        )
    if route.kind is STICKY:
        return stored_ask(request.path)
    return plain_ask(request.target, request.body)
