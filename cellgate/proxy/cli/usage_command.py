"""`cellgate usage FILE`: adds up a usage log."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import UTC, datetime

from cellgate.proxy.cli.command_error import CommandError
from cellgate.proxy.cli.tables import table
from cellgate.proxy.doors.usage_log import rows_of
from cellgate.proxy.doors.usage_totals import UsageTotal, totals
from cellgate.proxy.logs.text import utc

LATEST = "~"
"""Comes after each time."""
_HEAD = ("REQUESTS", "PROMPT TOKENS", "COMPLETION TOKENS", "COST", "ESTIMATED")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which log, from when to when, and by what."""
    add = parser.add_argument
    add("file", metavar="FILE", help="the usage log")
    told = "such as 2026-11-01 or 2026-11-01T12:00:00Z"
    add("--since", metavar="TIME", type=_time, help=f"the first moment, {told}; default: all")
    add("--until", metavar="TIME", type=_time, help="the moment after the last; default: now")
    add("--by", choices=["tenant", "key", "model"], default="tenant", help="a line for each; default: tenant")
    add("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the totals. Raises CommandError."""
    try:
        found = totals(rows_of(args.file), args.by, args.since or "", args.until or LATEST)
    except OSError as error:
        raise CommandError(f"{args.file}: {error.strerror}") from None
    if args.json:
        print(json.dumps({name: asdict(total) for name, total in found.items()}, indent=2))
    else:
        rows = [(name or "-", *_row(total)) for name, total in found.items()]
        print(table([(args.by.upper(), *_HEAD), *rows]))
    return 0


def _row(total: UsageTotal) -> tuple[str, ...]:
    counts = total.requests, total.prompt_tokens, total.completion_tokens
    return (*map(str, counts), f"{total.cost:.6f}", str(total.estimated))


def _time(text: str) -> str:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 2026-11-01 or 2026-11-01T12:00:00Z, found {text!r}"
        ) from None
    return utc((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
