"""One reply, read as its bytes come: its status, its body, and whether it is whole."""

from collections.abc import Callable

import httptools

_FRAMED_BY = (b"content-length", b"transfer-encoding")


class IncompleteReadError(ConnectionError):
    """The connection ended before the reply did."""


class MalformedError(ConnectionError):
    """What came is no HTTP, or more than was asked for."""


class Reply:
    """A reply to any request but a HEAD; those of 1xx are passed over. `status` is 0 until its head is there,
    `unit` the one that answered behind a gate.

    Each piece of the body of a 200 goes to `take`. Without one, and of any other status, pieces are kept.
    """

    __slots__ = (
        "_is_framed",
        "_parser",
        "_pieces",
        "_take",
        "is_whole",
        "keeps_connection",
        "status",
        "unit",
    )

    def __init__(self, take: Callable[[bytes], object] | None = None) -> None:
        self.status = 0
        self.unit = ""
        self.is_whole = self.keeps_connection = self._is_framed = False
        self._pieces: list[bytes] = []
        self._take = take or self._pieces.append
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    @property
    def body(self) -> bytes:
        """The pieces that were kept."""
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> bool:
        """Read on; whether the reply is whole now. Raises MalformedError."""
        if self._parser is None:
            raise MalformedError(f"more than was asked for: {data[:80]!r}")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise MalformedError(f"not HTTP: {error}") from None
        return self.is_whole

    def feed_end(self) -> None:
        """The connection has ended, as some replies do with it. Raises IncompleteReadError for others."""
        if self.is_whole:
            return
        if not self.status:
            raise IncompleteReadError("closed before the reply")
        if self._is_framed:
            raise IncompleteReadError(f"closed in the middle of the reply, whose status is {self.status}")
        self._end()

    def on_message_begin(self) -> None:
        """Called by the parser, as the methods below."""
        if self.is_whole:
            raise MalformedError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head."""
        name = name.lower()
        if name in _FRAMED_BY:
            self._is_framed = True
        elif name == b"x-cellgate-unit":
            self.unit = value.decode()

    def on_headers_complete(self) -> None:
        """The end of the head."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self.status == 200:
            self._take(data)
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The end of the body."""
        assert self._parser is not None
        if self.status < 200:
            self.status = 0
            return
        self.keeps_connection = self._parser.should_keep_alive()
        self._end()

    def _end(self) -> None:
        self.is_whole = True
        # Parser and reply hold each other: whoever makes many would leave them to the garbage collector.
        self._parser = None


class Lines:
    """Takes the pieces of a body, and hands on each line that is whole, without its end."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
