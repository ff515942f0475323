"""`make up`, with the very files of deploy/compose, and the drills of alerts and upgrades: real HAProxy,
Redis, Prometheus and Alertmanager around gates.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtests import last_release, upgrade
from tests.real.programs import ROOT, find
from tests.wire.process import eventually


def get(url: str, body: object = None) -> bytes:
    """The body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        answer: bytes = reply.read()
        return answer


def until(is_so: Callable[[], object], told: Path) -> None:
    """Wait until it is so."""
    assert eventually(is_so), told.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where all that runs has its files. Nothing may be left of it."""
    for name in ("haproxy", "prometheus", "redis-server"):
        find(name)
    (tmp_path / "of-the-run").mkdir()
    yield tmp_path
    # Each of the processes has a file of the run's folder in its command line, or listens for one that has.
    assert not [cmdline for cmdline in command_lines() if str(tmp_path) in cmdline]
    assert list((tmp_path / "of-the-run").iterdir()) == []


@contextmanager
def up(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`python -m loadtests.up`, and what it prints."""
    told = folder / "told"
    environ = {**os.environ, "TMPDIR": str(folder / "of-the-run")}
    command = [sys.executable, "-m", "loadtests.up", *flags]
    with told.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environ)
    try:
        yield process, told
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def test_all_comes_up_answers_and_leaves_nothing(folder: Path) -> None:
    with up(folder, "--seconds", "150") as (process, told):
        until(lambda: "Ctrl-C" in told.read_text() or process.poll() is not None, told)
        text = told.read_text()
        ingress, _, _, prometheus = re.findall(r"http://[\d.:]+", text)[:4]
        [alerts] = re.findall(rf"{prometheus}/\S*", text)
        assert b"<title>" in get(alerts)
        ask = {
            "model": "sim",
            "stream": True,
            "max_tokens": 3,
            "messages": [{"role": "user", "content": "hi"}],
        }
        assert get(f"{ingress}/v1/chat/completions", ask).endswith(b"data: [DONE]\n\n")
        assert json.loads(get(f"{prometheus}/api/v1/rules"))["data"]["groups"][0]["name"] == "cellgate"
        scraped = f"{prometheus}/api/v1/query?query=cellgate_unit_downs_total"
        until(lambda: json.loads(get(scraped))["data"]["result"], told)
        # Frozen, so that it ends all the same.
        os.kill(int(re.findall(r"kill -STOP (\d+)", text)[0]), signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, told.read_text()


@pytest.mark.nightly
def test_in_the_drill_alerts_fire_for_a_wedged_unit_and_clear_and_the_dashboard_has_data(
    folder: Path,
) -> None:
    with up(folder, "--drill") as (process, told):
        assert process.wait(180) == 0, told.read_text()
    text = told.read_text()
    for alert in ("CellgateUnitDown", "CellgateWedgeFound"):
        assert re.search(rf"{alert} fires after [\d.]+ s[\s\S]*{alert} has cleared after [\d.]+ s", text), (
            text
        )
    asked, lost = map(int, re.findall(r"(\d+) requests meanwhile, (\d+) of them", text)[0])
    assert asked > 20
    assert lost == 0
    assert re.search(r"\d+ expressions of the dashboard: \d+ have data", text)


@pytest.mark.nightly
def test_a_drill_that_is_told_to_end_leaves_nothing(folder: Path) -> None:
    with up(folder, "--drill") as (process, told):
        until(lambda: "is frozen" in told.read_text(), told)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, told.read_text()


@pytest.mark.nightly
def test_every_alert_fires_for_its_fault_alone_and_clears() -> None:
    for program in ("prometheus", "prometheus-alertmanager", "redis-server"):
        find(program)
    command = [sys.executable, "-m", "loadtests.alerts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 problems" in done.stdout


@pytest.mark.nightly
def test_gates_are_rolled_from_the_last_release_and_back_and_no_request_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On one Redis, under load."""
    if not last_release.is_here():
        pytest.skip(f"a shallow clone: {last_release.name()} is not in it; git fetch --unshallow --tags")
    find("haproxy")
    find("redis-server")
    assert upgrade.main(["--between-s", "1"]) == 0, capsys.readouterr().out


def command_lines() -> list[str]:
    """Of all processes that there are."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines
