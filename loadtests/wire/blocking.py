"""The same client without an event loop: for threads, for the greenlets of Locust, for a single question."""

import select
import socket
import ssl
from typing import Self
from urllib.parse import urlsplit

from loadtests.wire.messages import get, post
from loadtests.wire.reply import Reply

_READ_BYTES = 1 << 16


class BlockingConnection:
    """A kept connection to one server, made when it is needed. `silence_s`: for so long no byte may come."""

    def __init__(self, url: str, silence_s: float) -> None:
        place = urlsplit(url)
        self._tls = ssl.create_default_context() if place.scheme == "https" else None
        self._place = place.hostname or "127.0.0.1", place.port or (443 if self._tls else 80)
        self.silence_s = silence_s
        self._sock: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exchange(self, request: bytes, reply: Reply) -> None:
        """Send a request, and fill in its reply. Raises ConnectionError when it does not come whole, and
        TimeoutError; after either the connection is closed.
        """
        sock = self._connected()
        try:
            sock.sendall(request)
            while not reply.is_whole:
                if data := sock.recv(_READ_BYTES):
                    reply.feed(data)
                else:
                    reply.feed_end()
        except BaseException:
            self.close()
            raise
        if not reply.keeps_connection:
            self.close()

    def close(self) -> None:
        """Forget the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connected(self) -> socket.socket:
        """A connection that the other side has not closed meanwhile."""
        if self._sock is not None and select.select([self._sock], [], [], 0)[0]:
            self.close()
        if self._sock is None:
            self._sock = socket.create_connection(self._place, self.silence_s)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                self._sock = self._tls.wrap_socket(self._sock, server_hostname=self._place[0])
        self._sock.settimeout(self.silence_s)
        return self._sock


def fetch(url: str, body: bytes | None = None, *, lines: str = "", silence_s: float = 10.0) -> Reply:
    """The whole reply to one request on a connection of its own: a GET, or with a body a POST of JSON.

    `lines`: more header lines, each with its end. Raises OSError as `BlockingConnection.exchange` does.
    """
    place = urlsplit(url)
    path = f"{place.path or '/'}?{place.query}" if place.query else place.path or "/"
    if body is None:
        request = get(path, host=place.netloc, lines=lines)
    else:
        request = post(body, path=path, host=place.netloc, lines=lines)
    reply = Reply()
    with BlockingConnection(url, silence_s) as connection:
        connection.exchange(request, reply)
    return reply


def answers(url: str, body: bytes | None = None, *, silence_s: float) -> bool:
    """Whether the reply is a 200; nobody there is a no."""
    try:
        return fetch(url, body, silence_s=silence_s).status == 200
    except OSError:
        return False
