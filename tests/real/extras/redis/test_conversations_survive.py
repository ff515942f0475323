"""Conversations and background jobs stay whole over two gates and a real Redis that are all replaced once."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_handover import Line
from tests.real.redis_server import RedisServer
from tests.wire.process import eventually

TALKS, JOBS = 40, 20


class _Stores(BaseHTTPRequestHandler):
    """An engine that stores responses: the text of one is all that was said in its conversation."""

    protocol_version = "HTTP/1.1"
    server: _Unit

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        elif self.path.startswith("/v1/responses/"):
            kept = self.server.kept.get(self.path.split("/")[3])
            self._answer(404 if kept is None else 200, kept or {})
        else:
            self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if self.path != "/v1/responses":
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}
            self._answer(200, {"model": "tiny", "choices": [choice | {"text": "hi"}], "usage": usage})
            return
        before, is_job = asked.get("previous_response_id"), asked.get("background", False)
        if before and before not in self.server.kept:
            self._answer(404, {"error": {"message": "no such response"}})
            return
        text = f"{self.server.kept[before]['text']} {asked['input']}" if before else asked["input"]
        said = {"type": "message", "content": [{"type": "output_text", "text": text}]}
        made = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "status": "queued" if is_job else "completed",
            "background": is_job,
            "text": text,
            "output": [] if is_job else [said],
            "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
        }
        self.server.kept[made["id"]] = made
        self._answer(200, made)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Unit(ThreadingHTTPServer):
    """One engine with what it stores."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Stores)
        self.kept: dict[str, dict[str, Any]] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """A gate that was killed has closed its connections."""


@contextmanager
def _units() -> Iterator[dict[str, str]]:
    """Four, by name: their URLs."""
    units = [_Unit() for _ in range(4)]
    for unit in units:
        threading.Thread(target=unit.serve_forever, daemon=True).start()
    try:
        yield {f"u{number}": f"http://127.0.0.1:{unit.server_port}" for number, unit in enumerate(units)}
    finally:
        for unit in units:
            unit.shutdown()
            unit.server_close()


class _Clients:
    """Forty conversations and twenty jobs, each at one of two gates at a time."""

    def __init__(self, gates: list[Line]) -> None:
        self._gates = gates
        self._talks: list[tuple[str, str]] = []
        self._jobs: list[str] = []

    def begin(self) -> None:
        """The first words of each."""
        for number in range(TALKS):
            status, made = self._ask(number, "POST", {"input": f"t{number}"})
            assert status == 200, made
            self._talks.append((made["id"], made["text"]))
        for number in range(JOBS):
            status, made = self._ask(number, "POST", {"input": f"j{number}", "background": True})
            assert status == 200, made
            self._jobs.append(made["id"])

    def go_on(self, word: str, shift: int) -> tuple[int, int]:
        """One more word in each conversation, and a look at each job; how many of both are whole."""
        whole = 0
        for number, (last, text) in enumerate(self._talks):
            asked = {"input": word, "previous_response_id": last}
            status, made = self._ask(number + shift, "POST", asked)
            if status == 200 and made["text"] == f"{text} {word}":
                whole += 1
                self._talks[number] = made["id"], made["text"]
        found = [
            self._ask(number + shift, "GET", None, f"/{job}")[1] for number, job in enumerate(self._jobs)
        ]
        return whole, sum(one.get("id") == job for one, job in zip(found, self._jobs, strict=True))

    def _ask(
        self, number: int, method: str, body: dict[str, Any] | None, of: str = ""
    ) -> tuple[int, dict[str, Any]]:
        connection = self._gates[number % 2].connect()
        try:
            data = None if body is None else json.dumps({"model": "tiny", **body})
            head = {"Content-Type": "application/json", "Authorization": "Bearer sk-a"}
            connection.request(method, f"/v1/responses{of}", data, head)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read() or b"{}")
        finally:
            connection.close()


def _restart(gate: Line, how: signal.Signals, names: dict[str, str]) -> None:
    gate.signal(how)
    gate.exit_code()
    gate.__enter__()
    gate.until_up(*names)


@pytest.mark.nightly
def test_40_conversations_and_20_jobs_stay_whole_while_gates_and_redis_are_replaced(tmp_path: Path) -> None:
    """Each word of a conversation comes by the gate that did not have the one before."""
    keys = tmp_path / "keys.jsonl"
    keys.write_text(json.dumps({"key": "a", "sha256": hashlib.sha256(b"sk-a").hexdigest()}))
    secret = {"CELLGATE_FLEET_SECRET": "a-secret"}
    with ExitStack() as stack:
        urls = stack.enter_context(_units())
        redis = stack.enter_context(RedisServer(tmp_path))
        rules: dict[str, Any] = {
            "redis": redis.url,
            "keys": {"file": str(keys)},
            "timeouts": {"drain_delay_s": 0},
        }
        gates = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            gates.append(stack.enter_context(Line(tmp_path / name, urls, environ=secret, **rules)))
        for gate in gates:
            gate.until_up(*urls)
        clients, whole = _Clients(gates), (TALKS, JOBS)
        clients.begin()
        assert clients.go_on("other", 1) == whole
        gates[0].hand_over()
        assert clients.go_on("handed over", 0) == whole
        # What the successor made, a killed gate's successor finds as well.
        _restart(gates[1], signal.SIGKILL, urls)
        assert clients.go_on("killed", 1) == whole
        redis.kill()
        assert clients.go_on("without Redis", 1) == whole
        redis.start()
        assert eventually(lambda: redis.do("DBSIZE") > TALKS + JOBS)
        assert clients.go_on("empty Redis", 0) == whole
        _restart(gates[1], signal.SIGTERM, urls)
        assert clients.go_on("restarted", 1) == whole
