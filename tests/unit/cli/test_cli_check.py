"""`check` and `serve`: what is made of files and flags, one line for what is wrong; keys."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cellgate.extras import taken_out
from cellgate.proxy import app
from cellgate.proxy.admission.limits import UsageRecord
from cellgate.proxy.admission.usage import UsageRow, usage_line
from cellgate.proxy.cli.main import COMMANDS, main
from cellgate.proxy.config.key_file import read_keys
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings
from tests.extras import needs


def test_check_shows_the_units_as_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--unit", "http://x:1/", "--unit", "big=https://y", "--listen", "0.0.0.0:80"]) == 0
    head, columns, one, two, port, *times = capsys.readouterr().out.splitlines()
    assert head == "flags: valid; listens on 0.0.0.0:80, admin on 127.0.0.1:9901, policy prefix_affinity"
    assert columns.split("  ")[0] == "UNIT"
    assert (
        " ".join(one.split()) == "unit-1 default http://x:1 1, cell 1 256 asked of the unit unit-1 (leader)"
    )
    assert two.split()[:3] == ["big", "default", "https://y"]
    assert port == "unit big: https://y has no port, so it means port 443"
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
        f"{path}:2: cells",
        f"{path}:1: polcy",
    ]


def test_check_takes_a_file_or_standard_input_and_answers_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = "cells: [{name: a, units: [{name: a1, url: 'http://x'}]}]", "polcy: x"
    file = tmp_path / "gate.yaml"
    file.write_text(good)
    for where in (["-c", str(file)], [str(file)]):
        assert main(["check", *where]) == 0
        assert capsys.readouterr().out.startswith(f"{file}: valid; ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(good.encode())))
    assert main(["check", "-", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["valid"], told["units"][0]["url"], told["listen"]) == (True, "http://x", "127.0.0.1:8000")
    assert told["found_within"][0]["units"] == ["a1"]
    file.write_text(bad)
    assert main(["check", str(file), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["valid"], len(told["problems"])) == (False, 2)


def test_serve_does_not_read_standard_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-c", "-"]) == 2
    assert "a gate reads its file again when it is reloaded" in capsys.readouterr().err


@needs("redis")
@pytest.mark.parametrize("url", ["redis//h:6379", "redis://me:s3cret@h:6379", "http://h", "redis://h:port"])
def test_check_refuses_what_is_no_url_of_a_redis(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--unit", "http://x:1/", "--redis", url]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("redis: expected a URL such as redis://HOST:PORT/0, ")
    assert len(err.splitlines()) == 1
    assert "s3cret" not in err


def test_serve_hands_over_settings_and_how_to_read_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        raise OSError(98, "Address already in use", str(settings.listen))

    monkeypatch.setattr(app, "serve", serve)
    assert main(["serve", "-c", str(path), "--access-log", "off"]) == 1
    said = "cellgate: cannot listen on 127.0.0.1:8000: Address already in use\n"
    assert capsys.readouterr().err == said, "a port in use is one line"


# A wrong command is one line on stderr that says what to do, and exit code 2; what did not work is 1.

NO_GATE = "no gate answers at 127.0.0.1:1 (Connection refused): is it running? Set its admin address"
WRONG = {
    "fly": "cellgate: there is no command 'fly'; see: cellgate --help",
    "unit": "cellgate: there is no command 'unit'; did you mean units?; see: cellgate --help",
    "--verison": "cellgate: unrecognized arguments: --verison; did you mean --version?",
    "units --wath": "cellgate units: unrecognized arguments: --wath; did you mean --watch?",
    "completion units": "cellgate: no gate answers at 127.0.0.1:1 (Connection refused)",
    "units -o yaml": "cellgate units: argument -o/--output: invalid choice: 'yaml' (choose from ",
    "units --admin here": "cellgate units: argument --admin: expected HOST:PORT, with an IPv6 host in",
    "units --adm 127.0.0.1:1": "cellgate units: unrecognized arguments: --adm 127.0.0.1:1; did you mean",
    "events -f --admin 127.0.0.1:1": f"cellgate: {NO_GATE}",
    "top --admin 127.0.0.1:1": f"cellgate: {NO_GATE}",
    "why": "cellgate why: the following arguments are required: UNIT; see: cellgate why --help",
    "drain a1 --cell a": "cellgate drain: argument --cell: not allowed with argument UNIT",
    "engine pause a1 --mod keep": "cellgate engine: unrecognized arguments: --mod keep; did you",
    "check nowhere.yaml": "nowhere.yaml: expected a readable file: No such file or directory",
    "check": "--unit: expected at least one cell with a unit, found none; add units to the file",
    "check --unit x": "--unit: expected http://HOST:PORT or https://HOST:PORT without a path, found 'x'; did",
    "check --unit http://x --workers two": "--workers: expected a whole number from 1, found 'two'",
    "check --unit http://x --admin 127.0.0.1:8000": "--admin: 127.0.0.1:8000 is taken by listen (127.",
    "plan m": "cellgate plan: the following arguments are required: --memory; see: cellgate plan --help",
    "drain": "cellgate drain: one of the arguments UNIT --cell --least-valued is required; see: cellgate",
    "poison clean": "cellgate poison: argument action: invalid choice: 'clean' (choose from ",
    "completion": "cellgate completion: the following arguments are required: shell",
    "serve a.yaml -c b.yaml": "cellgate serve: argument -c/--config: not allowed with argument FILE",
    "schema x": "cellgate schema: unrecognized arguments: x; see: cellgate schema --help",
    "explain --tokens 9": "cellgate explain: unrecognized arguments: --tokens 9; did you mean --prompt-tok",
    "plan m --memory big": "cellgate plan: argument --memory: expected a size such as 80GiB, found 'big'",
    "plan org/unknown-model --memory 80GiB": "org/unknown-model: neither a file nor in the hub cache ",
    "agent": "cellgate agent: nothing to watch: give --match, --pid-file or --port",
    "agent --match (": "cellgate agent: argument --match: '(' is not a valid regular expression: ",
    "agent --port 99999": "cellgate agent: argument --port: expected a port from 1 to 65535, found '99999'",
    "agent --port 1 --listen 0.0.0.0:1": "cellgate agent: 0.0.0.0 can be reached from other machines, so ",
}


UNKNOWN = pytest.mark.skipif(bool(taken_out()), reason="its extra may have been taken out")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        pytest.param(*each, marks=UNKNOWN if each[0].split()[0] not in COMMANDS else (), id=each[0])
        for each in WRONG.items()
    ],
)
def test_it_is_one_line_that_says_what_to_do(
    command: str, line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    monkeypatch.delenv("CELLGATE_AGENT_TOKEN", raising=False)
    monkeypatch.setenv("CELLGATE_ADMIN", "127.0.0.1:1")
    assert code_of(command.split()) == (1 if "no gate answers" in line else 2)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def code_of(words: Sequence[str]) -> int:
    """The exit code, however it comes."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else -1


