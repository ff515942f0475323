"""`cellgate drain` and `cellgate undrain`: a unit, all units of a cell, or the unit that is missed least."""

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
    if parser.prog.endswith(" drain"):
        least = "the unit whose prefix cache is missed least, before there is one unit less"
        whom.add_argument("--least-valued", action="store_true", help=least)
        parser.add_argument("--model", metavar="NAME", help="with --least-valued: of the units of this model")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Do it. Raises CommandError."""
    drained = args.command == "drain"
    if getattr(args, "least_valued", False):
        whom = admin_client.drain_least_valued(args.admin, args.model)
    elif args.cell is None:
        admin_client.set_drain(args.admin, args.name, drained=drained)
        whom = args.name
    else:
        units = admin_client.set_cell_drain(args.admin, args.cell, drained=drained)
        whom = f"cell {args.cell} ({', '.join(units)})"
    print(f"{whom}: {_DONE[args.command]}")
    return 0
