"""Requests out of bytes: parses what a client sends, within limits, and hands on what is whole.

1. A request is handed on when its last byte is there, in order; nothing of one that fails is.
2. After a failure nothing more is read: where the next request would begin can no longer be known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Protocol

import httptools

from proxy.failure import Failure, Kind
from proxy.wire.heads import REQUEST_FIELDS
from proxy.wire.request import Request, check_head

if TYPE_CHECKING:
    from proxy.settings import Limits

_METHOD = re.compile(rb"[A-Za-z]+ ")


class Reading(Protocol):
    """Whom a reader tells what it reads, from within `feed`."""

    def begun(self) -> None:
        """The first byte of a request has come."""

    def head_read(self, request: Request) -> None:
        """A head is complete and in order; its body comes next."""

    def body_read(self, request: Request) -> None:
        """`request.body_size` has grown."""

    def whole(self, request: Request) -> None:
        """A request is complete."""


class RequestReader:
    """Reads the requests of one connection. `fields_read` names the lines of a head that somebody reads.

    `request` is the one being read, `in_head` whether its head is, `failure` what ended the reading.
    """

    __slots__ = (
        "_body",
        "_fields_read",
        "_head_bytes",
        "_is_first",
        "_limits",
        "_now",
        "_parser",
        "_read_bytes",
        "_tell",
        "failure",
        "in_head",
        "request",
    )

    def __init__(
        self,
        tell: Reading,
        limits: Limits,
        now: Callable[[], float],
        fields_read: Container[bytes] = REQUEST_FIELDS,
    ) -> None:
        self._tell = tell
        self._fields_read = fields_read
        self._limits = limits
        self._now = now
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._head_bytes = 0
        self._read_bytes = 0
        self._is_first = True
        self.in_head = False
        self.request: Request | None = None
        self.failure: Failure | None = None

    def feed(self, data: bytes) -> Failure | None:
        """Read on; the failure that ends the reading, if there is one. Not to be called after that."""
        self._read_bytes = len(data)
        self._head_bytes += self._read_bytes
        self._is_first = self.request is None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(Failure(Kind.METHOD_NOT_SUPPORTED, "CONNECT and upgrades are not supported"))
        except httptools.HttpParserCallbackError:
            # A defect of our own, not of the request: it ends the connection, and the loop tells of it.
            raise
        except httptools.HttpParserError as error:
            # Where in a read a later request begins cannot be known, and so not how it begins.
            self._fail(_malformed(error, data if self._is_first else b""))
        else:
            # Trailers and chunk extensions count as well, or they could go on for ever.
            if self.request is not None and self._head_bytes > self._limits.head_bytes:
                self._fail(self._head_too_large())
        return self.failure

    def forget(self) -> Request | None:
        """Give up what was read of a request; it is returned, so that its memory can be given back."""
        request, self.request = self.request, None
        self._body.clear()
        return request

    def close(self) -> None:
        """The connection is gone. The parser holds our methods: unless it is let go of, readers pile up."""
        del self._parser

    # -- the parser's callbacks ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.failure is None:
            self.request = Request(self._now())
            self.in_head = True
            self._tell.begun()

    def on_url(self, url: bytes) -> None:
        if self.request is not None:
            self.request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head these are trailers, which nobody asked for.
        request = self.request
        if request is not None and self.in_head:
            name = name.lower()
            if name in self._fields_read:
                request.fields.append((name, value))
                if name in REQUEST_FIELDS:
                    return
            request.lines.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        request = self.request
        if request is None or self.failure is not None:
            return
        self.in_head = False
        limit = self._limits.head_bytes
        # Behind another request `_head_bytes` begins with the next read only.
        may_be_large = self._head_bytes > limit or self._read_bytes > limit
        if may_be_large and request.head_size() > limit:
            self._fail(self._head_too_large())
            return
        request.method = self._parser.get_method()
        request.keep_alive = self._parser.should_keep_alive()
        failure = check_head(request, self._parser.get_http_version())
        if failure is None and request.length > self._limits.body_bytes:
            failure = self._body_too_large()
        if failure is None:
            self._tell.head_read(request)
        else:
            self._fail(failure)

    def on_body(self, body: bytes) -> None:
        request = self.request
        if request is None or self.failure is not None:
            return
        self._head_bytes = 0
        self._body.append(body)
        request.body_size += len(body)
        if request.body_size > self._limits.body_bytes:
            self._fail(self._body_too_large())
        else:
            self._tell.body_read(request)

    def on_message_complete(self) -> None:
        request = self.request
        if request is None or self.failure is not None:
            return
        self.request = None
        self._is_first = False
        self._head_bytes = 0
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._tell.whole(request)

    # -- failures ------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self.in_head = False

    def _head_too_large(self) -> Failure:
        limit = self._limits.head_bytes
        return Failure(Kind.HEAD_TOO_LARGE, f"the request's head is larger than {limit} bytes")

    def _body_too_large(self) -> Failure:
        limit = self._limits.body_bytes
        return Failure(Kind.BODY_TOO_LARGE, f"the request's body is larger than {limit} bytes")


def _malformed(error: httptools.HttpParserError, data: bytes) -> Failure:
    match error:
        case httptools.HttpParserInvalidMethodError() if _METHOD.match(data):
            return Failure(Kind.METHOD_NOT_SUPPORTED, "the method is not known")
        case httptools.HttpParserInvalidURLError():
            return Failure(Kind.BAD_REQUEST, "the request target is malformed")
        case _:
            return Failure(Kind.BAD_REQUEST, f"malformed request: {error}")
