"""`cellgate explain`: where a request would go now, and its cost on each unit."""

from __future__ import annotations

import argparse
import json

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin
from cellgate.proxy.cli.tables import explain_text

_ASKED = {
    "model": ("NAME", "the requested model; default: any"),
    "prompt_tokens": ("N", "the length of the prompt, none of it cached"),
    "session": ("NAME", "the session it belongs to"),
    "tenant": ("NAME", "the tenant, for fair sharing of the queue"),
    "priority": ("N", "the priority; lower goes first"),
    "ttft_ms": ("MS", "the deadline for the first token"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is known of the request, and which gate is asked."""
    for name, (metavar, tells) in _ASKED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=tells)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Print the candidates. Raises CommandError."""
    asked = {name: getattr(args, name) for name in _ASKED}
    found = admin_client.explain(args.admin, {name: value for name, value in asked.items() if value})
    print(json.dumps(found, indent=2) if args.json else explain_text(found))
    return 0
