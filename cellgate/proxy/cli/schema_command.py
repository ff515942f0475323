"""`cellgate schema`: the JSON Schema of the configuration."""

from __future__ import annotations

import argparse
import json

from cellgate.proxy.config.json_schema import json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: there is one schema."""
    parser.epilog = "In an editor: # yaml-language-server: $schema=FILE at the top of the configuration."


def run(args: argparse.Namespace) -> int:  # noqa: ARG001
    """Print it."""
    print(json.dumps(json_schema(), indent=2))
    return 0
