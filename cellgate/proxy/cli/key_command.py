"""`cellgate key new NAME`: makes a key for a client."""

from __future__ import annotations

import argparse
import os
import secrets
from hashlib import sha256
from pathlib import Path

import orjson

from cellgate.proxy.cli.command_error import CommandError
from cellgate.proxy.config.key_file import KeyFileError, keys_in

SECRET_BYTES = 32
"""As many as its SHA-256 has: nobody can guess it, so its digest needs no salt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is made, for whom, and where its line goes."""
    add = parser.add_argument
    add("action", choices=["new"], help="make a key")
    add("name", metavar="NAME", help="what logs and metrics call it")
    add("--file", metavar="FILE", help="the file of keys, to which its line is appended")
    add("--tenant", metavar="TENANT", help="who shares queue and limits with it; default: NAME")
    add("--model", metavar="MODEL", action="append", help="a model that it is for; can be repeated")
    add("--expires", metavar="TIME", help="such as 2027-01-31")


def run(args: argparse.Namespace) -> int:
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
