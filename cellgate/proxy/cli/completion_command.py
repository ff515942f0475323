"""`cellgate completion`: completions of commands, flags and choices, for bash, zsh and fish.

They are made of the parsers themselves, so that there is no second list of flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cellgate.proxy.cli.commands import COMMANDS, parser_of


class Flag(NamedTuple):
    """An option: its spellings, its help, whether it takes a value, and which values there are."""

    names: Sequence[str]
    does: str
    takes: bool
    choices: Sequence[str]


class Words(NamedTuple):
    """What may follow a command."""

    flags: Sequence[Flag]
    choices: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For which shell."""
    parser.add_argument("shell", choices=sorted(_SHELLS), help="source the output, or save it where it looks")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(*_SHELLS[args.shell]({name: _words(name) for name in COMMANDS}), sep="\n")
    return 0


def _words(name: str) -> Words:
    actions = parser_of(name)._actions
    flags = [
        Flag(
            each.option_strings,
            (each.help or "").partition(";")[0],
            each.nargs != 0,
            tuple(each.choices or ()),
        )
        for each in actions
        if each.option_strings
    ]
    choices = [str(word) for each in actions if not each.option_strings for word in each.choices or ()]
    return Words(flags, choices)


def _bash(commands: Mapping[str, Words]) -> Iterator[str]:
    yield "_cellgate() {"
    yield "    local cur=${COMP_WORDS[COMP_CWORD]} words"
    yield '    case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in'
    yield f'        "1 "*) words="{" ".join(commands)}" ;;'
    for name, words in commands.items():
        for flag in words.flags:
            if flag.takes:
                for spelling in flag.names:
                    yield f'        *" {name} {spelling}") words="{" ".join(flag.choices)}" ;;'
        spellings = [spelling for flag in words.flags for spelling in flag.names]
        yield f'        *" {name} "*) words="{" ".join([*spellings, *words.choices])}" ;;'
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
        rest = f"*:argument:({' '.join(words.choices)})" if words.choices else "*:argument:_files"
        specs = [_quoted(spec) for flag in words.flags for spec in _zsh_specs(flag)]
        yield f"        {name}) _arguments {' '.join([*specs, _quoted(rest)])} ;;"
    yield "    esac"
    yield "}"
    # Found in $fpath it is the function itself; sourced it has to be made known.
    yield 'if [[ $funcstack[1] == _cellgate ]]; then _cellgate "$@"; else compdef _cellgate cellgate; fi'


def _zsh_specs(flag: Flag) -> Iterator[str]:
    does = flag.does.replace("[", "(").replace("]", ")").replace(":", " ")
    value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
    yield from (f"*{spelling}[{does}]{value if flag.takes else ''}" for spelling in flag.names)


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
            takes = (
                f" -x -a {_quoted(' '.join(flag.choices))}" if flag.choices else " -r" if flag.takes else ""
            )
            yield f"{here} {spellings}{takes} -d {_quoted(flag.does)}"
        if words.choices:
            yield f"{here} -f -a {_quoted(' '.join(words.choices))}"


def _quoted(text: str) -> str:
    """For all three shells: in single quotes, with none inside."""
    return "'" + text.replace("'", "’") + "'"


_SHELLS: dict[str, Callable[[Mapping[str, Words]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
