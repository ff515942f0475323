"""`cellgate top`: the status page in a terminal, redrawn each second, problems first.

`frame` is pure: from the gate's status to the text of the terminal.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from textwrap import wrap
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.terminal import CommandError, add_admin, aged, shown
from cellgate.proxy.config.settings import Address
from cellgate.proxy.observe.text import duration

PERIOD_S = 1.0
EVENTS_SHOWN = 5
BAR = 8
NAME = 24
LINKED = 4
"""Up to this many nodes are drawn with a line between them; more are drawn closer."""
_TOP_ENDLESS = 1_000_000
_PIPE_COLUMNS = 1_000
_FRAME_LINES = 4
"""The summary, the line of those not shown, the line above the events, and the one that the cursor needs."""

_TOP_HEAD = ("UNIT", "VERDICT", "FOR", "LOAD", "IN FLIGHT", "KV", "CELL", "NODES")
_ORDER = (
    "down",
    "held",
    "suspect",
    "restart_suspected",
    "probation",
    "starting",
    "on_hold",
    "full",
    "draining",
    "drained",
    "in",
)
_STYLES = {
    "in": "green",
    "full": "yellow",
    "held": "yellow",
    "restart_suspected": "yellow",
    "suspect": "yellow",
    "starting": "blue",
    "probation": "magenta",
    "down": "bold red",
    "on_hold": "cyan",
    "draining": "cyan",
    "drained": "dim",
}
_NODE_MARKS = {"good": ("■", "●", "green"), "bad": ("×", "×", "bold red"), "unseen": ("□", "○", "dim")}

ROLLED_SHOWN = 6
"""Units of a roll that have a line."""
_ROLL_STYLES = {"running": "blue", "paused": "bold yellow", "stopped": "bold red"}
_WEIGHTS = {"grave": "bold red", "lost": "bold yellow", "soon": "yellow"}
_AT_REST = ("waiting", "done", "skipped")

Glance = Mapping[str, Any]


def top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    parser.add_argument("--json", action="store_true", help="print what it is drawn of, as JSON, and exit")
    add_admin(parser)


def run_top(args: argparse.Namespace) -> int:
    """Draw until Ctrl-C, or once if the output is not a terminal. Raises CommandError."""
    admin = args.admin
    console = Console(highlight=False)
    if not console.is_terminal:
        # Who reads a pipe gets whole lines.
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    glance, events = _ask(admin)
    if args.json:
        print(json.dumps({**glance, "events": events}, indent=2))
        return 0
    if args.once or not console.is_terminal:
        console.print(frame(glance, events, place=str(admin)))
        return 0
    trouble = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                width, height = console.size
                live.update(
                    frame(glance, events, place=str(admin), width=width, height=height, trouble=trouble),
                    refresh=True,
                )
                time.sleep(PERIOD_S)
                try:
                    (glance, events), trouble = _ask(admin), ""
                except CommandError as error:
                    trouble = str(error)
        except KeyboardInterrupt:
            return 0


def frame(
    glance: Glance,
    events: Sequence[Mapping[str, Any]],
    *,
    place: str,
    width: int = _TOP_ENDLESS,
    height: int = _TOP_ENDLESS,
    trouble: str = "",
) -> Group:
    """One picture, with as many units as fit into so many lines of so many columns."""
    last = [_line(Text(shown(event["line"]))) for event in reversed(events[-EVENTS_SHOWN:])]
    units = sorted(glance["units"], key=_rank)
    blocks = _blocks(units)
    rolled = [*helper_lines(glance, width), *_roll(glance.get("roll"))]
    room = height - _FRAME_LINES - len(last) - bool(trouble) - len(rolled)
    # The first block is the head of the table, which is there in any case.
    fits = max(1, sum(lines <= room for lines in accumulate(map(len, blocks))))
    return Group(
        _summary(glance, place),
        *([_line(Text(shown(trouble), "bold red"))] if trouble else []),
        *rolled,
        *chain.from_iterable(blocks[:fits]),
        *_rest(units[fits - 1 :]),
        *([Text("latest events", "dim")] if last else []),
        *last,
    )


def _ask(admin: Address) -> tuple[Glance, list[dict[str, Any]]]:
    return admin_client.status(admin), admin_client.events(admin)


def _rank(unit: Glance) -> tuple[int, float]:
    """Problems first; among healthy units, the busiest."""
    return _ORDER.index(unit["standing"]), -unit["load_s"]


def _summary(glance: Glance, place: str) -> Text:
    units = glance["units"]
    usable = sum(unit["usable"] for unit in units)
    style = "bold red" if not glance["ready"] else "bold green" if usable == len(units) else "bold yellow"
    text = Text(f"Cellgate {place}  ")
    text.append(f"{usable} of {len(units)} units in rotation", style)
    text.append(f"  {glance['in_flight']} in flight  {glance['waiting']} waiting")
    if glance["panic"]:
        text.append("  panic: most units do not answer, they are kept in rotation", "bold red")
    if glance["stopping"]:
        text.append("  stopping", "bold red")
    return text


def helper_lines(glance: Glance, width: int = _TOP_ENDLESS) -> list[Text]:
    """What is wrong beside the units, in as many lines as each takes: what follows stands at its end."""
    return [
        _line(Text(part, _WEIGHTS[each["weight"]]))
        for each in glance.get("troubles", ())
        for part in wrap(shown(f"{each['helper']}: {each['says']}"), width)
    ]


def _roll(roll: Glance | None) -> list[Text]:
    """The roll under way, or the last one that did not end well: a line, and one for each unit at work."""
    if roll is None or roll["status"] == "done":
        return []
    done = sum(each["phase"] == "done" and not each["back"] for each in roll["units"])
    help_text = f"roll {roll['id']} is {roll['status']}: {done} of {len(roll['units'])} units done"
    why = f"; {roll['reason']}" if roll["reason"] else ""
    lines = [_line(Text(shown(help_text + why), _ROLL_STYLES[roll["status"]]))]
    for each in roll["units"]:
        if (each["back"] or each["phase"] not in _AT_REST) and len(lines) <= ROLLED_SHOWN:
            phase = f"{each['phase']}, old software" if each["back"] else each["phase"]
            since = "" if each["for_s"] is None else f" for {duration(each['for_s'])}"
            why = f": {each['reason']}" if each["reason"] else ""
            lines.append(_line(Text(shown(f"  {each['unit']} {phase}{since}{why}"))))
    return lines


def _blocks(units: Sequence[Glance]) -> list[list[Text]]:
    """The head of the table, then the lines of each unit: where it needs a look, a second one tells why."""
    scale_s = max((unit["load_s"] for unit in units), default=0.0)
    rows = [[Text(name, "dim") for name in _TOP_HEAD], *(_cells(unit, max(scale_s, 1.0)) for unit in units)]
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    blocks = [[_row(row, widths)] for row in rows]
    for unit, block in zip(units, blocks[1:], strict=True):
        if unit["standing"] != "in" or unit["besides"]:
            block.append(_line(Text(f"  {shown(unit['reason'])}", "italic")))
    return blocks


def _cells(unit: Glance, scale_s: float) -> list[Text]:
    return [
        Text(_cut(shown(unit["name"]))),
        Text(_word(unit), _STYLES[unit["standing"]]),
        Text(duration(unit["since_s"])),
        _bar(unit["load_s"], scale_s),
        Text(f"{unit['in_flight']}/{unit['max_in_flight']}"),
        Text("" if unit["kv_use"] is None else f"{unit['kv_use']:.0%}{aged(unit['load_age_s'])}"),
        Text(_cut(shown(unit["cell"]))),
        _nodes(unit["nodes"]),
    ]


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    """Cells as wide as their columns are; what the terminal has no room for is at the end."""
    row = Text()
    for cell, width in zip(cells, widths, strict=True):
        row.append_text(cell)
        row.append(" " * (width - cell.cell_len + 2))
    return _line(row)


def _line(text: Text) -> Text:
    """One line, however narrow the terminal is."""
    text.rstrip()
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _cut(name: str) -> str:
    """A long name without its middle: names of units differ at the end."""
    return name if len(name) <= NAME else f"{name[: NAME // 2 - 1]}…{name[-NAME // 2 :]}"


def _rest(units: Sequence[Glance]) -> list[Text]:
    """Those that there is no room for."""
    if not units:
        return []
    well = sum(unit["standing"] == "in" for unit in units)
    which = "all up" if well == len(units) else f"{well} of them up"
    return [Text(f"and {len(units)} more, {which}", "dim")]


def _word(unit: Glance) -> str:
    if unit["standing"] != "in":
        return str(unit["standing"])
    return f"up, {unit['besides']}" if unit["besides"] else "up"


def _nodes(nodes: Sequence[Glance]) -> Text:
    """The leader is a square, followers are circles."""
    text = Text()
    for number, node in enumerate(nodes):
        leader, follower, style = _NODE_MARKS[node["state"]]
        text.append("─" if number and len(nodes) <= LINKED else "", "dim")
        text.append(leader if node["role"] == "leader" else follower, style)
    return text


def _bar(load_s: float, scale_s: float) -> Text:
    full = round(BAR * load_s / scale_s)
    return Text.assemble(("█" * full, "blue"), ("░" * (BAR - full), "dim"), f" {load_s:5.1f} s")
