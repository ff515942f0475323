"""`cellgate roll`: bring new software to all units, cell by cell, and look at how far that is."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import urlencode

from cellgate.proxy.cli.admin_client import call, stranger
from cellgate.proxy.cli.terminal import add_admin, table
from cellgate.proxy.config.settings import Address

ACTIONS = ("status", "start", "pause", "resume", "stop", "undo")


def roll_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked of the roll, at which gate."""
    parser.add_argument("action", choices=ACTIONS, nargs="?", default="status")
    parser.add_argument("--cells", metavar="A,B", help="start: only these cells, in this order")
    parser.add_argument("--version", help="start: what each unit must say that it is afterwards")
    parser.add_argument("--dry-run", action="store_true", help="start: drain and undrain, run no command")
    parser.add_argument("--json", action="store_true", help="status as JSON")
    add_admin(parser)


def run_roll(args: argparse.Namespace) -> int:
    """Ask, or show. Raises CommandError."""
    if args.action == "status":
        roll = latest_roll(args.admin)
        print(json.dumps(roll, indent=2) if args.json else shown_roll(roll))
        return 0
    asked = {"cells": args.cells, "version": args.version, "dry_run": "1" if args.dry_run else None}
    query = urlencode({key: value for key, value in asked.items() if value})
    call(args.admin, "POST", f"/roll/{args.action}?{query}")
    print(f"{args.action}: asked; see cellgate roll")
    return 0


def shown_roll(roll: dict[str, Any] | None) -> str:
    """The roll in a table."""
    if roll is None:
        return "no roll: start one with cellgate roll start"
    rows = [["UNIT", "CELL", "PHASE", "FOR", "WHY"]]
    for each in roll["units"]:
        phase = f"{each['phase']}, back" if each["back"] else each["phase"]
        since = "" if each["for_s"] is None else f"{each['for_s']:.0f} s"
        rows.append([each["unit"], each["cell"], phase, since, each["reason"]])
    done = sum(each["phase"] == "done" for each in roll["units"])
    head = f"roll {roll['id']} is {roll['status']}: {done} of {len(roll['units'])} units done, "
    head += f"{roll['running_s']:.0f} s since it began, conducted by {roll['conducted_by'] or 'no gate'}"
    return "\n".join([head, *([roll["reason"]] if roll["reason"] else []), table(rows)])


def latest_roll(admin: Address) -> dict[str, Any] | None:
    """The roll under way, or the last one; None: there was none. Raises CommandError."""
    found = call(admin, "GET", "/roll")
    if not isinstance(found, dict) or "roll" not in found:
        raise stranger(admin)
    roll: dict[str, Any] | None = found["roll"]
    return roll
