"""`cellgate serve`: run the gate."""

from __future__ import annotations

import argparse
from functools import partial

from cellgate.proxy.cli.terminal import CommandError, add_file, add_settings, overrides
from cellgate.proxy.config.load_process import ConfigError, ConfigReader, read_settings


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and flags that override it."""
    add_file(parser, "the configuration (docs/configuration.md); flags override it")
    add_settings(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until the gate is told to end. Raises ConfigError and CommandError."""
    flags, path = overrides(args), args.file or args.config
    if path == "-":
        raise ConfigError(["-: a gate reads its file again when it is reloaded; give it a file"])
    reading = ConfigReader(path, flags)
    # Imported while the configuration is read.
    from cellgate.proxy.app import serve
    from cellgate.proxy.handover import NoInheritanceError

    settings = reading.settings()
    try:
        return serve(settings, partial(read_settings, path, flags))
    except NoInheritanceError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        where = f" on {error.filename}" if error.filename else ""
        raise CommandError(f"cannot listen{where}: {error.strerror or error}") from None
