"""`cellgate top`: what a terminal shows, as text."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cellgate.extras import top
from cellgate.proxy.admin.views import status
from cellgate.proxy.cli import admin_client, main
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit
from tests.browser.stage import failed_roll, fleet
from tests.extras import needs


class Gate:
    """A Board and what its admin port would say of it."""

    def __init__(self, cells: int, units: int) -> None:
        self.roll: dict[str, Any] | None = None
        self.board = Board(Rules())
        self.board.configure(fleet(cells, units), 900.0)
        self.events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)
        for state in self.board:
            self.say(state.unit.name, Sign.GOOD, Strength.STRONG, "one token in 40 ms")

    def say(self, unit: str, sign: Sign, strength: Strength, reason: str, node: str | None = None) -> None:
        source = "agent" if node else "canary"
        said = self.board.observe(Evidence(unit, sign, strength, source, reason, 1000.0, node=node))
        if said.flip is not None:
            self.events.add(said.flip)

    def glance(self) -> dict[str, Any]:
        return status(self.board, 1075.0, waiting=3, stopping=False, roll=self.roll)


def drawn(gate: Gate, *, height: int = 40, width: int = 130, trouble: str = "") -> list[str]:
    """The lines that a terminal of this size shows."""
    console = Console(file=io.StringIO(), width=width, color_system=None, record=True)
    picture = top.frame(
        gate.glance(), gate.events.last(), place="127.0.0.1:9901", height=height, trouble=trouble
    )
    console.print(picture)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_trouble_stands_on_top_with_its_node_its_reason_and_its_load() -> None:
    gate = Gate(2, 3)
    gate.say("b2", Sign.BAD, Strength.FATAL, "gone: process 4711 (VLLM::Worker_TP1)", node="b2-1")
    gate.board.drain("a1", drained=True)
    gate.board.open("a3", Ask(prompt_bytes=32_000), 1075.0, retry=False)
    lines = drawn(gate)
    assert lines[0] == "Cellgate 127.0.0.1:9901  4 of 6 units in rotation  1 in flight  3 waiting"
    assert " ".join(lines[1].split()) == "UNIT VERDICT FOR LOAD IN FLIGHT KV CELL NODES"
    units = [lines[at] for at in (2, 4, 6, 7, 8, 9)]
    assert [line.split()[:2] for line in units] == [
        ["b2", "down"],
        ["a1", "drained"],
        ["a3", "up"],
        ["a2", "up"],
        ["b1", "up"],
        ["b3", "up"],
    ]
    assert "1m 15s" in lines[2]
    assert lines[2].endswith("b     □─×")
    assert lines[3] == "  gone: process 4711 (VLLM::Worker_TP1) (source agent, node b2-1)"
    assert lines[5] == "  drained by an operator"
    assert "████████   2.0 s  1/256" in lines[6]
    assert lines[10] == "latest events"
    assert lines[11].startswith("unit b2 (cell b) up -> down: gone: process 4711")


@needs("operator")
def test_a_roll_is_above_the_units_until_it_is_done() -> None:
    gate = Gate(2, 2)
    gate.roll = failed_roll()
    assert drawn(gate)[1:4] == [
        "roll 5f3c is stopped: 1 of 4 units done; unit a2: it has not restarted 100 s after its command",
        "  a2 proving, old software for 12s: it has not restarted",
        "  b1 failed for 52s: it went DOWN while it was watched",
    ]
    gate.roll = failed_roll(status="done")
    assert drawn(gate)[1].startswith("UNIT")


def test_five_hundred_units_fit_into_a_small_terminal() -> None:
    gate = Gate(5, 100)
    gate.say("d77", Sign.BAD, Strength.FATAL, "gone: process 7", node="d77-0")
    lines = drawn(gate, height=24, width=80)
    # The cursor stands on the last line.
    assert (len(lines), max(map(len, lines)) <= 80) == (23, True)
    assert lines[2].split()[:2] == ["d77", "down"]
    assert f"and {500 - 13} more, all up" in lines
    for height in (1, 5, 12):
        lines = drawn(gate, height=height, width=20)
        assert (lines[0][:8], lines[-6]) == ("Cellgate", "latest events"), "hardly there"
    name = "deepseek-r1-prod-us-east-1a-group-0"
    gate.board.configure(Fleet(units=(Unit(name, "us-east-1a", "http://x"),)), 900.0)
    lines = drawn(gate, width=80)
    assert lines[2].startswith("deepseek-r1…t-1a-group-0  starting"), "long names lose their middle"
    assert max(map(len, lines)) <= 80


def test_text_from_outside_moves_no_cursor_and_is_no_markup_and_trouble_is_said_above() -> None:
    gate = Gate(1, 1)
    gate.say("a1", Sign.BAD, Strength.FATAL, "it said \x1b[2J[red]hello[/red]")
    lines = drawn(gate, trouble="no gate answers at 127.0.0.1:9901 (Connection refused)")
    assert lines[1] == "no gate answers at 127.0.0.1:9901 (Connection refused)"
    assert lines[3].startswith("a1")
    assert "\x1b" not in "\n".join(lines)
    assert "it said ?[2J[red]hello[/red]" in "\n".join(lines)


def test_without_a_terminal_it_draws_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate(1, 2)
    monkeypatch.setattr(admin_client, "status", lambda _admin: gate.glance())
    monkeypatch.setattr(admin_client, "events", lambda _admin: gate.events.last())
    assert main.main(["top"]) == 0
    assert "2 of 2 units in rotation" in capsys.readouterr().out
