"""`make up`: real HAProxy, Redis and Prometheus around a gate, with the very files of deploy/compose."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.real.programs import ROOT, find

PATIENCE_S = 60.0


def get(url: str, body: object = None) -> bytes:
    """The body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        answer: bytes = reply.read()
        return answer


def until(is_so: Callable[[], object], told: Path) -> None:
    """Wait until it is so."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_at, told.read_text()
        time.sleep(0.2)


def test_all_comes_up_an_alert_fires_for_a_wedged_unit_and_nothing_is_left(tmp_path: Path) -> None:
    for name in ("haproxy", "prometheus", "redis-server"):
        find(name)
    told = tmp_path / "told"
    command = [sys.executable, "-m", "loadtests.up", "--seconds", "150"]
    with told.open("wb") as output:
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        up = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environ)
    try:
        until(lambda: "Ctrl-C" in told.read_text() or up.poll() is not None, told)
        text = told.read_text()
        ingress, _, _, prometheus = re.findall(r"http://[\d.:]+", text)[:4]
        ask = {
            "model": "sim",
            "stream": True,
            "max_tokens": 3,
            "messages": [{"role": "user", "content": "hi"}],
        }
        assert get(f"{ingress}/v1/chat/completions", ask).endswith(b"data: [DONE]\n\n")

        def data(path: str) -> Any:
            return json.loads(get(f"{prometheus}/api/v1/{path}"))["data"]

        until(lambda: data("query?query=cellgate_flips_total")["result"], told)
        os.kill(int(re.findall(r"kill -STOP (\d+)", text)[0]), signal.SIGSTOP)
        until(
            lambda: "CellgateWedgeFound" in {a["labels"]["alertname"] for a in data("alerts")["alerts"]}, told
        )
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0, told.read_text()
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGTERM)
            up.wait(30)
    # Each of the processes has a file of the run's folder in its command line, or listens for one that has.
    assert not [cmdline for cmdline in command_lines() if str(tmp_path) in cmdline]
    assert list(tmp_path.iterdir()) == [told]


def command_lines() -> list[str]:
    """Of all processes that there are."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines
