"""One client's connection: sends a request and reads the answer to whatever end it comes.

Blocking I/O; under Locust, gevent makes it cooperative. What must stay true: a cut body is told from a whole
one, and nothing that goes wrong is raised.
"""

import time
from urllib.parse import urlsplit

import orjson

from loadtests.drill.answers import Answer
from loadtests.wire.blocking import BlockingConnection
from loadtests.wire.messages import bearer, post
from loadtests.wire.reply import Lines, Reply


class Client:
    """A user of the API, who keeps a connection while that is possible. `hang_s`: for so long a stream may
    bring no byte; an answer in one piece may take three times that, since nothing can come before it.
    `api_key` goes with every request.
    """

    def __init__(self, url: str, model: str, hang_s: float, api_key: str = "") -> None:
        self._connection = BlockingConnection(url, hang_s)
        self._host = urlsplit(url).netloc
        self._lines = bearer(api_key)
        self._model = model
        self._hang_s = hang_s

    def ask(self, answer: Answer) -> None:
        """Send the request of `answer` and fill it in. Who is stopped in the middle has waited too long."""
        answer.hung = True
        try:
            self._exchange(answer)
            answer.hung = False
        except TimeoutError:
            pass
        except (OSError, orjson.JSONDecodeError) as error:
            answer.hung = False
            answer.cut = repr(error)[:200]
        finally:
            answer.ended_at = time.time()

    def close(self) -> None:
        """Forget the connection."""
        self._connection.close()

    def _exchange(self, answer: Answer) -> None:
        request = answer.request
        lines = Lines(lambda line: answer.take_line(line, time.time()))
        reply = Reply(lines if request.kind.stream else None)
        self._connection.silence_s = self._hang_s * (1 if request.kind.stream else 3)
        try:
            body, path = request.body(self._model), request.kind.path
            self._connection.exchange(post(body, path=path, host=self._host, lines=self._lines), reply)
        finally:
            answer.status = reply.status
        if not request.kind.stream or reply.status != 200:
            answer.take_whole(reply.body, time.time())
