"""Compressed bodies of requests, decoded before they are read: units get them plain (RFC 9110, 8.4).

A part of it is decoded in each turn of the loop. It draws on the memory for bodies while it grows, and is
refused once it is larger than a body may be, or than so many times what has come.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.defects import guarded

if TYPE_CHECKING:
    from cellgate.proxy.http.body_memory import BodyMemory
    from cellgate.proxy.request.exchange import Exchange

zstd: Any = None
with suppress(ImportError):
    zstd = import_module("backports.zstd")

_INPUT_BYTES = 16384
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_WINDOW_LOG = 23
"""A decoder of zstd needs no more than 8 MiB (RFC 8878, 3.1.1.1.2)."""
_MADE_OF = {b"gzip": "gzip", b"x-gzip": "gzip", b"deflate": "deflate"} | ({b"zstd": "zstd"} if zstd else {})
_DECODE_ERRORS = (zlib.error, zstd.ZstdError) if zstd else (zlib.error,)
ACCEPTED = ", ".join(dict.fromkeys(_MADE_OF.values()))


class Decoding:
    """Decodes the body of one request, then calls `then` with what is wrong with it, or None."""

    def __init__(
        self, exchange: Exchange, memory: BodyMemory, body_bytes: int, then: Callable[[Failure | None], None]
    ) -> None:
        request = exchange.request
        self._exchange, self._memory, self._then = exchange, memory, then
        self._most = min(body_bytes, max(LIMITS.decoded_bytes, LIMITS.decoded_times * len(request.body)))
        self._pieces = pieces(_MADE_OF[request.coding], request.body)
        self._parts: list[bytes] = []
        self._size = 0
        self._is_over = False

    def stop(self) -> None:
        """Its client has left."""
        self._is_over = True

    def resume_parsing(self) -> None:
        """Decode for one turn."""
        if self._is_over:
            return
        done, coding = 0, self._exchange.request.coding.decode("latin-1")
        try:
            for piece in self._pieces:
                done += len(piece) + _INPUT_BYTES
                if (failure := self._add(piece)) is not None:
                    self._end(failure)
                    return
                if done >= LIMITS.decoded_bytes_per_turn:
                    asyncio.get_running_loop().call_soon(guarded, self._exchange, self.resume_parsing)
                    return
        except DamagedError as error:
            self._end(
                Failure(FailureKind.BAD_REQUEST, f"the body is not {coding}, or not all of it: {error}")
            )
            return
        self._finish()

    def _add(self, piece: bytes) -> Failure | None:
        """Keep a piece; or why that must not be."""
        request = self._exchange.request
        self._size += len(piece)
        if self._size > self._most:
            reached("decoded_times")
            reason = f"the body is larger than {self._most} bytes when it is decoded"
            return Failure(FailureKind.BODY_TOO_LARGE, reason)
        if not self._memory.take(len(piece), request.reserved):
            return Failure(
                FailureKind.NO_MEMORY, "the gate has no memory left for request bodies; retry later"
            )
        request.reserved += len(piece)
        self._parts.append(piece)
        return None

    def _finish(self) -> None:
        request = self._exchange.request
        coded, request.body, request.coding = len(request.body), b"".join(self._parts), b""
        request.body_size = len(request.body)
        request.reserved -= coded
        self._memory.give(coded)
        self._end(None)

    def _end(self, failure: Failure | None) -> None:
        self._is_over = True
        self._parts.clear()
        self._then(failure)


class DamagedError(Exception):
    """The bytes are not of this coding."""


def unsupported(coding: bytes) -> Failure | None:
    """Why a body of this coding is refused; None: it can be decoded."""
    if coding in _MADE_OF:
        return None
    named = coding.decode("latin-1")[:64]
    return Failure(
        FailureKind.UNSUPPORTED_ENCODING,
        f"the body's Content-Encoding {named!r} is not supported; use one of {ACCEPTED}, or none",
        lines=f"accept-encoding: {ACCEPTED}\r\n".encode(),
    )


def pieces(coding: str, body: bytes) -> Iterator[bytes]:
    """A body decoded, in pieces of bounded size; some may be empty. Raises DamagedError."""
    decoder, at = _decoder(coding, body), 0
    while True:
        data = body[at : at + _INPUT_BYTES]
        at += len(data)
        while True:
            try:
                yield decoder.decompress(data, LIMITS.decoded_piece_bytes)
            except _DECODE_ERRORS as error:
                raise DamagedError(str(error)) from None
            if decoder.eof:
                data = decoder.unused_data
                break
            data = getattr(decoder, "unconsumed_tail", b"")
            if not data and getattr(decoder, "needs_input", True):
                break
        if decoder.eof:
            at -= len(data)
            if at >= len(body):
                return
            # Another member follows (RFC 1952, 2.2; RFC 8878, 3.1).
            if coding == "deflate":
                raise DamagedError("something follows its end")
            decoder = _decoder(coding, body)
        elif at >= len(body):
            raise DamagedError("it is cut off")


def _decoder(coding: str, body: bytes) -> zlib._Decompress:
    """That of the coding: all have the same methods."""
    match coding:
        case "gzip":
            return zlib.decompressobj(_GZIP)
        case "deflate":
            # Some send it without the frame of zlib (RFC 9110, 8.4.1.2).
            is_framed = body[:1] and body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0
            return zlib.decompressobj(_ZLIB if is_framed else _RAW)
        case _:
            options = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}
            decoder: zlib._Decompress = zstd.ZstdDecompressor(options=options)
            return decoder
