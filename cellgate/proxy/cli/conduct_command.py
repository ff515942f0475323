"""`cellgate pause`, `resume`, `sleep` and `wake`: what the engine of a unit is told to do (docs/hold.md)."""

from __future__ import annotations

import argparse

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin, add_unit

_DONE = {
    "pause": "drained and paused (mode {mode}); cellgate resume {unit} lets it go on",
    "sleep": "drained and asleep (mode {mode}); cellgate wake {unit} wakes it",
    "resume": "resumed and undrained; it gets requests once a canary has passed",
    "wake": "awake and undrained; it gets requests once a canary has passed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which unit, of which gate; what becomes of its requests."""
    add_unit(parser)
    if parser.prog.endswith((" pause", " sleep")):
        parser.add_argument("--mode", metavar="MODE", help="what becomes of its requests: wait, abort, keep")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Have the engine do it. Raises CommandError."""
    mode = admin_client.conduct(args.admin, args.name, args.command, getattr(args, "mode", None))
    print(f"{args.name}: " + _DONE[args.command].format(unit=args.name, mode=mode))
    return 0
