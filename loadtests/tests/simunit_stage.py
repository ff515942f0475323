"""A simulated unit as real processes, and a client that reads its answers as raw bytes."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit

MESSAGES = [{"role": "user", "content": "Tell me a long story about a gate."}]
STEP_MS = 4
SILENCE_S = 0.25
"""Long against a step: a stream that brings nothing for so long is taken to hang."""


@pytest.fixture(scope="module")
def long_lived() -> Iterator[SimUnit]:
    with SimUnit.start("t1", step_ms=STEP_MS) as started:
        yield started


@pytest.fixture
def unit(long_lived: SimUnit) -> Iterator[SimUnit]:
    """A unit that outlives each fault: healed after the test, which must not kill any of its processes."""
    yield long_lived
    long_lived.signal_follower(signal.SIGCONT)
    long_lived.fault("heal")
    assert eventually(lambda: long_lived.state()["running"] == 0)


@pytest.fixture
def doomed() -> Iterator[SimUnit]:
    """A unit to be killed."""
    with SimUnit.start("t2", step_ms=STEP_MS) as started:
        yield started


class OpenStream:
    """A streamed chat, read as raw bytes so that nothing of how it is framed is hidden."""

    def __init__(self, unit: SimUnit, **fields: object) -> None:
        body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 64, **fields})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: unit\r\nContent-Length: {len(body)}\r\n\r\n"
        self.received = b""
        self._socket = socket.create_connection(("127.0.0.1", unit.port), timeout=5)
        self._socket.sendall((head + body).encode())

    def read_until(self, end: bytes) -> "OpenStream":
        """Read until `end` has been seen. Raises TimeoutError if it does not come."""
        while end not in self.received:
            self.received += self._socket.recv(65536)
        return self

    def is_silent(self) -> bool:
        """Whether the unfinished stream falls silent for SILENCE_S after what was already under way."""
        self._socket.settimeout(SILENCE_S)
        try:
            for _ in range(20):
                self.received += self._socket.recv(65536)
        except TimeoutError:
            return b"[DONE]" not in self.received
        finally:
            self._socket.settimeout(5)
        return False

    @property
    def events(self) -> list[str]:
        lines = self.received.decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def text(self) -> str:
        choices = [json.loads(event).get("choices") for event in self.events if event != "[DONE]"]
        return "".join(choice[0]["delta"]["content"] for choice in choices if choice)

    def close(self) -> None:
        self._socket.close()


def call(
    unit: SimUnit, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """One request on a connection of its own: status, and the body as JSON or text."""
    connection = http.client.HTTPConnection("127.0.0.1", unit.port, timeout=5)
    try:
        connection.request(
            "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers or {}
        )
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(raw) if is_json else raw.decode()


def chat(unit: SimUnit, **fields: object) -> tuple[int, Any]:
    return call(unit, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, **fields})


def post_then_get(unit: SimUnit, path: str, body: bytes, then: str) -> bytes:
    """Two requests sent at once on one connection; everything that is answered."""
    head = f"POST {path} HTTP/1.1\r\nHost: unit\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    after = f"GET {then} HTTP/1.1\r\nHost: unit\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", unit.port), timeout=5) as connection:
        connection.sendall(head + body + after)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def text_of(answer: tuple[int, Any]) -> str:
    assert answer[0] == 200, answer
    text: str = answer[1]["choices"][0]["message"]["content"]
    return text


def eventually(holds: Callable[[], bool], within_s: float = 2.0) -> bool:
    """Poll what another process is about to do."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def metric(unit: SimUnit, name: str) -> float:
    _, page = call(unit, "/metrics")
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))
