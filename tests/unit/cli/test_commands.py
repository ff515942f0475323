"""The command line: exit codes, and one line for a person on whatever goes wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cellgate.proxy.cli import admin_client, operate, terminal
from cellgate.proxy.cli.main import main
from cellgate.proxy.cli.terminal import CommandError
from cellgate.proxy.config.settings import Address
from cellgate.proxy.observe.text import duration
from cellgate.router.cost import Cost
from tests.extras import needs

UNIT_A1 = {
    "name": "a1",
    "cell": "a",
    "verdict": "up",
    "drained": False,
    "draining": False,
    "canary_refused": False,
    "hold": None,
    "restart_suspected": False,
    "degraded": 0.0,
    "odd_answers": False,
    "since_s": 7384.2,
    "standing_s": 7384.2,
    "reason": "one token",
    "in_flight": 3,
    "max_in_flight": 64,
    "load": {"running": 3, "waiting": 1, "kv_use": 0.1, "age_s": 0.4},
    "role": "both",
    "links": [],
}
UNIT_B1 = {
    **UNIT_A1,
    "name": "b1",
    "cell": "b",
    "verdict": "down",
    "drained": True,
    "since_s": 0.4,
    "standing_s": 0.4,
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
def gate(
    status: int, answer: Any, kind: str = "application/json", *, for_clients: bool = False
) -> Iterator[Gate]:
    """A real admin port on a free one that gives `answer`, as JSON unless it is bytes already; or a port for
    clients, where each request has a number.
    """
    played = Gate(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            played.calls.append(f"{self.command} {self.path} {self.headers.get('Authorization')}")
            self.send_response(played.status)
            self.send_header("Content-Type", kind)
            if for_clients:
                self.send_header("x-request-id", "5f2c8a0d91e4b37a")
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


class Told(NamedTuple):
    """What came of a command: its exit code, what it wrote, and the calls that the gate got."""

    code: int
    out: str
    err: str
    calls: list[str]


Ask = Callable[..., Told]
"""Runs a command against a gate that gives this answer."""


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(command: str, answer: Any, *, status: int = 200, for_clients: bool = False) -> Told:
        with gate(status, answer, for_clients=for_clients) as played:
            code = main([*shlex.split(command), "--admin", played.address])
        out, err = capsys.readouterr()
        return Told(code, out, err.replace(played.address, "ADDRESS"), played.calls)

    return ask


# units, drain, undrain


def test_units_are_a_table(ask: Ask) -> None:
    told = ask("units", [UNIT_A1, UNIT_B1])
    assert (told.code, told.calls) == (0, ["GET /units None", "GET /status None"])
    assert told.out.splitlines() == [
        "UNIT  CELL  VERDICT        FOR    IN FLIGHT  RUNNING/WAITING  REASON",
        "a1    a     up             2h 3m  3 of 64    3/1              one token",
        "b1    b     down, drained  0s     0 of 64    -                refused?[2J",
    ]


def test_a_wide_table_has_all_that_helps_to_compare_units(ask: Ask) -> None:
    more = {
        "weight": 2.0,
        "url": "http://10.0.0.1:8000",
        "models": ["llama"],
        "build": {"version": "vllm 0.11.0", "fingerprint": ""},
        "routing": {"prefill_tokens_s": 8000.0, "prefill_samples": 3, "queued_tokens": 1200},
    }
    _, row = ask("units -o wide", [UNIT_A1 | more]).out.splitlines()
    assert " ".join(row.split()).endswith(
        "3/1 both 2 10% 8,000 tokens/s 1,200 tokens vllm 0.11.0 llama http://10.0.0.1:8000 one token"
    )


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({"restart_suspected": True, "degraded": 0.33}, "up, restart suspected, slow"),
        (
            {"links": [{"prefiller": p, "decoder": "a1", "avoided": p == "p2"} for p in ("p1", "p2")]},
            "up, link p2 to a1 avoided",
        ),
    ],
)
def test_the_table_tells_what_else_keeps_requests_away(more: dict[str, Any], verdict: str, ask: Ask) -> None:
    assert f"  {verdict}  2h 3m  " in ask("units", [UNIT_A1 | more]).out


def test_why_prints_the_sentences_of_a_unit(ask: Ask) -> None:
    told = ask("why 'a 1'", {"name": "a 1", "why": ["a 1 is out.", "Because: \x1b[2J."]})
    assert (told.code, told.out) == (0, "a 1 is out.\nBecause: ?[2J.\n")
    assert told.calls == ["GET /units/a%201 None"]
    for answer in list[Any]([[], {}, {"why": "because"}]):
        told = ask("why a1", answer)
        assert told.code == 1
        assert "is not a gate's admin port" in told.err


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["units"], [UNIT_A1]),
        (["why", "a1"], UNIT_A1 | {"why": ["a1 is in."]}),
        pytest.param(["top"], {"units": [], "ready": True, "events": {"units": []}}, marks=needs("top")),
    ],
    ids=str,
)
def test_what_is_shown_is_there_as_json(
    command: list[str], answer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the gate that the environment names."""
    monkeypatch.setattr(admin_client, "events", lambda _: {"units": []})
    with gate(200, answer) as played:
        monkeypatch.setenv("CELLGATE_ADMIN", played.address)
        assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_an_address_of_the_environment_that_is_none_is_said_to_be_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELLGATE_ADMIN", "gate")
    with pytest.raises(SystemExit, match="2"):
        main(["units"])
    assert "found 'gate' in CELLGATE_ADMIN" in capsys.readouterr().err


