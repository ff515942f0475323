"""`cellgate demo` as a newcomer meets it: a token, a drain by the page's rules, a wedge that is found."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtests.kit import processes
from loadtests.kit.processes import free_port
from tests.wire.process import PATIENCE_S, ROOT, eventually


def ask(url: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer; with a body it is a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@dataclass
class Demo:
    """`cellgate demo` in a folder, once it has said what to type."""

    listen: str
    admin: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def told(self) -> str:
        """All that it has printed."""
        return self.log.read_text()

    def follower(self, unit: str) -> int:
        """The process that it tells to stop."""
        return int(re.findall(rf"kill -STOP (\d+) +# the follower of {unit}", self.told)[0])


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, "-m", "cellgate", "demo", "--listen", listen, "--admin", admin]
    environ = {name: value for name, value in os.environ.items() if name != "CELLGATE_ADMIN_TOKEN"}
    environ |= {"PYTHONPATH": str(ROOT), "CELLGATE_ADMIN": admin}
    with (tmp_path / "told").open("wb") as output:
        run = subprocess.Popen(
            command, cwd=tmp_path, stdout=output, stderr=output, env=environ, start_new_session=True
        )
    demo = Demo(listen, admin, run, tmp_path / "told")
    try:
        assert eventually(lambda: "Ctrl-C stops" in demo.told or run.poll() is not None)
        assert run.poll() is None, demo.told
        yield demo
    finally:
        run.kill()
        run.wait()


def test_a_newcomer_gets_a_token_drains_a_unit_sees_a_wedge_and_ends_all_of_it(demo: Demo) -> None:
    assert f"http://{demo.admin}/ " in demo.told
    assert b"<html" in ask(f"http://{demo.admin}/")[1]

    [body] = re.findall(r"-d '(.*)'", demo.told)
    status, streamed = ask(f"http://{demo.listen}/v1/chat/completions", json.loads(body))
    assert (status, streamed.endswith(b"data: [DONE]\n\n")) == (200, True)

    drain, page = f"http://{demo.admin}/units/b1/drain", {"Origin": f"http://{demo.admin}"}
    [token] = re.findall(r"the token: (\w+)", demo.told)
    assert ask(drain, {}, **page)[0] == 401
    assert ask(drain, {}, Authorization=f"Bearer {token}", **page)[0] == 200

    os.kill(demo.follower("a1"), signal.SIGSTOP)
    assert eventually(lambda: unit(demo.admin, "a1")["verdict"] == "down"), demo.told
    assert "agent of node a1-1" in unit(demo.admin, "a1")["why"][0]
    assert "software differs" not in demo.told

    below = processes.children(demo.process.pid)
    before = demo.told
    # As a terminal does it: whoever is in its group is interrupted as well.
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(PATIENCE_S) == 0, demo.told
    # The gate may be in the middle of telling about the unit, or about what its model has without it.
    about_it = ("unit a1", "the capacity of a model has changed")
    told = demo.told.removeprefix(before).splitlines()
    later = [line for line in told if not any(words in line for words in about_it)]
    assert [line for line in later if '"request_id"' not in line] == []
    assert len(below) == 13
    assert [pid for pid in below if processes.is_running(pid)] == []


def test_it_is_a_gate_before_urls_streams_go_on_at_another_unit_and_a_kill_ends_all_of_it(demo: Demo) -> None:
    url = unit(demo.admin, "a1")["url"]
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, "-m", "cellgate", "demo", "--listen", listen, "--admin", admin, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as other:
        assert other.stdout is not None
        told = list(iter(other.stdout.readline, "Ctrl-C stops everything.\n"))
        assert any('"model": "sim"' in line for line in told)
        assert not any("kill -STOP" in line for line in told)
        other.send_signal(signal.SIGTERM)
        assert other.wait(PATIENCE_S) == 0

    chat = {"model": "sim", "max_tokens": 100, "messages": [{"role": "user", "content": "Why?"}]}
    expected = ask(f"http://{demo.listen}/v1/chat/completions", chat)[1]
    text = json.loads(expected)["choices"][0]["message"]["content"]
    place = demo.listen.rpartition(":")
    streams = [http.client.HTTPConnection(place[0], int(place[2]), timeout=PATIENCE_S) for _ in range(3)]
    for stream in streams:
        stream.request("POST", "/v1/chat/completions", json.dumps(chat | {"stream": True}))
    replies = [stream.getresponse() for stream in streams]
    loads = json.loads(ask(f"http://{demo.admin}/units")[1])
    os.kill(demo.follower(max(loads, key=lambda each: each["in_flight"])["name"]), signal.SIGSTOP)
    for stream, reply in zip(streams, replies, strict=True):
        events = [line[6:] for line in reply.read().splitlines() if line.startswith(b"data: {")]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        stream.close()
    assert eventually(lambda: '"continued":1' in demo.told)

    below = processes.children(demo.process.pid)
    demo.process.kill()
    assert eventually(lambda: not any(map(processes.is_running, below)))


def unit(admin: str, name: str) -> dict[str, Any]:
    """What the gate believes of a unit."""
    told: dict[str, Any] = json.loads(ask(f"http://{admin}/units/{name}")[1])
    return told
