"""Checks of names that other systems give: of a namespace, a cluster, a service."""

from __future__ import annotations

import re
from collections.abc import Callable

from cellgate.proxy.config.values import MisfitError


def word(expected: str) -> Callable[[object], str]:
    """The check for a word without spaces."""

    def check(found: object) -> str:
        if isinstance(found, str) and re.fullmatch(r"[!-~]{1,255}", found):
            return found
        raise MisfitError(expected)

    return check


def words(expected: str) -> Callable[[object], tuple[str, ...]]:
    """The check for a list of words."""

    def check(found: object) -> tuple[str, ...]:
        if isinstance(found, list) and found and all(isinstance(word, str) and word for word in found):
            return tuple(found)
        raise MisfitError(expected, f"did you mean [{found}]?" if isinstance(found, str) else "")

    return check
