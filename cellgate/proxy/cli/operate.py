"""`cellgate units`: the units of a running gate, once or whenever one changes.

In this order: `units_arguments`, `why_arguments`, `explain_arguments`, `drain_arguments`,
`engine_arguments`, `reload_arguments`, `events_arguments`, `poison_arguments`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.terminal import (
    CommandError,
    add_admin,
    add_unit,
    columns,
    explain_text,
    poison_table,
    shown,
    unit_rows,
    units_table,
    verdict,
    with_pages,
)
from cellgate.proxy.config.settings import Address

LOOK_EVERY_S = 1.0
_OPERATE_FORMS = ("table", "wide", "json")


def units_arguments(parser: argparse.ArgumentParser) -> None:
    """In which form, once or on and on, of which gate."""
    help_text = (
        "table, wide (weight, cache, engine and URL as well) or json (everything); default: %(default)s"
    )
    parser.add_argument(
        "-o", "--output", metavar="FORM", choices=_OPERATE_FORMS, default="table", help=help_text
    )
    as_json = "the same as -o json"
    parser.add_argument("--json", action="store_const", dest="output", const="json", help=as_json)
    parser.add_argument("--watch", action="store_true", help="then each unit that changes, until Ctrl-C")
    add_admin(parser)


def run_units(args: argparse.Namespace) -> int:
    """Print the units. Raises CommandError."""
    units = admin_client.units(args.admin)
    if args.output == "json" and not args.watch:
        print(json.dumps(units, indent=2))
    elif args.watch:
        with suppress(KeyboardInterrupt):
            _watch(args.admin, args.output, units)
    else:
        print(units_table(units, wide=args.output == "wide"))
        with suppress(CommandError):
            for each in admin_client.status(args.admin).get("troubles", ()):
                print(shown(f"{each['helper']}: {each['says']}"), file=sys.stderr)
    return 0


def _watch(admin: Address, form: str, units: Sequence[Mapping[str, Any]]) -> None:
    """All units; then a line for each whose verdict, or drain, or hold is another one."""
    rows = unit_rows(units, wide=form == "wide")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    known: dict[str, str] = {}
    lines = columns(rows[:1], widths) if form != "json" else []
    while True:
        changed = [unit for unit in units if known.get(unit["name"]) != verdict(unit)]
        lines += _lines(changed, form, widths)
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
        known, lines = {unit["name"]: verdict(unit) for unit in units}, []
        time.sleep(LOOK_EVERY_S)
        units = admin_client.units(admin)


def _lines(units: Sequence[Mapping[str, Any]], form: str, widths: Sequence[int]) -> list[str]:
    if form == "json":
        return [json.dumps(unit) for unit in units]
    return columns(unit_rows(units, wide=form == "wide")[1:], widths)


# `cellgate why`: why a unit is in or out of rotation, and what happens next.


def why_arguments(parser: argparse.ArgumentParser) -> None:
    add_unit(parser)
    parser.add_argument(
        "decoder", metavar="DECODER", nargs="?", help="explain the link from prefiller UNIT to this unit"
    )
    parser.add_argument("--json", action="store_true", help="all that the gate knows of it, as JSON")
    add_admin(parser)


def run_why(args: argparse.Namespace) -> int:
    """Print the gate's sentences. Raises CommandError."""
    try:
        found = admin_client.why(args.admin, args.name)
    except CommandError:
        # It may be a model. A gate that does not answer says so again.
        model = admin_client.why_model(args.admin, args.name)
        if model is None:
            raise
        found = model
    if args.decoder is not None:
        found = admin_client.link_of(found, args.name, args.decoder)
    print(
        json.dumps(found, indent=2)
        if args.json
        else with_pages("\n".join(shown(str(line)) for line in found["why"]))
    )
    return 0


# `cellgate explain`: where a request would go now, and its cost on each unit.


_OPERATE_ASKED = {
    "model": ("NAME", "the requested model; default: any"),
    "prompt_tokens": ("N", "the length of the prompt, none of it cached"),
    "session": ("NAME", "the session it belongs to"),
    "tenant": ("NAME", "the tenant, for fair sharing of the queue"),
    "priority": ("N", "the priority; lower goes first"),
    "ttft_ms": ("MS", "the deadline for the first token"),
}


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    """What is known of the request, and which gate is asked."""
    for name, (metavar, tells) in _OPERATE_ASKED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=tells)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    add_admin(parser)


def run_explain(args: argparse.Namespace) -> int:
    """Print the candidates. Raises CommandError."""
    asked = {name: getattr(args, name) for name in _OPERATE_ASKED}
    found = admin_client.explain(args.admin, {name: value for name, value in asked.items() if value})
    print(json.dumps(found, indent=2) if args.json else explain_text(found))
    return 0


# `cellgate drain` and `cellgate undrain`: a unit, all units of a cell, or the unit that is missed least.


_OPERATE_DONE = {
    "drain": "drained: no new requests, those in flight finish",
    "undrain": "no longer drained: gets requests as soon as its verdict allows",
}


