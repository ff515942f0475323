"""The command line: one table of commands. A module has the flags of its command and carries it out.

`serve` and `check` read the configuration, `agent` runs on a node of a unit, most others talk to a running
gate. Exit codes: 0 done, 1 it did not work, 2 the command or the configuration is wrong. A failure is one
line on stderr, a wrong configuration one line for each problem.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from cellgate import VERSION
from cellgate.proxy.cli.command_error import CommandError
from cellgate.proxy.cli.parser import WRONG, CommandParser, near
from cellgate.proxy.config.load_process import ConfigError

FAILED = 1


class CommandEntry(NamedTuple):
    """What a command does, and where: in `cli/FILE_command.py`, or the module of that name.

    It is imported for this command alone, as most are quick.
    """

    does: str
    file: str


class _Module(Protocol):
    """What a module of the table has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Carries out the command; its name is `args.command`. Raises ConfigError and CommandError."""
        ...


COMMANDS = {
    "serve": CommandEntry("run the gate", "serve"),
    "check": CommandEntry("check a configuration: list every problem, or show its units", "check"),
    "schema": CommandEntry("print the JSON Schema of the configuration, for editors", "schema"),
    "agent": CommandEntry("watch the processes of one node of a unit", "cellgate.probes.agent"),
    "plan": CommandEntry("compute how much of a model fits into a unit", "plan"),
    "pair": CommandEntry("propose units from free nodes, by where these stand in the network", "pair"),
    "units": CommandEntry("list the units of a running gate with their verdicts", "units"),
    "top": CommandEntry("watch the units of a running gate, problems first", "top"),
    "events": CommandEntry("show what happened to units: verdicts and actions with reasons", "events"),
    "why": CommandEntry("explain why a unit is in or out of rotation, and what happens next", "why"),
    "explain": CommandEntry("show where a request would go now, and its cost on each unit", "explain"),
    "drain": CommandEntry("take a unit out of rotation; requests in flight finish", "drain"),
    "undrain": CommandEntry("put a drained unit back into rotation", "drain"),
    "reload": CommandEntry("have a running gate read its configuration again", "reload"),
    "pause": CommandEntry("drain a unit and pause its engine", "conduct"),
    "resume": CommandEntry("let a paused engine go on; a canary proves it, then it is undrained", "conduct"),
    "sleep": CommandEntry("drain a unit and put its engine to sleep", "conduct"),
    "wake": CommandEntry("wake a sleeping engine; a canary proves it, then it is undrained", "conduct"),
    "roll": CommandEntry("bring new software to all units, cell by cell, and back", "roll"),
    "poison": CommandEntry("list the prompts that are refused because they ended units", "poison"),
    "key": CommandEntry("make a key for a client", "key"),
    "usage": CommandEntry("add up what keys and tenants have used", "usage"),
    "completion": CommandEntry("print the completions for a shell", "completion"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name not in COMMANDS:
        return _no_command(words)
    args = parser_of(name).parse_args(words[1:], argparse.Namespace(command=name))
    try:
        code = int(_module(name).run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Buffered output must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConfigError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return WRONG
    except CommandError as error:
        print(f"cellgate: {error}", file=sys.stderr)
        return FAILED


def parser_of(name: str) -> CommandParser:
    """The arguments of a command."""
    does = COMMANDS[name].does
    parser = CommandParser(f"cellgate {name}", description=f"{does[0].upper()}{does[1:]}.")
    _module(name).add_arguments(parser)
    return parser


def _no_command(words: Sequence[str]) -> int:
    """Help, the version, or what is wrong."""
    lines = [f"  {name:<12}{command.does}" for name, command in COMMANDS.items()]
    parser = CommandParser(
        "cellgate",
        usage="cellgate COMMAND ...",
        description="A gate in front of inference units.",
        epilog="\n".join(["commands (each has --help):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cellgate {VERSION}")
    if words and not words[0].startswith("-"):
        parser.error(f"there is no command {words[0]!r}{near(words[0], COMMANDS)}")
    parser.parse_args(words)
    parser.error("no command is given")


def _module(name: str) -> _Module:
    file = COMMANDS[name].file
    return cast(_Module, import_module(file if "." in file else f"cellgate.proxy.cli.{file}_command"))
