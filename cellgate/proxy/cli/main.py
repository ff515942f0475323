"""The command line: one table of commands. A module has the flags of its command and carries it out.

`serve` and `check` read the configuration, `agent` runs on a node of a unit, most others talk to a running
gate. Exit codes: 0 done, 1 it did not work, 2 the command or the configuration is wrong. A failure is one
line on stderr, a wrong configuration one line for each problem.

In this order: `CommandEntry`, `help_arguments`, `Flag`, `serve_arguments`.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from cellgate import VERSION
from cellgate.extras import EXTRAS, taken_out
from cellgate.proxy.cli.terminal import (
    WRONG,
    CommandError,
    CommandParser,
    actions_of,
    add_file,
    add_settings,
    admin_address,
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
    "agent": CommandEntry("watch the processes of one node of a unit", "probes.agent"),
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
    **_commands_of(*EXTRAS),
    "poison": CommandEntry(
        "list the prompts that are refused because they ended units", "proxy.cli.operate", "poison"
    ),
    "keys": CommandEntry("make a key for a client; add up what keys have used", "proxy.cli.keys", "keys"),
    "completion": CommandEntry("print the completions for a shell", "proxy.cli.main", "completion"),
    "help": CommandEntry("show these commands, or the flags of one", "proxy.cli.main", "help"),
    "version": CommandEntry("show the version", "proxy.cli.main", "version"),
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


# `cellgate completion`: completions of commands, flags and choices, for bash, zsh and fish.
#
# They are made of the parsers themselves, so that there is no second list of flags. Units and cells are those
# of the gate that the command would ask: a script calls `cellgate completion units` when they are wanted.


NAME_COLUMNS = {"units": "name", "cells": "cell"}
"""What a gate is asked for the names of, and where a unit of it has them."""
_COMMAND_KINDS = {"UNIT": "units", "DECODER": "units", "CELL": "cells"}
"""The metavars of arguments that are such names."""


class Flag(NamedTuple):
    """An option: its spellings, its help, whether it takes a value, and which values there are."""

    names: Sequence[str]
    does: str
    takes: bool
    choices: Sequence[str]
    kind: str = ""
    """The key of `NAMES` whose names are its values."""


class Words(NamedTuple):
    """What may follow a command."""

    flags: Sequence[Flag]
    choices: Sequence[str]
    kind: str = ""


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = (
        "source the output, or save it where it looks; units, cells: names at the gate, for such a script"
    )
    parser.add_argument("shell", choices=[*sorted(_SHELLS), *NAME_COLUMNS], help=help_text)


def run_completion(args: argparse.Namespace) -> int:
    """Print the script, or names. Raises CommandError."""
    if args.shell in NAME_COLUMNS:
        from cellgate.proxy.cli import admin_client  # Late: most commands need it not.

        found = admin_client.units(admin_address())
        print(*sorted({str(unit[NAME_COLUMNS[args.shell]]) for unit in found}), sep="\n")
        return 0
    print(*_SHELLS[args.shell]({name: _words(name) for name in COMMANDS}), sep="\n")
    return 0


def _words(name: str) -> Words:
    # Two orders of a command may have one flag.
    actions = {(*each.option_strings, each.dest): each for each in actions_of(parser_of(name))}.values()
    flags = [
        Flag(
            each.option_strings,
            (each.help or "").partition(";")[0],
            each.nargs != 0,
            _choices(each),
            _COMMAND_KINDS.get(str(each.metavar), ""),
        )
        for each in actions
        if each.option_strings
    ]
    places = [each for each in actions if not each.option_strings]
    kinds = [_COMMAND_KINDS[str(each.metavar)] for each in places if each.metavar in _COMMAND_KINDS]
    return Words(flags, [word for each in places for word in _choices(each)], "".join(kinds[:1]))


def _choices(action: argparse.Action) -> tuple[str, ...]:
    from cellgate.policies import POLICIES

    known: dict[object, Collection[str]] = {"POLICY": POLICIES, "COMMAND": COMMANDS}
    return tuple(known.get(action.metavar, tuple(map(str, action.choices or ()))))


def _asked(kind: str) -> str:
    """The call that a script makes for names."""
    return f"$(cellgate completion {kind} 2>/dev/null)"


def _bash(commands: Mapping[str, Words]) -> Iterator[str]:
    yield "_cellgate() {"
    yield "    local cur=${COMP_WORDS[COMP_CWORD]} words"
    yield '    case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in'
    yield f'        "1 "*) words="{" ".join(commands)}" ;;'
    for name, words in commands.items():
        for flag in words.flags:
            if flag.takes:
                for spelling in flag.names:
                    values = _asked(flag.kind) if flag.kind else " ".join(flag.choices)
                    yield f'        *" {name} {spelling}") words="{values}" ;;'
        spellings = [spelling for flag in words.flags for spelling in flag.names]
        names = [_asked(words.kind)] if words.kind else []
        yield f'        *" {name} "*) words="{" ".join([*spellings, *words.choices, *names])}" ;;'
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield "}"
    yield "complete -o default -F _cellgate cellgate"


def _zsh(commands: Mapping[str, Words]) -> Iterator[str]:
    yield "#compdef cellgate"
    yield "_cellgate() {"
    yield "    local -a commands=("
    yield from (f"        {_quoted(f'{name}:{COMMANDS[name].does}')}" for name in commands)
    yield "    )"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    local command=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $command in"
    for name, words in commands.items():
        rest = f"*:argument:{_zsh_values(words.choices, words.kind)}"
        specs = [_quoted(spec) for flag in words.flags for spec in _zsh_specs(flag)]
        yield f"        {name}) _arguments {' '.join([*specs, _quoted(rest)])} ;;"
    yield "    esac"
    yield "}"
    # Found in $fpath it is the function itself; sourced it has to be made known.
    yield 'if [[ $funcstack[1] == _cellgate ]]; then _cellgate "$@"; else compdef _cellgate cellgate; fi'


def _zsh_specs(flag: Flag) -> Iterator[str]:
    does = flag.does.replace("[", "(").replace("]", ")").replace(":", " ")
    value = f":value:{_zsh_values(flag.choices, flag.kind)}"
    yield from (f"*{spelling}[{does}]{value if flag.takes else ''}" for spelling in flag.names)


def _zsh_values(choices: Sequence[str], kind: str) -> str:
    if kind:
        return f"{{compadd -- {' '.join([*choices, _asked(kind)])}}}"
    return f"({' '.join(choices)})" if choices else "_files"


def _fish(commands: Mapping[str, Words]) -> Iterator[str]:
    for name, words in commands.items():
        yield (
            f"complete -c cellgate -f -n __fish_use_subcommand -a {name} -d {_quoted(COMMANDS[name].does)}"
        )
        here = f"complete -c cellgate -n {_quoted(f'__fish_seen_subcommand_from {name}')}"
        for flag in words.flags:
            spellings = " ".join(
                f"-l {spelling[2:]}" if spelling.startswith("--") else f"-s {spelling[1:]}"
                for spelling in flag.names
            )
            values = [*flag.choices, *_fish_names(flag.kind)]
            takes = f" -x -a {_quoted(' '.join(values))}" if values else " -r" if flag.takes else ""
            yield f"{here} {spellings}{takes} -d {_quoted(flag.does)}"
        if values := [*words.choices, *_fish_names(words.kind)]:
            yield f"{here} -f -a {_quoted(' '.join(values))}"


def _fish_names(kind: str) -> list[str]:
    return [_asked(kind).removeprefix("$")] if kind else []


def _quoted(text: str) -> str:
    """For all three shells: in single quotes, with none inside."""
    return "'" + text.replace("'", "’") + "'"


_SHELLS: dict[str, Callable[[Mapping[str, Words]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}


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