def drain_arguments(parser: argparse.ArgumentParser) -> None:
    whom = parser.add_mutually_exclusive_group(required=True)
    whom.add_argument("names", metavar="UNIT", nargs="*", default=[], help="the units, by their names")
    whom.add_argument("--cell", metavar="CELL", help="all units of this cell")
    if parser.prog.endswith(" drain"):
        least = "the unit whose prefix cache is missed least, before there is one unit less"
        whom.add_argument("--least-valued", action="store_true", help=least)
        parser.add_argument("--model", metavar="NAME", help="with --least-valued: of the units of this model")
        until = "return when they have no request in flight any more"
        parser.add_argument("--wait", action="store_true", help=until)
    add_admin(parser)


def run_drain(args: argparse.Namespace) -> int:
    """Do it. Raises CommandError."""
    drained = args.command == "drain"
    if getattr(args, "least_valued", False):
        whom = admin_client.drain_least_valued(args.admin, args.model)
        units = [whom]
    elif args.cell is None:
        units = args.names
        for name in units:
            admin_client.set_drain(args.admin, name, drained=drained)
        whom = ", ".join(units)
    else:
        units = admin_client.set_cell_drain(args.admin, args.cell, drained=drained)
        whom = f"cell {args.cell} ({', '.join(units)})"
    print(f"{whom}: {_OPERATE_DONE[args.command]}", flush=True)
    if drained:
        if not args.least_valued:
            _warn_of_last(args.admin)
        if args.wait:
            _wait_until_empty(args.admin, units)
    return 0


def _wait_until_empty(admin: Address, names: Sequence[str]) -> None:
    """Return when these have no request in flight. Raises CommandError."""
    shown_last = -1
    while left := sum(unit["in_flight"] for unit in admin_client.units(admin) if unit["name"] in names):
        if left != shown_last:
            print(f"{left} in flight", flush=True)
            shown_last = left
        time.sleep(WAIT_S)
    print(f"{', '.join(names)}: nothing in flight", flush=True)


WAIT_S = 0.5
"""How often it is looked whether requests are left."""


def _warn_of_last(admin: Address) -> None:
    """Say that no unit is left that gets requests."""
    with suppress(CommandError, LookupError):
        units = admin_client.status(admin)["units"]
        if not any(unit["usable"] for unit in units):
            names = " ".join(unit["name"] for unit in units if unit["drained"])
            print(
                f"no unit is in rotation now: requests get 503; cellgate undrain {names} puts them back",
                file=sys.stderr,
            )


# `cellgate engine pause|resume|sleep|wake`: what the engine of a unit is told to do (docs/hold.md).


_CONDUCTED = {
    "pause": "drained and paused (mode {mode}); cellgate engine resume {unit} lets it go on",
    "sleep": "drained and asleep (mode {mode}); cellgate engine wake {unit} wakes it",
    "resume": "resumed and undrained; it gets requests once a canary has passed",
    "wake": "awake and undrained; it gets requests once a canary has passed",
}


def engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Which unit, of which gate; what becomes of its requests."""
    orders = parser.add_subparsers(dest="order", metavar="ORDER", required=True, help=", ".join(_CONDUCTED))
    for order in _CONDUCTED:
        below = orders.add_parser(order)
        add_unit(below)
        if order in ("pause", "sleep"):
            help_text = "what becomes of its requests: wait, abort, keep"
            below.add_argument("--mode", metavar="MODE", help=help_text)
        add_admin(below)


def run_engine(args: argparse.Namespace) -> int:
    """Have the engine do it. Raises CommandError."""
    mode = admin_client.act_on_engine(args.admin, args.name, args.order, getattr(args, "mode", None))
    print(f"{args.name}: " + _CONDUCTED[args.order].format(unit=args.name, mode=mode))
    return 0


# `cellgate reload`: a running gate reads its configuration again, or says what is wrong with it.


def reload_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin(parser)


def run_reload(args: argparse.Namespace) -> int:
    """Do it. Raises ConfigError with every mistake in the configuration, and CommandError."""
    print(f"configuration read again: {admin_client.reload(args.admin)}")
    return 0


# `cellgate events`: what happened to units, and what happens from now on.


AGAIN_AFTER_S = 1.0
"""When a gate is replaced, its stream ends, and its successor has another one."""


def events_arguments(parser: argparse.ArgumentParser) -> None:
    """Once or on and on, in which form, of which gate."""
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what happens, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    add_admin(parser)


def run_events(args: argparse.Namespace) -> int:
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


# `cellgate poison`: the prompts that are refused, and how to allow them again.


def poison_arguments(parser: argparse.ArgumentParser) -> None:
    """What is done, about which prompt, at which gate."""
    parser.add_argument("action", choices=["clear"], nargs="?", help="stop refusing them")
    parser.add_argument("fingerprint", metavar="FINGERPRINT", nargs="?", help="only this one")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    add_admin(parser)


def run_poison(args: argparse.Namespace) -> int:
    """List or clear. Raises CommandError."""
    if args.action == "clear":
        cleared = admin_client.clear_poison(args.admin, args.fingerprint)
        lines = [f"{name}: no longer refused" for name in cleared] or ["no prompt is refused"]
        print(*lines, sep="\n")
        return 0
    found = admin_client.poison(args.admin)
    print(json.dumps(found, indent=2) if args.json else poison_table(found))
    return 0
