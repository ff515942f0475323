"""What is told of a load, its charts, its part of Locust's page; a whole sweep in small."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest

from loadtests.drill.answers import End
from loadtests.drill.load import ROOT
from loadtests.drill.records import Record, read
from loadtests.drill.summary import Goal, Summary
from loadtests.kit import processes
from loadtests.kit.gate import GateProcess
from loadtests.load import target
from loadtests.load.__main__ import main
from loadtests.load.chart import line_chart
from loadtests.load.figures import LoadStep, course
from loadtests.load.live import PATH
from loadtests.load.report import charts_over_time, report
from loadtests.load.seen import Seen, watched
from loadtests.simunit.process import SimUnit, sim_units
from loadtests.wire.blocking import fetch

LOCUSTFILE = ROOT / "loadtests" / "locustfile.py"


def record(at_s: float, *, end: End = End.WHOLE, gaps_s: tuple[float, ...] = (0.5, 0.5)) -> Record:
    first_at = 100 + at_s + 0.25
    ended_at = first_at + sum(gaps_s)
    tokens = len(gaps_s) + 1
    return Record("chat", end, "why <it> failed", 100 + at_s, first_at, ended_at, 10, tokens, list(gaps_s))


def step(*records: Record, users: int = 1, failovers: int | None = None) -> LoadStep:
    return LoadStep("chat", users, Summary(records, Goal(2.0, 0.1)), failovers)


def test_a_step_counts_what_failed_and_the_tokens_of_all() -> None:
    both = step(record(0.0), record(1.0, end=End.LOST))
    assert (both.failed, both.why()) == (1, [("lost: why <it> failed", 1)])
    assert both.requests_per_s == pytest.approx(2 / 2.25)
    assert both.tokens_per_s == pytest.approx(6 / 2.25)


def test_a_course_puts_each_token_into_the_second_in_which_it_came() -> None:
    lines = course([record(0.0), record(1.0)]).lines
    assert lines["Output tokens a second"]["tokens"] == [(0, 2), (1, 3), (2, 1)]
    assert lines["TTFT, s"]["median"] == [(0, 0.25), (1, 0.25)]
    assert lines["Between tokens, ms"]["95 %"] == [(0, 500), (1, 500), (2, 500)]
    assert lines["Requests in flight"]["in flight"] == [(0, 1), (1, 1.25), (2, 0.25)]


def test_a_course_tells_failures_and_what_the_gate_saw_on_the_same_axis() -> None:
    seen = Seen([(100.0, 2), (101.0, 1)], [(100.0, 0), (101.0, 3)], {100.5: "a <b> down"})
    found = course([record(0.0), record(0.5, end=End.ERROR_EVENT)], seen)
    assert found.lines["Requests that ended in a second"] == {
        "complete": [(0, 0), (1, 2 - 1)],
        "error event": [(0, 0), (1, 1)],
    }
    assert found.lines["Units in rotation"] == {"units": [(0, 2), (1, 1)]}
    assert found.lines["Streams resumed so far"] == {"streams": [(0, 0), (1, 3)]}
    assert (found.seconds, found.faults) == (2, [(0.5, "a <b> down")])
    one = LoadStep("chat", 1, Summary([record(0.0)], Goal(2.0, 0.1)), 0, seen)
    charts = ElementTree.fromstring(charts_over_time(one)).findall("svg")
    assert len(charts) == 7
    marks = [mark.get("x1") for chart in charts for mark in chart.findall("line[@class='mark']")]
    assert len(marks) == 7
    assert len(set(marks)) == 1


def test_nothing_has_no_course() -> None:
    assert course([]).lines == {}


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(1.0, 3.7), (2.0, 1e6)]])
def test_a_chart_is_drawn_of_anything(points: list[tuple[float, float]]) -> None:
    drawn = ElementTree.fromstring(line_chart("A < B", {"line": points}, "s"))
    for each in drawn.iter():
        for place in ("x", "y", "cx", "cy"):
            assert -1 <= float(each.get(place, 0)) <= 461


def test_a_report_says_first_what_failed_and_escapes_what_others_said() -> None:
    text = report({"asked": "http://<here>"}, [step(record(0.0), record(1.0, end=End.LOST), failovers=3)])
    assert "2 requests, 1 of them failed" in text
    assert "why &lt;it&gt; failed" in text
    assert "http://&lt;here&gt;" in text
    assert "<td>3</td>" in text
    assert "none failed" in report({}, [step(record(0.0), users=1), step(record(0.0), users=2)])


def test_who_cannot_be_asked_is_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{processes.free_port()}"
    assert main(["--host", nobody, "--out", str(tmp_path)]) == 2
    assert "does not answer" in capsys.readouterr().err
    with SimUnit.start("a") as unit:
        wrong = ["--host", unit.url, "--dataset", str(LOCUSTFILE), "--out", str(tmp_path)]
        assert main(wrong) == 2
    assert "and is none of: Mooncake" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "package"), [("loadtests.load", "locust"), ("loadtests.drill", "matplotlib")]
)
def test_a_package_that_is_not_installed_is_one_line(tool: str, package: str) -> None:
    code = (
        "import sys, runpy, importlib.util as u\n"
        f"sys.modules[{package!r}] = None; found = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {package!r} else found(name, *rest)\n"
        f"sys.argv[1:] = []; import loadtests; runpy.run_module({tool!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{package} is not installed")


def test_a_gate_is_watched_and_one_that_is_gone_stops_nothing() -> None:
    with sim_units(["a", "b"]) as units, GateProcess(units) as gate:
        admin = f"http://127.0.0.1:{gate.admin_port}"
        with watched(admin) as seen:
            pass
    seen.look(admin)
    assert [value for _, value in seen.rotation] == [2, 2]
    assert [value for _, value in seen.resumed] == [0, 0]
    assert seen.faults == {}
    with watched("") as none:
        pass
    assert none.rotation == []


def test_the_model_is_asked_of_the_api_with_the_key() -> None:
    with SimUnit.start("a") as unit:
        assert target.first_model(unit.url, "secret") == "sim"
        with pytest.raises(target.TargetError, match="names no model"):
            target.first_model(f"{unit.url}/nowhere", "")
        assert target.failovers("") is None
        assert target.failovers(f"http://127.0.0.1:{processes.free_port()}") is None


def test_a_sweep_runs_from_any_folder_and_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = ROOT / "loadtests" / "tests" / "datasets" / "sharegpt.json"
    with sim_units(["a", "b"], step_ms=2) as units, GateProcess(units) as gate:
        admin = f"http://127.0.0.1:{gate.admin_port}"
        common = ["--host", gate.url, "--admin", admin, "--texts", "known", "--seconds", "2"]
        assert main([*common, "--workloads", "chat", "--users", "2,4", "--out", "swept"]) == 0
        assert main([*common, "--dataset", str(dataset), "--users", "2", "--out", "asked"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^chat +[24] +\d+ +0 ", shown, re.MULTILINE)) == 2
    assert "none failed" in (tmp_path / "swept" / "report.html").read_text()
    asked = read(tmp_path / "asked" / "dataset-2" / "requests.jsonl")
    assert {each.prompt_tokens for each in asked} == {13, 4}


def test_locusts_page_has_whole_requests_alone_and_ours_the_rest(tmp_path: Path) -> None:
    port = processes.free_port()
    with SimUnit.start("a", step_ms=2) as unit:
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", unit.url, "--users", "2"]
        command += ["--autostart", "--web-port", str(port), "--texts", "known", "ChatUser"]
        # From a folder that knows nothing of this project.
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ, stderr=subprocess.PIPE)
        try:
            stats = _until_asked(port)
            page = fetch(f"http://127.0.0.1:{port}/").body.decode()
            tokens = fetch(f"http://127.0.0.1:{port}{PATH}").body.decode()
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert {each["method"] for each in stats if each["name"] != "Aggregated"} == {"whole answer"}
    assert '<iframe src="/tokens"' in page
    assert "TTFT, s" in tokens
    assert "nothing yet" not in tokens


def _until_asked(port: int) -> list[dict[str, object]]:
    give_up_at = time.monotonic() + 60
    while time.monotonic() < give_up_at:
        try:
            found = orjson.loads(fetch(f"http://127.0.0.1:{port}/stats/requests").body)["stats"]
        except OSError:
            found = []
        if any(each["name"] == "chat" and each["num_requests"] > 5 for each in found):
            return list(found)
        time.sleep(0.2)
    raise AssertionError("nobody asked")
