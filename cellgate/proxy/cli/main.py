"""The command line: one table of commands. A module has the flags of its command and carries it out.

`serve` and `check` read the configuration, most others talk to a running gate. Exit codes: 0 done, 1 it did
not work, 2 the command or the configuration is wrong. A failure is one line on stderr, a wrong configuration
one line for each problem.

In this order: `CommandEntry`, `help_arguments`, `serve_arguments`.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from cellgate import VERSION
from cellgate.extras import EXTRAS, taken_out
from cellgate.proxy.cli.terminal import (
    WRONG,
    CommandError,
    CommandParser,
    add_file,
    add_settings,
    near,
    overrides,
    page_file,
    with_pages,
)
from cellgate.proxy.config.load_process import ConfigError, ConfigReader, read_settings

FAILED = 1
INTERRUPTED = 130
_NO_OUTPUT = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
"""What writing fails with where the reader, such as `head`, has gone, or the disk is full."""


class CommandEntry(NamedTuple):
    """What a command does, and where: `run_VERB` and `VERB_arguments` in a module below `cellgate`.

    The module is imported for this command alone, as most are quick. Without a verb they are `run` and
    `add_arguments`.
    """

    does: str
    module: str
    verb: str = ""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags of the command."""
        self._find("{}_arguments" if self.verb else "add_arguments")(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Carries out the command; its name is `args.command`. Raises ConfigError and CommandError."""
        return int(self._find("run_{}" if self.verb else "run")(args))

    def _find(self, form: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(f"cellgate.{self.module}"), form.format(self.verb))
        return found


def _commands_of(*extras: str) -> dict[str, CommandEntry]:
    """The commands of those extras that are here; a command is listed where it is first named."""
    here = [EXTRAS[name] for name in extras if name in EXTRAS]
    return {name: CommandEntry(*each) for extra in here for name, each in extra.commands.items()}


COMMANDS = {
    "serve": CommandEntry("run the gate", "proxy.cli.main", "serve"),
    **_commands_of("demo"),
    "check": CommandEntry(
        "check a configuration: list every problem, or show its units", "proxy.cli.check", "check"
    ),
    "schema": CommandEntry(
        "print the JSON Schema of the configuration, for editors", "proxy.cli.check", "schema"
    ),
    **_commands_of("agent"),
    "units": CommandEntry(
        "list the units of a running gate with their verdicts", "proxy.cli.operate", "units"
    ),
    **_commands_of("top"),
    "events": CommandEntry(
        "show what happened to units: verdicts and actions with reasons", "proxy.cli.operate", "events"
    ),
    "why": CommandEntry(
        "explain why a unit is in or out of rotation, or who serves a model", "proxy.cli.operate", "why"
    ),
    "explain": CommandEntry(
        "show where a request would go now, and its cost on each unit", "proxy.cli.operate", "explain"
    ),
    "drain": CommandEntry(
        "take a unit out of rotation; requests in flight finish", "proxy.cli.operate", "drain"
    ),
    "undrain": CommandEntry("put a drained unit back into rotation", "proxy.cli.operate", "drain"),
    "reload": CommandEntry("have a running gate read its configuration again", "proxy.cli.operate", "reload"),
    "engine": CommandEntry(
        "drain a unit and pause its engine or put it to sleep; let it go on", "proxy.cli.operate", "engine"
    ),
    **_commands_of("operator", "planner"),
    "poison": CommandEntry(
        "list the prompts that are refused because they ended units", "proxy.cli.operate", "poison"
    ),
    "keys": CommandEntry("make a key for a client; add up what keys have used", "proxy.cli.keys", "keys"),
    **_commands_of("completion"),
    "help": CommandEntry("show these commands, or the flags of one", "proxy.cli.main", "help"),
    "version": CommandEntry("show the version", "proxy.cli.main", "version"),
    **_commands_of(*EXTRAS),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    _open_what_is_closed()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NO_OUTPUT or error.filename is not None:
            raise
        # Buffered output must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"cellgate: the output cannot be written: {error.strerror}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _open_what_is_closed() -> None:
    """With `>&-` Python has no `sys.stdout`, and the first socket or file would get its number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115


def _run(words: Sequence[str]) -> int:
    name = words[0] if words else "help"
    if name not in COMMANDS:
        return _no_command(words)
    args = parser_of(name).parse_args(words[1:], argparse.Namespace(command=name))
    try:
        return COMMANDS[name].run(args)
    except ConfigError as error:
        print(*map(with_pages, error.problems), sep="\n", file=sys.stderr)
        return WRONG
    except CommandError as error:
        print(f"cellgate: {with_pages(str(error))}", file=sys.stderr)
        return FAILED


def parser_of(name: str) -> CommandParser:
    does = COMMANDS[name].does
    parser = CommandParser(f"cellgate {name}", description=f"{does[0].upper()}{does[1:]}.")
    COMMANDS[name].arguments(parser)
    return parser


def _no_command(words: Sequence[str]) -> int:
    """Help, the version, or what is wrong."""
    parser = _top_parser()
    if not words[0].startswith("-"):
        without = " and ".join(taken_out())
        more = f"; this gate is without the extra {without}, which may have it" if without else ""
        parser.error(f"there is no command {words[0]!r}{near(words[0], COMMANDS)}{more}")
    parser.parse_args(words)
    return 0


def _top_parser() -> CommandParser:
    lines = [f"  {name:<12}{command.does}" for name, command in COMMANDS.items()]
    parser = CommandParser(
        "cellgate",
        usage="cellgate COMMAND ...",
        description="A gate in front of inference units.",
        epilog="\n".join(
            ["commands (each has --help):", *lines, "", "pages: cellgate help README (docs/README.md)"]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cellgate {VERSION}")
    return parser


# `cellgate help` and `cellgate version`.


def help_arguments(parser: argparse.ArgumentParser) -> None:
    """Of which command, or which page."""
    words = "a command, or a page of docs/, such as redis, keys or runbooks/unit-down"
    parser.add_argument("of", metavar="COMMAND", nargs="?", help=words)


def run_help(args: argparse.Namespace) -> int:
    """Print it; for a call without a command, too. Raises CommandError."""
    if args.of in COMMANDS or not args.of:
        parser = parser_of(args.of) if args.of else _top_parser()
        parser.print_help()
        return 0
    page = page_file(args.of.removeprefix("docs/").removesuffix(".md"))
    if page is None:
        hint = near(args.of, COMMANDS)
        raise CommandError(f"help: there is no command and no page {args.of!r}{hint}; see: cellgate help")
    print(page.read_text(encoding="utf-8"), end="")
    return 0


def version_arguments(parser: argparse.ArgumentParser) -> None:
    """None: there is one version."""


def run_version(args: argparse.Namespace) -> int:  # noqa: ARG001
    print(f"cellgate {VERSION}")
    return 0


# `cellgate serve`: run the gate.


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
