"""`cellgate reload`: a running gate reads its configuration again, or says what is wrong with it."""

from __future__ import annotations

import argparse

from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.flags import add_admin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which gate."""
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    """Do it. Raises ConfigError with every mistake in the configuration, and CommandError."""
    print(f"configuration read again: {admin_client.reload(args.admin)}")
    return 0
