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


def begin_reading(gate: Services, request: Request, route: Route, tell: OnRead) -> Stop | None:
    """Call `tell` with the ask or a failure: at once, or later. The returned function stops that."""
    if route.kind is STICKY:
        tell(stored_ask(request.path))
    elif not route.json:
        tell(plain_ask(request.target, request.body))
    elif is_large(request.body):
        return gate.read_large(request, tell)
    else:
        tell(read_ask(request.body))
    return None
