"""`check` and `serve`: what is made of files, flags and standard input, and one line for what is wrong."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cellgate.proxy import app
from cellgate.proxy.cli.main import main
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings


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
        f"{path}: cells",
        f"{path}: polcy",
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

    monkeypatch.setattr(app, "serve", serve)
    assert main(["serve", "-c", str(path), "--access-log", "off"]) == 7


def test_a_port_in_use_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(settings: Settings, reload: Any) -> int:
        raise OSError(98, "Address already in use", str(settings.listen))

    monkeypatch.setattr(app, "serve", serve)
    assert main(["serve", "--unit", "http://x"]) == 1
    assert capsys.readouterr().err == "cellgate: cannot listen on 127.0.0.1:8000: Address already in use\n"
