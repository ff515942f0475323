"""Takes the chunks of a stream whose token ids the client has not asked for."""

from __future__ import annotations

from typing import Protocol

ANY_ENDS = (b"\n\n\r\n",)
"""Of the chunks of a stream that are all read, or none."""
_END = len(b"\r\n")


class TokenReceiver(Protocol):
    """The response."""

    def count(self, events: int) -> None: ...
    def pass_on(self, data: bytes, body: bytes) -> None: ...


class TokensWithIds:
    """In the place of the response, which would pass chunks on unchanged."""

    usual_ends = ANY_ENDS

    __slots__ = ("_response",)

    def __init__(self, response: TokenReceiver) -> None:
        self._response = response

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk with the event of a token."""
        self._response.count(1)
        self._response.pass_on(chunk, chunk[chunk.index(b"\n") + 1 : -_END])
