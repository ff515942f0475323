"""`cellgate drain` and `cellgate undrain`: a unit, or all units of a cell."""

from __future__ import annotations

import argparse

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin

_DONE = {
    "drain": "drained: no new requests, those in flight finish",
    "undrain": "no longer drained: gets requests as soon as its verdict allows",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which unit or cell, of which gate."""
    whom = parser.add_mutually_exclusive_group(required=True)
    whom.add_argument("name", metavar="NAME", nargs="?", help="the name of the unit")
    whom.add_argument("--cell", metavar="NAME", help="all units of this cell")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Do it. Raises CommandError."""
    drained = args.command == "drain"
    if args.cell is None:
        admin_client.set_drain(args.admin, args.name, drained=drained)
        whom = args.name
    else:
        units = admin_client.set_cell_drain(args.admin, args.cell, drained=drained)
        whom = f"cell {args.cell} ({', '.join(units)})"
    print(f"{whom}: {_DONE[args.command]}")
    return 0
