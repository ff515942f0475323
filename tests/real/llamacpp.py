"""Real llama.cpp servers with a tiny model, and streams of tokens read from them or through a gate."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loadtests.kit.processes import start, stop, tail
from loadtests.wire import messages
from loadtests.wire.client import Connection
from loadtests.wire.reply import Reply
from tests.real.programs import python_of
from tests.wire.process import eventually

MODEL = "tiny"
SLOTS = 4
"""So many requests a server answers at once; others wait in it."""
_SCRIPT = Path(__file__).with_name("llamacpp_server.py")
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)\n")


class LlamaServer:
    """One server, in a process of its own. Inside its context it listens; `port` stays the same."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        self._python = python_of("llamacpp")
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.signal(signal.SIGCONT)
        stop(self._process)

    @property
    def url(self) -> str:
        """Where its API is."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, at the port that it had before."""
        command = [self._python, str(_SCRIPT), str(self._model), str(self.port), str(SLOTS)]
        self._process = start(command, self._log)
        try:
            assert eventually(self._is_settled)
            found = _LISTENING.search(self._log.read_text())
            assert found is not None, tail(self._log)
        except BaseException:
            self.kill()
            raise
        self.port = int(found[1])

    def _is_settled(self) -> bool:
        """Whether it listens, or has ended."""
        return bool(_LISTENING.search(self._log.read_text())) or self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End its process at once."""
        self._process.kill()
        self._process.wait()


class Stream:
    """One streamed answer of chat or completions, as far as it has come."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self._port = port
        self._body = body | {"stream": True}
        self._tail = b""
        self.text = self.finish = ""
        self.roles = 0
        self.ids: set[str] = set()
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False

    async def read(self) -> Self:
        """Read it to its end. Raises ConnectionError when that does not come."""
        path = "/v1/chat/completions" if "messages" in self._body else "/v1/completions"
        connection, reply = await Connection.open(self._port), Reply(self._take)
        try:
            await connection.exchange(messages.post(json.dumps(self._body).encode(), path=path), reply)
        finally:
            connection.close()
        assert reply.status == 200, reply.body
        return self

    def _take(self, data: bytes) -> None:
        *events, self._tail = (self._tail + data).split(b"\n\n")
        for event in events:
            if event.startswith(b":"):
                # A comment: the next unit computes the answer again.
                continue
            assert event.startswith(b"data: "), event
            if event == b"data: [DONE]":
                self.is_done = True
            else:
                self._take_document(json.loads(event[6:]))

    def _take_document(self, document: dict[str, Any]) -> None:
        self.error = document.get("error", self.error)
        self.usage = document.get("usage", self.usage)
        self.ids.add(document.get("id", ""))
        for choice in document.get("choices", []):
            delta = choice.get("delta", {})
            self.text += delta.get("content") or choice.get("text") or ""
            self.roles += "role" in delta
            self.finish = choice["finish_reason"] or self.finish


async def read_all(streams: list[Stream]) -> None:
    """Read them side by side, each to its end."""
    await asyncio.gather(*(stream.read() for stream in streams))


def chat(number: int, **fields: Any) -> dict[str, Any]:
    """A greedy request for chat, another one for each number."""
    asked = [{"role": "user", "content": f"Tell me about gate {number}."}]
    return {"model": MODEL, "messages": asked, "temperature": 0, **fields}


def completion(number: int, **fields: Any) -> dict[str, Any]:
    """A greedy request for a completion, another one for each number."""
    return {"model": MODEL, "prompt": f"Gate {number} is", "temperature": 0, **fields}
