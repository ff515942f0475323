"""`cellgate why`: why a unit is in or out of rotation, and what happens next."""

from __future__ import annotations

import argparse

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin, add_unit
from cellgate.proxy.cli.tables import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which unit, of which gate."""
    add_unit(parser)
    parser.add_argument(
        "decoder", metavar="DECODER", nargs="?", help="explain the link from prefiller NAME to this unit"
    )
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Print the gate's sentences. Raises CommandError."""
    if args.decoder is None:
        lines = admin_client.why(args.admin, args.name)
    else:
        lines = admin_client.why_link(args.admin, args.name, args.decoder)
    print(*map(shown, lines), sep="\n")
    return 0
