"""Rooms in their order, no circles, one meaning for each name, nothing too long (`python -m tests.house`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import names, rooms, words
from tests.house.clocks import of_file
from tests.house.rules import FIGURES, RULES
from tests.house.source import Source, uses


def test_every_rule_is_kept() -> None:
    assert [(rule, *each) for rule, find in RULES.items() for each in find()] == []


def test_what_is_to_become_less_does() -> None:
    for figure, (most, find) in FIGURES.items():
        found = find()
        assert len(found) <= most, f"{figure}: {len(found)}; `python -m tests.house all` shows them"


@pytest.mark.parametrize(
    ("name", "old"),
    [("KeyDoor", ["door"]), ("_told_at", ["told"]), ("doorbell", []), ("had_seat", ["seat"]), ("seated", [])],
)
def test_old_words_are_found_in_names(name: str, old: list[str]) -> None:
    assert words.old_parts(name) == old


@pytest.mark.parametrize(
    ("folder", "line", "reads", "sleeps"),
    [
        ("processes", "time.sleep(0.5)", 0, 1),
        ("sockets", "await asyncio.sleep(PAUSE_S)", 0, 1),
        ("sockets", "while not ready(): await asyncio.sleep(0.01)", 0, 0),
        ("sockets", "while True: await asyncio.sleep(0.01)", 0, 1),
        ("sockets", "await asyncio.sleep(60.0)", 0, 0),
        ("sockets", "await asyncio.sleep(0)", 0, 0),
        ("unit", "await asyncio.sleep(1.0)", 0, 1),
        ("unit", "await asyncio.sleep(1.0)\n\ndef play() -> Play: ...", 0, 0),
        ("unit", "asyncio.run(asyncio.sleep(1.0))", 0, 1),
        ("unit", "assert time.monotonic() - began < 1.0", 1, 0),
    ],
)
def test_what_depends_on_the_machine_is_found(folder: str, line: str, reads: int, sleeps: int) -> None:
    test = f"async def test_it():\n    {line}\n"
    for mark, expected in (("", (reads, sleeps)), ("@pytest.mark.alone\n", (0, 0))):
        source = Source(Path("tests", folder, "test_it.py"))
        source.__dict__["text"] = mark + test
        assert tuple(map(len, of_file(source))) == expected


def test_a_circle_of_modules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    below, above = "cellgate.proxy.http.unit", "cellgate.proxy.control.plane"
    made = {name: set(used) for name, used in uses().items()}
    made[below].add(above)
    monkeypatch.setattr(rooms, "uses", lambda: made)
    (circle,) = rooms.circles()
    assert "cellgate/proxy/http/unit.py" in str(circle)
    assert "cellgate/proxy/control/plane.py" in str(circle)


@pytest.mark.parametrize(
    ("name", "there"), [("pick.py", True), ("proxy/app.py", True), ("explore.py", False)]
)
def test_a_file_that_is_named_and_gone_is_found(name: str, there: bool) -> None:
    assert names.is_there(Path("cellgate/router/learning.py"), name) is there
