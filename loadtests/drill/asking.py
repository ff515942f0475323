"""One client's connection: sends a request and reads the answer to whatever end it comes.

Blocking I/O; under Locust, gevent makes it cooperative. What must stay true: a cut body is told from a whole
one, and nothing that goes wrong is raised.
"""

import http.client
import select
import time
from contextlib import suppress
from urllib.parse import urlsplit

import orjson

from loadtests.drill.answers import Answer
from loadtests.drill.mixes import Request

_READ_BYTES = 65536


class Client:
    """A user of the API, who keeps a connection while that is possible. `hang_s`: for so long a stream may
    bring no byte; an answer in one piece may take three times that, since nothing can come before it.
    """

    def __init__(self, url: str, model: str, hang_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._hang_s = hang_s
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, answer: Answer) -> None:
        """Send the request of `answer` and fill it in. Who is stopped in the middle has waited too long."""
        answer.hung = True
        try:
            self._exchange(answer.request, answer)
            answer.hung = False
        except TimeoutError:
            self.close()
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
            answer.hung = False
            answer.cut = repr(error)[:200]
            self.close()
        finally:
            answer.ended_at = time.time()

    def close(self) -> None:
        """Forget the connection."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
            self._connection = None

    def _exchange(self, request: Request, answer: Answer) -> None:
        connection = self._connected(self._hang_s * (1 if request.kind.stream else 3))
        head = {"Content-Type": "application/json"}
        connection.request("POST", request.kind.path, request.body(self._model), head)
        response = connection.getresponse()
        answer.status = response.status
        if request.kind.stream and response.status == 200:
            _read_stream(response, answer)
        else:
            answer.take_whole(response.read(), time.time())

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that the other side has not closed meanwhile."""
        if self._connection is not None and self._connection.sock is not None:
            sock = self._connection.sock
            if not select.select([sock], [], [], 0)[0]:
                sock.settimeout(timeout_s)
                return self._connection
        self.close()
        self._connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return self._connection


def _read_stream(response: http.client.HTTPResponse, answer: Answer) -> None:
    rest = b""
    # read1 raises when a chunked body is cut; readline would take that for its end.
    while data := response.read1(_READ_BYTES):
        now = time.time()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            answer.take_line(line, now)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
