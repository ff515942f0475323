"""Where the engine's tokens go: into an open SSE stream, into one whole body, first through a stop filter.

Streams write to the transport from within the engine's loop: one write a token and no task to wake, which is
what lets one process serve hundreds of them.
"""

import asyncio
from collections.abc import Sequence as Items

from loadtests.simunit.replies import AnyReply
from loadtests.simunit.sequence import FinishReason, Listener
from loadtests.simunit.text import StopScanner


class Whole:
    """Collects the text of an answer not streamed. `done`: the finish reason, None after a failure."""

    def __init__(self) -> None:
        self.done: asyncio.Future[FinishReason | None] = asyncio.get_running_loop().create_future()
        self.text = ""
        self.failure = ""

    def token(self, text: str, finish: FinishReason | None, _: str | None = None) -> None:
        """Keep the text."""
        self.text += text
        if finish:
            _settle(self.done, finish)

    def fail(self, message: str) -> None:
        """Keep the reason."""
        self.failure = message
        _settle(self.done, None)


class Stream:
    """Writes each token as one SSE event in one HTTP chunk. `done` is as in `Whole`."""

    def __init__(self, transport: asyncio.WriteTransport, reply: AnyReply) -> None:
        self.done: asyncio.Future[FinishReason | None] = asyncio.get_running_loop().create_future()
        self._transport = transport
        self._reply = reply

    def token(self, text: str, finish: FinishReason | None, said: str | None = None) -> None:
        """Send the text, the role before the first."""
        if self.done.done():
            return
        for event in self._reply.events(text, finish, text if said is None else said):
            self.send(event)
        if finish:
            _settle(self.done, finish)

    def fail(self, message: str) -> None:
        """Tell the client under the 200 that it already has."""
        self.send(self._reply.failed(message))
        _settle(self.done, None)

    def send(self, event: bytes) -> None:
        """Write one event as one HTTP chunk, unless the client has gone."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))


class StopFilter:
    """Ends the text at a stop string, before another listener sees it."""

    def __init__(self, listener: Listener, stops: Items[str]) -> None:
        self._listener = listener
        self._scanner = StopScanner(stops)
        self._stopped = False
        self._said = ""
        """What was generated and not passed on yet."""

    def token(self, text: str, finish: FinishReason | None, _: str | None = None) -> None:
        """Pass on what can no longer become a stop string."""
        if self._stopped:
            return
        self._said += text
        shown, self._stopped = self._scanner.feed(text)
        if self._stopped:
            self._pass_on(shown, "stop")
        elif finish:
            self._pass_on(shown + self._scanner.flush(), finish)
        elif shown:
            self._pass_on(shown, None)

    def _pass_on(self, shown: str, finish: FinishReason | None) -> None:
        said, self._said = self._said, ""
        self._listener.token(shown, finish, said)

    def fail(self, message: str) -> None:
        """Pass on; what was held back is lost, as it is with a real engine."""
        self._listener.fail(message)


def _settle(done: "asyncio.Future[FinishReason | None]", finish: FinishReason | None) -> None:
    if not done.done():
        done.set_result(finish)
