"""`cellgate poison`: the prompts that are refused, and how to allow them again."""

from __future__ import annotations

import argparse
import json

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin
from cellgate.proxy.cli.tables import poison_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is done, about which prompt, at which gate."""
    parser.add_argument("action", choices=["clear"], nargs="?", help="stop refusing them")
    parser.add_argument("fingerprint", metavar="FINGERPRINT", nargs="?", help="only this one")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """List or clear. Raises CommandError."""
    if args.action == "clear":
        cleared = admin_client.clear_poison(args.admin, args.fingerprint)
        lines = [f"{name}: no longer refused" for name in cleared] or ["no prompt is refused"]
        print(*lines, sep="\n")
        return 0
    found = admin_client.poison(args.admin)
    print(json.dumps(found, indent=2) if args.json else poison_table(found))
    return 0