def test_a_call_without_a_command_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main([]), main(["help"])] == [0, 0]
    bare, asked = capsys.readouterr().out.split("usage: ")[1:]
    assert bare == asked
    assert "  units       list the units of a running gate" in bare
    assert main(["help", "why"]) == 0
    assert capsys.readouterr().out.startswith("usage: cellgate why ")
    assert main(["version"]) == 0
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    (told,) = set(capsys.readouterr().out.splitlines())
    assert told.startswith("cellgate 0.")


def test_help_names_a_page_where_the_reader_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        assert main(["help", "serve"]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "(docs/configuration.md)" in shown()
    monkeypatch.setattr(terminal, "__file__", "/site-packages/cellgate/proxy/cli/terminal.py")
    assert "the configuration; flags override it" in shown()
    named = Message()
    named["Project-URL"] = "Documentation, https://git.test/gate/docs"
    monkeypatch.setattr(metadata, "metadata", lambda _: named)
    assert "the configuration (https://git.test/gate/docs/configuration.md); flags" in shown()


def test_help_shows_a_page_and_a_package_names_pages_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["help", "redis"]) == 0
    assert capsys.readouterr().out.startswith("# ")
    assert main(["help", "unit"]) == 1
    assert "no page 'unit'; did you mean units?" in capsys.readouterr().err
    (tmp_path / "share/cellgate/docs/runbooks").mkdir(parents=True)
    (tmp_path / "share/cellgate/docs/runbooks/unit-down.md").write_text("# a unit\n")
    monkeypatch.setattr(terminal, "__file__", "/site-packages/cellgate/proxy/cli/terminal.py")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert main(["help", "docs/runbooks/unit-down.md"]) == 0
    assert capsys.readouterr().out == "# a unit\n"
    assert main(["help", "../../../etc/passwd"]) == 1
    assert terminal.with_pages("rights: docs/redis.md#rights.") == "rights: cellgate help redis."


FULL = "cellgate: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        *((f"{command} >/dev/full", 1, FULL) for command in ("", "units --help", "version", "schema")),
        ("--help >&-", 0, ""),
        ("help >&-", 0, ""),
    ],
)
def test_an_output_that_is_full_or_closed_is_no_traceback(command: str, code: int, says: str) -> None:
    script = ["bash", "-c", f"{sys.executable} -m cellgate {command}"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, says)


