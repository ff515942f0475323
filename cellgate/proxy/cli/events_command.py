"""`cellgate events`: what happened to units, and what happens from now on."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin
from cellgate.proxy.cli.tables import shown
from cellgate.proxy.config.settings import Address

AGAIN_AFTER_S = 1.0
"""When a gate is replaced, its stream ends, and its successor has another one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Once or on and on, in which form, of which gate."""
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what happens, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Print the last events, oldest first. Raises CommandError."""
    write: Callable[[Mapping[str, Any]], str] = json.dumps if args.json else _line
    if not args.follow:
        print(*(f"{write(event)}\n" for event in admin_client.events(args.admin)), sep="", end="")
        return 0
    with suppress(KeyboardInterrupt):
        _follow(args.admin, write)
    return 0


def _line(event: Mapping[str, Any]) -> str:
    return shown(f"{event['time']}  {event['line']}")


def _follow(admin: Address, write: Callable[[Mapping[str, Any]], str]) -> None:
    """Print each event once, also where it comes between the list and the stream."""
    last = ""
    while True:
        with admin_client.followed(admin) as coming:
            for event in chain(admin_client.events(admin), coming):
                last = _print_new(event, last, write)
        time.sleep(AGAIN_AFTER_S)


def _print_new(event: Mapping[str, Any], last: str, write: Callable[[Mapping[str, Any]], str]) -> str:
    """The place of the last event printed: its time and number, which grow."""
    place = f"{event['time']} {event['id']:012}"
    if place > last:
        print(write(event), flush=True)
    return max(place, last)
