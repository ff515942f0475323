"""The command line: exit codes, and one line for a person on whatever goes wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cellgate.proxy import serve as entry
from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.commands import main
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.logs.text import duration

UNIT_A1 = {
    "name": "a1",
    "cell": "a",
    "verdict": "up",
    "drained": False,
    "hold": None,
    "restart_suspected": False,
    "degraded": 0.0,
    "odd_answers": False,
    "since_s": 7384.2,
    "reason": "one token",
    "in_flight": 3,
    "max_in_flight": 64,
    "load": {"running": 3, "waiting": 1, "kv_use": 0.1, "age_s": 0.4},
}
UNIT_B1 = {
    **UNIT_A1,
    "name": "b1",
    "cell": "b",
    "verdict": "down",
    "drained": True,
    "since_s": 0.4,
    "reason": "refused\x1b[2J",
    "in_flight": 0,
    "load": None,
}


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CELLGATE_ADMIN_TOKEN", raising=False)


class Gate:
    """What a gate's admin port answers to any call, and the calls it got."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        self.address = ""
        self.calls: list[str] = []


@contextmanager
def gate(status: int, answer: Any) -> Iterator[Gate]:
    """A real admin port on a free one that gives `answer`, as JSON unless it is bytes already."""
    played = Gate(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            played.calls.append(f"{self.command} {self.path} {self.headers.get('Authorization')}")
            self.send_response(played.status)
            self.send_header("Content-Length", str(len(played.body)))
            self.end_headers()
            self.wfile.write(played.body)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        played.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield played
        finally:
            server.shutdown()
            thread.join()


# serve and check


def test_check_shows_the_units_as_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--unit", "http://x:1/", "--unit", "big=https://y", "--listen", "0.0.0.0:80"]) == 0
    head, columns, one, two, *times = capsys.readouterr().out.splitlines()
    assert head == "flags: valid; listens on 0.0.0.0:80, admin on 127.0.0.1:9901, policy prefix_affinity"
    assert columns.split("  ")[0] == "UNIT"
    assert (
        " ".join(one.split()) == "unit-1 default http://x:1 1, cell 1 256 asked of the unit unit-1 (leader)"
    )
    assert two.split()[:3] == ["big", "default", "https://y"]
    assert times[1].startswith("How soon unit-1, big is out of rotation (no nodes have agents; ")


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_wrong_configuration_is_exit_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("polcy: x\ncells: []\n")
    assert main([command, "-c", str(path), "--listen", "here"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [re.split(": expected|: unknown", line)[0] for line in err.splitlines()] == [
        "--listen",
        f"{path}: cells",
        f"{path}: polcy",
    ]


@pytest.mark.parametrize("url", ["redis//h:6379", "redis://me:s3cret@h:6379", "http://h", "redis://h:port"])
def test_check_refuses_what_is_no_url_of_a_redis(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--unit", "http://x:1/", "--redis", url]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("redis: expected a URL such as redis://HOST:PORT/0, ")
    assert len(err.splitlines()) == 1
    assert "s3cret" not in err


def test_serve_hands_over_settings_and_how_to_read_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("policy: p2c\ncells: [{name: a, units: [{name: a1, url: 'http://x'}]}]\n")

    def serve(settings: Settings, reload: Any) -> int:
        assert (settings.policy, settings.access_log) == ("p2c", "off")
        path.write_text("cells: [{name: a, units: [{name: a2, url: 'http://x'}]}]\n")
        again = reload()
        assert [unit.name for unit in again.fleet.units] == ["a2"]
        assert again.access_log == "off"
        path.write_text("")
        with pytest.raises(ConfigError, match="found an empty file"):
            reload()
        return 7

    monkeypatch.setattr(entry, "serve", serve)
    assert main(["serve", "-c", str(path), "--access-log", "off"]) == 7


def test_a_port_in_use_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(settings: Settings, reload: Any) -> int:
        raise OSError(98, "Address already in use", str(settings.listen))

    monkeypatch.setattr(entry, "serve", serve)
    assert main(["serve", "--unit", "http://x"]) == 1
    assert capsys.readouterr().err == "cellgate: cannot listen on 127.0.0.1:8000: Address already in use\n"


# units, drain, undrain


def test_units_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, [UNIT_A1, UNIT_B1]) as played:
        assert main(["units", "--admin", played.address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "UNIT  CELL  VERDICT        FOR    IN FLIGHT  RUNNING/WAITING  REASON",
        "a1    a     up             2h 3m  3 of 64    3/1              one token",
        "b1    b     down, drained  0s     0 of 64    -                refused?[2J",
    ]
    assert played.calls == ["GET /units None"]


def test_units_are_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, [UNIT_A1]) as played:
        assert main(["units", "--json", "--admin", played.address]) == 0
    assert json.loads(capsys.readouterr().out) == [UNIT_A1]


def test_the_table_tells_what_else_keeps_requests_away(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, [{**UNIT_A1, "restart_suspected": True, "degraded": 0.33}]) as played:
        assert main(["units", "--admin", played.address]) == 0
    assert "  up, restart suspected, degraded  2h 3m  " in capsys.readouterr().out


def test_why_prints_the_sentences_of_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, {"name": "a 1", "why": ["a 1 is out.", "Because: \x1b[2J."]}) as played:
        assert main(["why", "a 1", "--admin", played.address]) == 0
    assert capsys.readouterr().out == "a 1 is out.\nBecause: ?[2J.\n"
    assert played.calls == ["GET /units/a%201 None"]


def test_why_of_a_unit_that_is_not_there_passes_on_the_near_miss(capsys: pytest.CaptureFixture[str]) -> None:
    no = "no unit is named 'a2'; did you mean 'a1'?"
    with gate(404, {"error": {"message": no}}) as played:
        assert main(["why", "a2", "--admin", played.address]) == 1
    assert capsys.readouterr().err == f"cellgate: {no}\n"


@pytest.mark.parametrize("answer", [[], {}, {"why": "because"}])
def test_why_of_what_is_no_gate_says_so(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, answer) as played:
        assert main(["why", "a1", "--admin", played.address]) == 1
    assert "is not a gate's admin port" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["drain", "undrain"])
def test_drain_and_undrain_send_the_token(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELLGATE_ADMIN_TOKEN", "s3cret")
    with gate(200, UNIT_A1) as played:
        assert main([command, "a 1/2", "--admin", played.address]) == 0
    assert played.calls == [f"POST /units/a%201%2F2/{command} Bearer s3cret"]


@pytest.mark.parametrize(
    ("command", "says"), [("drain", "drained: no new"), ("undrain", "no longer drained")]
)
def test_a_whole_cell_is_drained_by_its_name(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with gate(200, {"cell": "a/b", "units": [UNIT_A1, UNIT_B1]}) as played:
        assert main([command, "--cell", "a/b", "--admin", played.address]) == 0
    assert played.calls == [f"POST /cells/a%2Fb/{command} None"]
    assert capsys.readouterr().out.startswith(f"cell a/b (a1, b1): {says}")
    with gate(200, []) as played:
        assert main([command, "--cell", "a", "--admin", played.address]) == 1


def test_a_unit_or_a_cell_is_drained_and_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["drain", "a1", "--cell", "a"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


CHOICE = {
    "policy": "prefix_affinity",
    "decision": "waits",
    "reason": "no unit has room",
    "wait_s": 1.5,
    "notes": ["of 99 units\x1b[2J"],
    "units": [
        {
            "unit": "a1",
            "cell": "a",
            "cost": {
                "total_s": 0.75,
                "queue_s": 0.5,
                "prefill_s": 0.1,
                "decode_s": 0.1,
                "beside_s": None,
                "kv_s": 0.0,
                "seat_s": 0.0,
                "evict_s": 0.02,
                "shared_s": -0.02,
                "error_s": 0.02,
                "doubt_s": 0.01,
                "far_s": 0.02,
                "latency_s": 0.0,
            },
            "in_flight": 8,
            "places": 8,
            "has_room": False,
            "why_not": None,
            "guessed": ["step"],
        }
    ],
}


def test_explain_shows_the_outcome_and_each_term(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, CHOICE) as played:
        asked = ["explain", "--model", "m/1", "--prompt-tokens", "10", "--ttft-ms", "500"]
        assert main([*asked, "--admin", played.address]) == 0
    assert played.calls == ["GET /explain?model=m%2F1&prompt_tokens=10&ttft_ms=500 None"]
    outcome, _, head, row, note = capsys.readouterr().out.splitlines()
    assert outcome == "waits for about 1.500 s: no unit has room (policy prefix_affinity)"
    assert head.split()[:4] == ["UNIT", "CELL", "TOTAL", "QUEUE"]
    assert " ".join(row.split()) == (
        "a1 a 0.750 s 0.500 s 0.100 s 0.100 s - 0.050 s 8 of 8 no room; guessed: step"
    )
    assert note == "of 99 units?[2J"


def test_explain_as_json_is_what_the_gate_says(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, CHOICE) as played:
        assert main(["explain", "--json", "--admin", played.address]) == 0
    assert json.loads(capsys.readouterr().out) == CHOICE


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with gate(200, []) as played:
        assert main(["units", "--admin", played.address]) == 0


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (
            404,
            {"error": {"message": "no unit is named 'x'; did you mean 'y'?"}},
            "no unit is named 'x'; did you",
        ),
        (
            401,
            {"error": {"message": "wants a token"}},
            "wants a token (this command sends the token in CELLGATE",
        ),
        (404, b"<html>", "the server at ADDRESS is not a gate's admin port: set that with --admin"),
        (200, b"<html>", "the server at ADDRESS is not a gate's admin port: set that with --admin"),
        (500, [], "the server at ADDRESS is not a gate's admin port: set that with --admin"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_1(
    status: int, answer: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with gate(status, answer) as played:
        assert main(["drain", "x", "--admin", played.address]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cellgate: " + says.replace("ADDRESS", played.address))


def test_no_gate_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, []) as played:
        pass
    assert main(["units", "--admin", played.address]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"cellgate: no gate answers at {played.address} (Connection refused): is it running?"
    )


def test_a_gate_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admin_client, "TIMEOUT_S", 0.05)
    silent = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    with silent:
        assert main(["units", "--admin", f"127.0.0.1:{silent.server_port}"]) == 1
    assert "no gate answers at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["drain"], ["units", "--admin", "here"], ["serve", "--unti", "http://x"]]
)
def test_a_wrong_command_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("cellgate 0.")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0s"), (59, "59s"), (60, "1m 0s"), (3725, "1h 2m"), (86400, "1d 0h"), (190_000, "2d 4h")],
)
def test_a_duration_shows_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_reader_who_has_seen_enough_is_no_trouble(tmp_path: Path) -> None:
    units = [f"--unit=u{number}=http://10.0.{number // 250}.{number % 250}:8000" for number in range(1500)]
    command = [sys.executable, "-m", "cellgate", "check", *units]
    with (tmp_path / "errors").open("w+b") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"flags: valid")
        process.stdout.close()
        assert process.wait(30) == 1
        errors.seek(0)
        assert errors.read() == b""


@pytest.mark.parametrize("command", [["--help"], ["check", "--unit=http://10.0.0.1:8000"]])
def test_a_quick_command_does_not_wait_for_what_it_does_not_need(command: list[str]) -> None:
    slow = {"aiohttp", "boto3", "kubernetes_asyncio", "redis", "uvloop"}
    code = (
        "import sys; from contextlib import suppress; from cellgate.proxy.cli.commands import main\n"
        f"with suppress(SystemExit): main({command!r})\n"
        f"print(*{slow!r} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"
