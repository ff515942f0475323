"""Takes the key out of the head of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.wire.heads import KEY_FIELDS

if TYPE_CHECKING:
    from cellgate.proxy.wire.request import Request

_SCHEME = b"Bearer "
_SCHEME_BYTES = len(_SCHEME)


def take_credentials(request: Request) -> bytes:
    """The key that the head shows; it is taken out. Empty: none, or several that differ.

    `Authorization: Bearer KEY` (OpenAI), `x-api-key: KEY` (Anthropic) or `api-key: KEY` (Azure).
    """
    routing = request.routing
    if len(routing) == 1:
        name, value = routing[0]
        if name in KEY_FIELDS:
            # As nearly all clients do.
            request.routing = []
            try:
                request.lines.remove(b"%b: %b\r\n" % (name, value))
            except ValueError:
                # It was named in `Connection`, and is not forwarded anyway.
                return b""
            return _key(name, value)
    shown = [field for field in routing if field[0] in KEY_FIELDS]
    dropped = {b"%b: %b\r\n" % field for field in shown}
    request.lines = [line for line in request.lines if line not in dropped]
    request.routing = [field for field in routing if field[0] not in KEY_FIELDS]
    keys = {_key(name, value) for name, value in shown}
    return keys.pop() if len(keys) == 1 else b""


def shown_credentials(request: Request) -> bytes:
    """The same, and the head stays as it is."""
    keys = {_key(name, value) for name, value in request.routing if name in KEY_FIELDS}
    return keys.pop() if len(keys) == 1 else b""


def _key(name: bytes, value: bytes) -> bytes:
    if name != b"authorization":
        return value.strip()
    if value.startswith(_SCHEME):
        return value[_SCHEME_BYTES:].strip()
    # The name of a scheme has no case (RFC 9110, 11.1).
    return value[_SCHEME_BYTES:].strip() if value[:_SCHEME_BYTES].lower() == _SCHEME.lower() else b""
