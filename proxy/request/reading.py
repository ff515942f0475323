"""What a request asks for, read from its path or its body. Large bodies are read off the loop."""

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
"""What ends the reading of a body; its memory is then given back."""


def begin_reading(gate: Services, request: Request, route: Route, tell: OnRead) -> Stop | None:
    """Have `tell` told what is asked for: at once, or later, which what is returned stops."""
    if route.kind is STICKY:
        tell(stored_ask(request.path))
    elif not route.json:
        tell(plain_ask(request.target, request.body))
    elif is_large(request.body):
        return gate.read_large(request, tell)
    else:
        tell(read_ask(request.body))
    return None