@pytest.mark.parametrize(
    ("command", "says"), [("drain", "drained: no new"), ("undrain", "no longer drained")]
)
def test_units_and_cells_are_drained_and_undrained_with_the_token(
    command: str, says: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ask(f"{command} --cell a/b", {"cell": "a/b", "units": [UNIT_A1, UNIT_B1]})
    looks = ["GET /status None"] if command == "drain" else []
    assert (told.code, told.calls) == (0, [f"POST /cells/a%2Fb/{command} None", *looks])
    assert told.out.startswith(f"cell a/b (a1, b1): {says}")
    assert ask(f"{command} --cell a", []).code == 1
    monkeypatch.setenv("CELLGATE_ADMIN_TOKEN", "s3cret")
    told = ask(f"{command} 'a 1/2'", UNIT_A1)
    looks = ["GET /status Bearer s3cret"] if command == "drain" else []
    assert (told.code, told.calls) == (0, [f"POST /units/a%201%2F2/{command} Bearer s3cret", *looks])
    told = ask(f"{command} a1 b1", {"units": [{"name": "a1", "usable": False, "drained": True}]})
    calls = [f"POST /units/{name}/{command} Bearer s3cret" for name in ("a1", "b1")]
    assert (told.code, told.calls, told.out) == (0, [*calls, *looks], told.out)
    assert told.out.startswith(f"a1, b1: {says}")
    assert ("no unit is in rotation now" in told.err) is (command == "drain")


def test_the_gate_chooses_the_unit_that_is_missed_least(ask: Ask) -> None:
    told = ask("drain --least-valued --model m/1", UNIT_A1)
    assert (told.code, told.calls) == (0, ["POST /scaling/drain?model=m%2F1 None"])
    assert told.out.startswith("a1: drained: no new")


COST = Cost(0.75, 0.5, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.02, -0.02, 0.02, 0.01, 0.02, 0.0)
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
            "cost": COST._asdict() | {"slowdown_of_others_s": None},
            "in_flight": 8,
            "places": 8,
            "has_room": False,
            "why_not": None,
            "guessed": ["step"],
        }
    ],
}


def test_explain_shows_the_outcome_and_each_term(ask: Ask) -> None:
    command = "explain --model m/1 --prompt-tokens 10 --ttft-ms 500"
    told = ask(command, CHOICE)
    assert (told.code, told.calls) == (0, ["GET /explain?model=m%2F1&prompt_tokens=10&ttft_ms=500 None"])
    outcome, _, head, row, note, _, *legend = told.out.splitlines()
    assert all(f"{column}:" in " ".join(legend) for column in head.split()[2:8])
    assert outcome == "waits for about 1.500 s: no unit has room (policy prefix_affinity)"
    assert head.split()[:4] == ["UNIT", "CELL", "TOTAL", "QUEUE"]
    assert " ".join(row.split()) == (
        "a1 a 0.750 s 0.500 s 0.100 s 0.100 s - 0.050 s 8 of 8 no room; guessed: step"
    )
    assert note == "of 99 units?[2J"
    assert json.loads(ask(f"{command} --json", CHOICE).out) == CHOICE


