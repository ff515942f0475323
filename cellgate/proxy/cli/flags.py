"""Flags that several commands have: those that make settings, and where the gate's admin port is."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from cellgate.proxy.config.load_process import Overrides
from cellgate.proxy.config.settings import Address, LogFormat, Settings
from cellgate.router.nouns import Fleet

ADMIN = Settings(fleet=Fleet()).admin


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The flags that make settings; without one, the file decides, and without a file the default."""
    from cellgate.policies import POLICIES  # Late: commands that talk to a gate do not need them.

    add = parser.add_argument
    add("--workers", metavar="N", type=_number, help="the number of processes that serve clients")
    add("--listen", metavar="HOST:PORT", help="the address for requests")
    add("--admin", metavar="HOST:PORT", help="the address of the admin port")
    told = "a unit; can be repeated; replaces the cells of the file"
    add("--unit", metavar="[NAME=]URL", action="append", default=[], help=told)
    add("--policy", metavar="NAME", help="how units are ranked: " + ", ".join(POLICIES))
    add("--redis", metavar="URL", help="the Redis that gates share (docs/redis.md)")
    add("--access-log", metavar="FORMAT", help="one of " + ", ".join(get_args(LogFormat)))


def overrides(args: argparse.Namespace) -> Overrides:
    """What these flags say."""
    return Overrides(
        args.listen,
        args.admin,
        tuple(args.unit),
        args.policy,
        args.access_log,
        redis=args.redis,
        workers=args.workers,
        on_terminal=sys.stdout.isatty(),
    )


def add_admin(parser: argparse.ArgumentParser) -> None:
    """Which gate is asked."""
    told = f"the admin port of the gate; default: {ADMIN}"
    parser.add_argument("--admin", metavar="HOST:PORT", type=_address, default=ADMIN, help=told)


def add_unit(parser: argparse.ArgumentParser) -> None:
    """Which unit is meant."""
    parser.add_argument("name", metavar="NAME", help="the name of the unit")


def _number(text: str) -> int | str:
    """A number where it is one; what is wrong with anything else is said as of the file."""
    return int(text) if text.lstrip("-").isdecimal() else text


def _address(text: str) -> Address:
    from cellgate.proxy.config.values import MisfitError, address  # Late, as above.

    try:
        return address(text)
    except MisfitError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, found {text!r}") from None
