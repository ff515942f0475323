"""`cellgate pair`: units from free nodes, so that each spans as few layers of the network as possible."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from cellgate.proxy.cli.command_error import CommandError
from cellgate.proxy.cli.tables import table
from cellgate.proxy.topology.node_files import read_nodes
from cellgate.proxy.topology.pairing import Pairing, pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which nodes, and how many make a unit."""
    parser.add_argument("file", metavar="FILE", help="where the free nodes stand; - reads standard input")
    parser.add_argument("--size", type=int, required=True, metavar="N", help="nodes of a unit")
    parser.add_argument("--json", action="store_true", help="the units as JSON")


def run(args: argparse.Namespace) -> int:
    """Propose units, and say what they cost. Raises CommandError."""
    if args.size < 1:
        raise CommandError("--size must be at least 1")
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text()
        pairing = pair(read_nodes(text), args.size)
    except OSError as error:
        raise CommandError(f"{args.file}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"{args.file}: {error}") from None
    print(_as_json(pairing) if args.json else _in_words(pairing))
    return 0


def _as_json(pairing: Pairing) -> str:
    units = [unit._asdict() for unit in pairing.units]
    return json.dumps({"units": units, "over": pairing.over, "span": pairing.span}, indent=2)


def _in_words(pairing: Pairing) -> str:
    rows = [["UNIT", "NODES", "UNDER", "SPAN", "GROUPS"]]
    for number, unit in enumerate(pairing.units, 1):
        under = "/".join(unit.under) or "nothing in common"
        rows.append([str(number), " ".join(unit.nodes), under, str(unit.span), str(unit.groups)])
    spans = Counter(unit.span for unit in pairing.units)
    how = ", ".join(f"{count} span {span} layers" for span, count in sorted(spans.items())) or "none"
    line = f"{len(pairing.units)} units: {how}; no other choice of units spans fewer layers in all"
    if pairing.over:
        line += f"\n{len(pairing.over)} nodes are left over: {' '.join(pairing.over)}"
    return f"{table(rows)}\n{line}"
