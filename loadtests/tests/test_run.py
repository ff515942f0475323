"""`make run` as a newcomer meets it: a streamed token, a drain by the page's rules, a wedge that is found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from loadtests.kit.processes import free_port
from tests.wire.process import ROOT, eventually


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


def test_a_newcomer_gets_a_token_drains_a_unit_and_sees_a_wedge(tmp_path: Path) -> None:
    told = tmp_path / "told"
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, "-m", "loadtests.run", "--listen", listen, "--admin", admin]
    environ = {name: value for name, value in os.environ.items() if name != "CELLGATE_ADMIN_TOKEN"}
    with told.open("wb") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=environ, start_new_session=True
        )
    try:
        assert eventually(lambda: "Ctrl-C stops" in told.read_text()), told.read_text()
        text = told.read_text()
        assert f"http://{admin}/ " in text
        assert b"<html" in ask(f"http://{admin}/")[1]

        [body] = re.findall(r"-d '(.*)'", text)
        status, streamed = ask(f"http://{listen}/v1/chat/completions", json.loads(body))
        assert (status, streamed.endswith(b"data: [DONE]\n\n")) == (200, True)

        drain, page = f"http://{admin}/units/b1/drain", {"Origin": f"http://{admin}"}
        [token] = re.findall(r"the token: (\w+)", text)
        assert ask(drain, {}, **page)[0] == 401
        assert ask(drain, {}, Authorization=f"Bearer {token}", **page)[0] == 200

        os.kill(int(re.findall(r"kill -STOP (\d+) +# the follower of a1", text)[0]), signal.SIGSTOP)
        assert eventually(lambda: unit(admin, "a1")["verdict"] == "down"), told.read_text()
        assert "agent of node a1-1" in unit(admin, "a1")["why"][1]
        before = told.read_text()
        # As a terminal does it: whoever is in its group is interrupted as well.
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(30) == 0, told.read_text()
        after = told.read_text().removeprefix(before).splitlines()
        # The access log may be a moment late.
        assert [line for line in after if '"request_id"' not in line] == []
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(30)


def unit(admin: str, name: str) -> dict[str, Any]:
    """What the gate believes of a unit."""
    told: dict[str, Any] = json.loads(ask(f"http://{admin}/units/{name}")[1])
    return told
