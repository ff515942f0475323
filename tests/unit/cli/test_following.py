"""`events`, `events -f` and `units --watch`: each event and each change once, until Ctrl-C."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.main import main
from cellgate.proxy.cli.terminal import CommandError
from cellgate.proxy.config.settings import Address
from tests.unit.cli.test_commands import UNIT_A1, UNIT_B1, gate


def event(number: int, at: str = "2026-01-09T03:12:45.120Z") -> dict[str, Any]:
    return {"id": number, "time": at, "kind": "flip", "line": f"unit a{number} up -> down\x1b"}


def test_the_last_events_are_lines_or_objects(capsys: pytest.CaptureFixture[str]) -> None:
    with gate(200, [event(1), event(2)]) as played:
        assert main(["events", "--admin", played.address]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "2026-01-09T03:12:45.120Z  unit a1 up -> down?",
            "2026-01-09T03:12:45.120Z  unit a2 up -> down?",
        ]
        assert main(["events", "--json", "--admin", played.address]) == 0
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [event(1), event(2)]
        played.body = b"[]"
        assert main(["events", "--admin", played.address]) == 0
        assert capsys.readouterr().out == ""


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