# `cellgate keys new` and `cellgate keys usage`.

JULY = 1_751_328_000.0
"""2025-07-01T00:00:00Z."""
BILL = UsageRecord("r", "alice", "team", "tiny", "tiny", "chat", 200, 0.0, 0, 0, 30, 12, False)


def test_a_new_key_is_shown_once_and_its_line_is_appended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text('{"tenant": "team"}')
    options = "--tenant", "team", "--model", "tiny", "--expires", "2030-01-01"
    assert main(["keys", "new", "alice", "--file", str(file), *options]) == 0
    shown = capsys.readouterr().out.strip()
    key = read_keys(str(file)).keys[sha256(shown.encode()).digest()]
    assert (key.name, key.tenant.name, key.models) == ("alice", "team", frozenset({"tiny"}))
    assert shown not in file.read_text()
    assert main(["keys", "new", "alice", "--file", str(file)]) == 1
    assert capsys.readouterr().err == f"cellgate: {file}:3: key: duplicate key 'alice'\n"
    assert len(file.read_text().splitlines()) == 2


def test_without_a_file_its_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "bob"]) == 0
    shown, line = capsys.readouterr().out.splitlines()
    assert json.loads(line.partition(": ")[2]) == {"key": "bob", "sha256": sha256(shown.encode()).hexdigest()}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A usage log with a line that is cut off."""
    file = tmp_path / "usage.jsonl"
    rows = [
        usage_line(JULY - 1.0, UsageRow(BILL, 1.0)),
        usage_line(JULY, UsageRow(BILL, 0.5)),
        b'{"time": "2025-07\n',
        usage_line(JULY + 1.0, UsageRow(BILL._replace(key="bob", is_estimated=True), 0.25)),
    ]
    file.write_bytes(b"".join(rows))
    return file


def test_usage_is_added_up_from_a_time_on(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "usage", str(log), "--since", "2025-07-01"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["TENANT", "REQUESTS"]
    assert row.split() == ["team", "2", "60", "24", "0.750000", "1"]


def test_usage_by_key_for_programs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "usage", str(log), "--by", "key", "--json", "--until", "2025-07-01T00:00:01Z"]) == 0
    assert {name: total["requests"] for name, total in json.loads(capsys.readouterr().out).items()} == {
        "alice": 2
    }
    assert main(["keys", "usage", str(log / "none")]) == 1
    with pytest.raises(SystemExit):
        main(["keys", "usage", str(log), "--since", "July"])


def test_check_says_which_units_may_claim_the_models_of_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, config = tmp_path / "keys.jsonl", tmp_path / "gate.yaml"
    keys.write_text('{"key": "a", "sha256": "%s", "models": ["tiny"]}\n' % ("0" * 64))
    units = (
        "{units: [{name: free, url: http://a:1}, {name: bound, url: http://b:1, models: [tiny]}], name: c}"
    )
    config.write_text(f"keys: {{file: {keys}}}\ncells: [{units}]\n")
    assert main(["check", "-c", str(config)]) == 0
    out = capsys.readouterr().out
    assert "keys are for some models (a), but units may list any model as theirs" in out
    assert "get its requests (free): give them `models`" in out
