"""A parser of arguments that says in one line what is wrong, and what to do."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

WRONG = 2
"""The exit code of a wrong command, and of a wrong configuration."""


class CommandParser(argparse.ArgumentParser):
    """Takes flags by their whole names alone; exits with `WRONG` and one line."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """The line: what is wrong, what was probably meant, and where to read on."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        hint = near(unknown[1], flags) if unknown else ""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        hint = near(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else hint
        self.exit(WRONG, f"{self.prog}: {' '.join(message.split())}{hint}; see: {self.prog} --help\n")


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, where one of those known is near."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
