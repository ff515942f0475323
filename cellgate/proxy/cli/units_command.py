"""`cellgate units`: the units of a running gate, once or whenever one changes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin
from cellgate.proxy.cli.tables import columns, unit_rows, units_table, verdict
from cellgate.proxy.config.settings import Address

LOOK_EVERY_S = 1.0
_FORMS = ("table", "wide", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """In which form, once or on and on, of which gate."""
    told = "table, wide (weight, cache, engine and URL as well) or json (everything); default: %(default)s"
    parser.add_argument("-o", "--output", metavar="FORM", choices=_FORMS, default="table", help=told)
    parser.add_argument("--watch", action="store_true", help="then each unit that changes, until Ctrl-C")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Print the units. Raises CommandError."""
    units = admin_client.units(args.admin)
    if args.output == "json" and not args.watch:
        print(json.dumps(units, indent=2))
    elif args.watch:
        with suppress(KeyboardInterrupt):
            _watch(args.admin, args.output, units)
    else:
        print(units_table(units, wide=args.output == "wide"))
    return 0


def _watch(admin: Address, form: str, units: Sequence[Mapping[str, Any]]) -> None:
    """All units; then a line for each whose verdict, or drain, or hold is another one."""
    rows = unit_rows(units, wide=form == "wide")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    known: dict[str, str] = {}
    lines = columns(rows[:1], widths) if form != "json" else []
    while True:
        changed = [unit for unit in units if known.get(unit["name"]) != verdict(unit)]
        lines += _lines(changed, form, widths)
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
        known, lines = {unit["name"]: verdict(unit) for unit in units}, []
        time.sleep(LOOK_EVERY_S)
        units = admin_client.units(admin)


def _lines(units: Sequence[Mapping[str, Any]], form: str, widths: Sequence[int]) -> list[str]:
    if form == "json":
        return [json.dumps(unit) for unit in units]
    return columns(unit_rows(units, wide=form == "wide")[1:], widths)