def test_a_drain_may_wait_until_nothing_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter([2, 2, 1, 0])
    a1, b1 = {"name": "a1", "drained": True, "usable": False}, {"name": "b1", "in_flight": 9, "usable": True}
    monkeypatch.setattr(admin_client, "set_drain", lambda *_args, **_named: None)
    monkeypatch.setattr(admin_client, "status", lambda _admin: {"units": [a1, b1]})
    monkeypatch.setattr(admin_client, "units", lambda _admin: [a1 | {"in_flight": next(left)}, b1])
    monkeypatch.setattr(operate, "WAIT_S", 0.0)
    assert main(["drain", "a1", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["2 in flight", "1 in flight", "a1: nothing in flight"]


def test_a_proxy_of_the_environment_is_not_used(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert ask("units", []).code == 0


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
def test_a_refusal_is_one_line_and_exit_code_1(status: int, answer: Any, says: str, ask: Ask) -> None:
    told = ask("drain x", answer, status=status)
    (line,) = told.err.splitlines()
    assert (told.code, line.startswith(f"cellgate: {says}")) == (1, True), line


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("units", 404),
        ("why a1", 401),
        pytest.param("top", 404, marks=needs("top")),
        ("drain a1", 401),
        ("reload", 404),
    ],
)
def test_the_port_for_clients_is_said_to_be_that(command: str, status: int, ask: Ask) -> None:
    answer = {"error": {"message": "no", "type": "not_found_error", "param": None, "code": "unknown_path"}}
    told = ask(command, answer, status=status, for_clients=True)
    assert (told.code, told.err[:49]) == (1, "cellgate: ADDRESS is the gate's port for clients:")


def test_a_gate_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admin_client.call, "__defaults__", (0.05,))
    silent = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    with silent:
        assert main(["units", "--admin", f"127.0.0.1:{silent.server_port}"]) == 1
    assert "no gate answers at" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (["--help"], {"asyncio", "cellgate.probes", "pydantic", "rich", "yaml"}),
        (["units", "--admin=127.0.0.1:1"], {"cellgate.probes", "pydantic", "rich", "yaml"}),
        (["check", "--unit=http://10.0.0.1:8000"], {"rich"}),
    ],
)
def test_a_quick_command_does_not_wait_for_what_it_does_not_need(
    command: list[str], unused: set[str]
) -> None:
    slow = unused | {"aiohttp", "boto3", "kubernetes_asyncio", "redis", "uvloop"}
    code = (
        "import sys; from contextlib import suppress; from cellgate.proxy.cli.main import main\n"
        f"with suppress(SystemExit): main({command!r})\n"
        f"print(*{slow!r} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


# `events`, `events -f` and `units --watch`: each event and each change once, until Ctrl-C.


def event(number: int, at: str = "2026-01-09T03:12:45.120Z") -> dict[str, Any]:
    return {"id": number, "time": at, "kind": "flip", "line": f"unit a{number} up -> down\x1b"}


def test_the_last_events_are_lines_or_objects(ask: Ask) -> None:
    assert ask("events", [event(1), event(2)]).out.splitlines() == [
        "2026-01-09T03:12:45.120Z  unit a1 up -> down?",
        "2026-01-09T03:12:45.120Z  unit a2 up -> down?",
    ]
    shown = ask("events --json", [event(1), event(2)]).out.splitlines()
    assert [json.loads(line) for line in shown] == [event(1), event(2)]
    assert ask("events", []).out == ""


def test_followed_events_are_shown_once_also_those_of_the_next_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list and the stream overlap; the stream ends, and a successor numbers from 1 again."""
    later = "2026-01-09T03:20:00.000Z"
    lists = iter([[event(7), event(8)], [event(8), event(1, later)]])
    streams = iter([[event(8), event(9)], [event(1, later), event(2, later)]])

    @contextmanager
    def followed(_: object) -> Iterator[Iterator[dict[str, Any]]]:
        yield iter(next(streams))

    monkeypatch.setattr(admin_client, "followed", followed)
    monkeypatch.setattr(admin_client, "events", lambda _: next(lists))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", interrupted(slept, after=2))
    assert main(["events", "-f"]) == 0
    shown = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["a7", "a8", "a9", "a1", "a2"]


def interrupted(slept: list[float], after: int) -> Any:
    """A pause that Ctrl-C ends at some time."""

    def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        if len(slept) == after:
            raise KeyboardInterrupt

    return sleep


def test_a_stream_is_read_until_it_ends() -> None:
    body = b": heartbeat\n\nid: 1\nevent: flip\ndata: %s\n\n" % json.dumps(event(1)).encode()
    with gate(200, body, "text/event-stream") as played, admin_client.followed(address(played)) as coming:
        assert list(coming) == [event(1)]
    assert played.calls == ["GET /events?follow=1 None"]


def test_what_is_no_stream_is_no_gate() -> None:
    with (
        gate(200, []) as played,
        pytest.raises(CommandError, match="is not a gate's admin port"),
        admin_client.followed(address(played)),
    ):
        pass


def address(played: Any) -> Address:
    host, _, port = played.address.partition(":")
    return Address(host, int(port))


def watched(monkeypatch: pytest.MonkeyPatch, looks: Sequence[list[dict[str, Any]]], *flags: str) -> None:
    """`units --watch` while the gate shows these, one after another."""
    shown = iter(looks)
    monkeypatch.setattr(admin_client, "units", lambda _: next(shown))
    monkeypatch.setattr(time, "sleep", interrupted([], after=len(looks)))
    assert main(["units", "--watch", *flags]) == 0


LOOKS = [
    [UNIT_A1, UNIT_B1],
    [{**UNIT_A1, "in_flight": 9}, UNIT_B1],
    [{**UNIT_A1, "verdict": "suspect"}, {**UNIT_B1, "drained": False}],
]


def test_a_watched_unit_is_shown_again_when_its_verdict_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(monkeypatch, LOOKS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["UNIT", "a1", "b1", "a1", "b1"]
    assert " suspect " in lines[3]
    assert "drained" not in lines[4]
    watched(monkeypatch, LOOKS, "-o", "json")
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [("a1", "up"), ("b1", "down"), ("a1", "suspect"), ("b1", "down")]
    assert [(unit["name"], unit["verdict"]) for unit in shown] == told
