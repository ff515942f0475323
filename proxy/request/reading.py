"""Reads the ask of a request from its path or its body. Large bodies are parsed off the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cellgate.proxy.request.ask import SPLIT_ROUTES, is_large, plain_ask, read_ask, stored_ask
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
        if not is_large(request.body):
            return read_ask(request.body, route.name)
        splits = route.name in SPLIT_ROUTES
        return gate.read_large(request, lambda ask: tell(_may_split(ask, splits=splits)))
    if route.kind is STICKY:
        return stored_ask(request.path)
    return plain_ask(request.target, request.body)


def _may_split(ask: Ask | Failure, *, splits: bool) -> Ask | Failure:
    """A large ask is read without its route, and can be split nevertheless."""
    return ask if isinstance(ask, Failure) else ask._replace(splits=splits)
