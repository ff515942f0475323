"""Takes the key out of the head of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cellgate.proxy.wire.request import Request

KEY_FIELDS = frozenset({b"authorization", b"x-api-key"})
"""The fields that may have a key. The reader puts them among those that route a request."""
_SCHEME = b"Bearer "


def take_credentials(request: Request) -> bytes:
    """The key that the head shows; it is taken out. Empty: none, or several that differ.

    `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic).
    """
    routing = request.routing
    if len(routing) == 1 and routing[0][0] in KEY_FIELDS:
        # As nearly all clients do.
        name, value = routing[0]
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


def _key(name: bytes, value: bytes) -> bytes:
    if name == b"x-api-key":
        return value.strip()
    if value.startswith(_SCHEME):
        return value[len(_SCHEME) :].strip()
    # The name of a scheme has no case (RFC 9110, 11.1).
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME.lower() else b""
