"""`cellgate completion`: completions of commands, flags and choices, for bash, zsh and fish.

They are made of the parsers themselves, so that there is no second list of flags. Units and cells are those
of the gate that the command would ask: a script calls `cellgate completion units` when they are wanted.

In this order: `completion_arguments`, `run_completion`, `Flag`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from cellgate.policies import POLICIES
from cellgate.proxy.cli import admin_client
from cellgate.proxy.cli.main import COMMANDS, parser_of
from cellgate.proxy.cli.terminal import actions_of, admin_address

NAME_COLUMNS = {"units": "name", "cells": "cell"}
"""What a gate is asked for the names of, and where a unit of it has them."""
_COMMAND_KINDS = {"UNIT": "units", "DECODER": "units", "CELL": "cells"}
"""The metavars of arguments that are such names."""


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = (
        "source the output, or save it where it looks; units, cells: names at the gate, for such a script"
    )
    parser.add_argument("shell", choices=[*sorted(_SHELLS), *NAME_COLUMNS], help=help_text)


def run_completion(args: argparse.Namespace) -> int:
    """Print the script, or names. Raises CommandError."""
    if args.shell in NAME_COLUMNS:
        found = admin_client.units(admin_address())
        print(*sorted({str(unit[NAME_COLUMNS[args.shell]]) for unit in found}), sep="\n")
        return 0
    print(*_SHELLS[args.shell]({name: _words(name) for name in COMMANDS}), sep="\n")
    return 0


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
