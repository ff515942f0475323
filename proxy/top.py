"""`cellgate top`: the status page in a terminal, drawn anew each second. What needs a look comes first.

`frame` is pure: what the gate said in, what the terminal shows out. Needs the extra `top` (rich).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxy import admin_client
from proxy.cli_tables import duration, shown
from proxy.settings import Address

PERIOD_S = 1.0
EVENTS_SHOWN = 5
BAR = 10
_ENDLESS = 1_000_000
_FRAME_LINES = 4
"""The summary, the head of the table, the line of those not shown, and the line above the events."""

_ORDER = ("down", "held", "suspect", "doubted", "probation", "starting", "full", "drained", "in")
_STYLES = {
    "in": "green",
    "full": "yellow",
    "held": "yellow",
    "doubted": "yellow",
    "suspect": "yellow",
    "starting": "blue",
    "probation": "magenta",
    "down": "bold red",
    "drained": "dim",
}
_NODES = {"good": ("■", "●", "green"), "bad": ("×", "×", "bold red"), "unseen": ("□", "○", "dim")}

Glance = Mapping[str, Any]


def run(admin: Address, *, once: bool = False) -> int:
    """Draw until Ctrl-C, or once where nobody looks at a terminal. Raises AdminError when no gate answers."""
    console = Console(highlight=False)
    glance, events = _ask(admin)
    if once or not console.is_terminal:
        console.print(frame(glance, events, place=str(admin)))
        return 0
    trouble = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                height = console.size.height
                live.update(
                    frame(glance, events, place=str(admin), height=height, trouble=trouble), refresh=True
                )
                time.sleep(PERIOD_S)
                try:
                    (glance, events), trouble = _ask(admin), ""
                except admin_client.AdminError as error:
                    trouble = str(error)
        except KeyboardInterrupt:
            return 0


def frame(
    glance: Glance,
    events: Sequence[Mapping[str, Any]],
    *,
    place: str,
    height: int = _ENDLESS,
    trouble: str = "",
) -> Group:
    """One picture, with as many units as fit into so many lines."""
    units = sorted(glance["units"], key=_rank)
    last = [Text(shown(event["line"]), no_wrap=True, overflow="ellipsis") for event in events[-EVENTS_SHOWN:]]
    room = max(1, height - _FRAME_LINES - len(last) - bool(trouble))
    return Group(
        _summary(glance, place),
        *([Text(shown(trouble), "bold red")] if trouble else []),
        _units(units[:room]),
        *_rest(units[room:]),
        *([Text("last flips", "dim")] if last else []),
        *reversed(last),
    )


def _ask(admin: Address) -> tuple[Glance, list[dict[str, Any]]]:
    return admin_client.status(admin), admin_client.events(admin)


def _rank(unit: Glance) -> tuple[int, float]:
    """Trouble first; among those that are well, the busiest."""
    return _ORDER.index(unit["standing"]), -unit["load_s"]


def _summary(glance: Glance, place: str) -> Text:
    units = glance["units"]
    usable = sum(unit["usable"] for unit in units)
    style = "bold red" if not glance["ready"] else "bold green" if usable == len(units) else "bold yellow"
    text = Text(f"Cellgate {place}  ")
    text.append(f"{usable} of {len(units)} units in rotation", style)
    text.append(f"  {glance['in_flight']} in flight  {glance['waiting']} waiting")
    if glance["panic"]:
        text.append("  panic: nothing answers of most units, they are kept in rotation", "bold red")
    if glance["stopping"]:
        text.append("  stopping", "bold red")
    return text


def _units(units: Sequence[Glance]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("CELL", "UNIT", "VERDICT", "FOR", "NODES", "LOAD", "IN FLIGHT", "KV"):
        table.add_column(name, no_wrap=True)
    table.add_column("REASON", no_wrap=True, overflow="ellipsis", ratio=1)
    scale_s = max(1.0, *(unit["load_s"] for unit in units)) if units else 1.0
    for unit in units:
        is_in = unit["standing"] == "in"
        table.add_row(
            Text(shown(unit["cell"])),
            Text(shown(unit["name"])),
            Text(_word(unit), _STYLES[unit["standing"]]),
            duration(unit["since_s"]),
            _nodes(unit["nodes"]),
            _bar(unit["load_s"], scale_s),
            f"{unit['in_flight']}/{unit['max_in_flight']}",
            "" if unit["kv_use"] is None else f"{unit['kv_use']:.0%}",
            Text("" if is_in else shown(unit["reason"])),
        )
    return table


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
    return "up, slow" if unit["degraded"] else "up"


def _nodes(nodes: Sequence[Glance]) -> Text:
    """The leader is a square, followers are circles."""
    text = Text()
    for number, node in enumerate(nodes):
        leader, follower, style = _NODES[node["state"]]
        text.append("─" if number else "", "dim")
        text.append(leader if node["role"] == "leader" else follower, style)
    return text


def _bar(load_s: float, scale_s: float) -> Text:
    full = round(BAR * load_s / scale_s)
    return Text.assemble(("█" * full, "blue"), ("░" * (BAR - full), "dim"), f" {load_s:5.1f} s")
