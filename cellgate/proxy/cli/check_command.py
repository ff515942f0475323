"""`cellgate check`: every problem of a configuration, or its units and how soon each fault is found."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cellgate.proxy.cli.detection_table import times_text
from cellgate.proxy.cli.flags import add_settings, overrides
from cellgate.proxy.cli.parser import WRONG
from cellgate.proxy.cli.tables import fleet_table
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.detection_bounds import kinds, rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, flags that override it, and the form of the answer."""
    file = parser.add_mutually_exclusive_group()
    file.add_argument("file", metavar="FILE", nargs="?", help="the configuration; -: from standard input")
    file.add_argument("-c", dest="config", metavar="FILE", help="the same, as `serve` takes it")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Print what the gate would make of it. Raises ConfigError, but with --json prints that too."""
    path = args.file or args.config
    try:
        settings = load(path, overrides(args))
        _check_redis(settings)
    except ConfigError as error:
        if not args.json:
            raise
        print(json.dumps({"valid": False, "problems": error.problems}, indent=2))
        return WRONG
    if args.json:
        print(json.dumps(_as_json(settings), indent=2))
        return 0
    where = f"listens on {settings.listen}, admin on {settings.admin}"
    print(f"{path or 'flags'}: valid; {where}, policy {settings.policy}")
    if settings.sources:
        print("more units are discovered from:", ", ".join(source.title for source in settings.sources))
    print(fleet_table(settings.fleet), times_text(settings.fleet, settings.rules), sep="\n\n")
    return 0


def _check_redis(settings: Settings) -> None:
    """Raises ConfigError for a URL that a gate would serve without."""
    if settings.redis is None:
        return
    from cellgate.proxy.sharing.connect import connector  # Late: it takes long, and most have none.

    try:
        connector(settings.redis)
    except ValueError as error:
        raise ConfigError([f"redis: {error}"]) from None


def _as_json(settings: Settings) -> dict[str, Any]:
    """What the tables show. `found_within`: seconds from a fault until the unit is out."""
    found = kinds(settings.fleet.units)
    return {
        "valid": True,
        "problems": [],
        "listen": str(settings.listen),
        "admin": str(settings.admin),
        "policy": settings.policy,
        "sources": [source.title for source in settings.sources],
        "units": [
            {
                "name": unit.name,
                "cell": unit.cell,
                "url": unit.url,
                "weight": unit.weight,
                "max_in_flight": unit.max_in_flight,
                "models": unit.models,
                "nodes": [{"name": node.name, "role": node.role.value} for node in unit.nodes],
            }
            for unit in settings.fleet.units
        ],
        "found_within": [
            {"units": names, "faults": [bound._asdict() for bound in rows(kind, settings.rules)]}
            for kind, names in found.items()
        ],
    }
