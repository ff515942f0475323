"""Nothing that the gate writes has a key, a prompt or an answer in it: logs, access log, traces, metrics,
pages, usage log, errors, what Redis holds. Everything that writes is on, and requests go right and wrong in
many ways.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from loadtests.kit.collector import collecting
from loadtests.simunit.process import SimUnit
from tests.extras import ONE_OR_TWO_WORKERS, needs
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually
from tests.wire.stage import PROCESSES_S, live_for

KEY, WRONG, UNIT_KEY, ADMIN = "sk-audit-right", "sk-audit-wrong", "audit-unit-key", "audit-admin-token"
PROMPT = "audit-prompt"
SECRETS = KEY, WRONG, UNIT_KEY, ADMIN, PROMPT
PAGES = "/", "/units", "/events", "/metrics", "/readyz", "/explain", "/units/a"


def heads() -> Iterator[dict[str, str]]:
    """Keys that count, and others."""
    yield {"Authorization": f"Bearer {KEY}"}
    yield {"x-api-key": KEY}
    yield {"Authorization": f"Bearer {WRONG}"}
    yield {"Authorization": f"Basic {WRONG}"}
    yield {"x-api-key": f"a.{WRONG}.c"}
    yield {"Authorization": f"Bearer {KEY}", "x-api-key": WRONG}
    yield {"Authorization": f"Bearer {KEY}", "x-priority": "-7"}
    yield {"Authorization": f"Bearer {KEY}", "x-cellgate-unit": "a", "x-cellgate-token": WRONG}


def bodies() -> Iterator[tuple[str, bytes]]:
    """Paths, and what is sent there."""
    asked: dict[str, Any] = {
        "model": "sim",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    for path in ("/v1/chat/completions", "/v1/messages"):
        yield path, json.dumps(asked).encode()
        yield path, json.dumps(asked | {"stream": True}).encode()
        yield path, json.dumps(asked | {"model": "none"}).encode()
    yield "/v1/chat/completions", f'{{"messages": "{PROMPT}'.encode()
    yield "/v1/completions", json.dumps({"model": "sim", "prompt": PROMPT, "max_tokens": -1}).encode()
    yield "/tokenize", json.dumps({"model": "sim", "prompt": PROMPT}).encode()
    yield "/nowhere", PROMPT.encode()


def send(gate: GateProcess) -> str:
    """All of them; the errors that clients got, with their heads."""
    errors = []
    for head in heads():
        for path, body in bodies():
            connection = gate.connect()
            connection.request("POST", path, body, {"Content-Type": "application/json", **head})
            reply = connection.getresponse()
            text = reply.read().decode()
            if reply.status >= 400 and reply.headers.get("x-cellgate-unit") is None:
                errors.append(f"{reply.headers}{text}")
            connection.close()
    return "".join(errors)


def pages(gate: GateProcess) -> str:
    """What the admin port shows."""
    shown = []
    for path in PAGES:
        connection = http.client.HTTPConnection("127.0.0.1", gate.admin_port, timeout=10)
        connection.request("GET", path)
        shown.append(connection.getresponse().read().decode())
        connection.close()
    return "".join(shown)


@needs("otlp")
@needs("redis")
@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
@live_for(PROCESSES_S)
async def test_no_output_has_a_secret(tmp_path: Path, workers: int) -> None:
    keys, log = tmp_path / "keys.jsonl", tmp_path / "usage.jsonl"
    line = {"key": "right", "sha256": sha256(KEY.encode()).hexdigest(), "limits": {"requests_per_minute": 40}}
    keys.write_text(json.dumps(line))
    (unit,) = SimUnit.start_all(["a"])
    try:
        with RedisServer(tmp_path) as redis:
            async with collecting() as collector:
                settings: dict[str, Any] = {
                    "keys": {"file": str(keys)},
                    "redis": redis.url,
                    "timeouts": {"drain_delay_s": 0},
                    "tracing": {"endpoint": collector.endpoint},
                    "usage_log": str(log),
                    "workers": workers,
                }
                environ = {"CELLGATE_UNIT_API_KEY": UNIT_KEY, "CELLGATE_ADMIN_TOKEN": ADMIN}
                flags = ["--access-log", "json"]
                gate = GateProcess(tmp_path, {"a": unit.url}, flags=flags, environ=environ, **settings)
                with gate:
                    await asyncio.to_thread(gate.until_up, "a")
                    errors = await asyncio.to_thread(send, gate)
                    keys.write_text(f"{json.dumps(line)}\n{KEY}\n")
                    assert await asyncio.to_thread(
                        eventually, lambda: "file of keys has a mistake" in gate.log
                    )
                    shown = await asyncio.to_thread(pages, gate)
                    held = [str(redis.do("DUMP", name)) for name in redis.do("KEYS", "*")]
                    gate.signal(signal.SIGTERM)
                    assert await asyncio.to_thread(gate.exit_code) == 0
                spans = "".join(f"{span.name}{span.about}" for span in collector.spans)
        outputs = {
            "errors": errors,
            "pages": shown,
            "logs": gate.log,
            "usage log": log.read_text(),
            "spans": spans,
            "Redis": "".join(held),
        }
        assert "invalid_api_key" in errors
        assert '"right"' in outputs["usage log"]
        assert spans
        for what, text in outputs.items():
            found = [secret for secret in SECRETS if secret in text]
            assert not found, f"{what} has {found}"
    finally:
        unit.stop()
