"""`cellgate keys new NAME` makes a key for a client, `cellgate keys usage FILE` adds up a usage log."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import orjson

from cellgate.proxy.admission.usage import UsageTotal, rows_of, totals
from cellgate.proxy.cli.terminal import CommandError, table
from cellgate.proxy.config.key_file import KeyFileError, keys_in
from cellgate.proxy.observe.log import utc

SECRET_BYTES = 32
"""As many as its SHA-256 has: nobody can guess it, so its digest needs no salt."""


def keys_arguments(parser: argparse.ArgumentParser) -> None:
    orders = parser.add_subparsers(dest="order", metavar="ORDER", required=True, help="new, usage")
    _new_arguments(orders.add_parser("new", description="Make a key for a client."))
    _usage_arguments(orders.add_parser("usage", description="Add up what keys and tenants have used."))


def run_keys(args: argparse.Namespace) -> int:
    """Do it. Raises CommandError."""
    return _make(args) if args.order == "new" else _add_up(args)


def _new_arguments(parser: argparse.ArgumentParser) -> None:
    """For whom it is, and where its line goes."""
    add = parser.add_argument
    add("name", metavar="NAME", help="what logs and metrics call it")
    add("--file", metavar="FILE", help="the file of keys, to which its line is appended")
    add("--tenant", metavar="TENANT", help="who shares queue and limits with it; default: NAME")
    add("--model", metavar="MODEL", action="append", help="a model that it is for; can be repeated")
    add("--expires", metavar="TIME", help="such as 2027-01-31")


def _make(args: argparse.Namespace) -> int:
    """Print the key: it is stored nowhere. Raises CommandError."""
    key = f"sk-{secrets.token_urlsafe(SECRET_BYTES)}"
    fields = {"key": args.name, "sha256": sha256(key.encode()).hexdigest()}
    more = {"tenant": args.tenant, "models": args.model, "expires": args.expires}
    line = orjson.dumps(fields | {name: value for name, value in more.items() if value is not None}) + b"\n"
    path = args.file or "key"
    before = _bytes(args.file) if args.file else b""
    if before and not before.endswith(b"\n"):
        line = b"\n" + line
    try:
        keys_in(path, before + line)
    except KeyFileError as error:
        raise CommandError(str(error)) from None
    if args.file:
        _append(args.file, line)
        print(key)
    else:
        print(key, f"its line in the file of keys: {line.decode().strip()}", sep="\n")
    return 0


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


def _append(path: str, line: bytes) -> None:
    """In one write, so that a gate that reads meanwhile finds whole lines."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            os.write(file, line)
        finally:
            os.close(file)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


# `cellgate keys usage FILE`: adds up a usage log.


KEYS_LATEST = "~"
"""Comes after each time."""
_KEYS_HEAD = ("REQUESTS", "PROMPT TOKENS", "COMPLETION TOKENS", "COST", "ESTIMATED")


def _usage_arguments(parser: argparse.ArgumentParser) -> None:
    """Which log, from when to when, and by what."""
    add = parser.add_argument
    add("file", metavar="FILE", help="the usage log")
    help_text = "such as 2026-11-01 or 2026-11-01T12:00:00Z"
    add("--since", metavar="TIME", type=_time, help=f"the first moment, {help_text}; default: all")
    add("--until", metavar="TIME", type=_time, help="the moment after the last; default: now")
    add("--by", choices=["tenant", "key", "model"], default="tenant", help="a line for each; default: tenant")
    add("--json", action="store_true", help="everything, as JSON")


def _add_up(args: argparse.Namespace) -> int:
    """Print the totals. Raises CommandError."""
    try:
        found = totals(rows_of(args.file), args.by, args.since or "", args.until or KEYS_LATEST)
    except OSError as error:
        raise CommandError(f"{args.file}: {error.strerror}") from None
    if args.json:
        print(json.dumps({name: asdict(total) for name, total in found.items()}, indent=2))
    else:
        rows = [(name or "-", *_row(total)) for name, total in found.items()]
        print(table([(args.by.upper(), *_KEYS_HEAD), *rows]))
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
