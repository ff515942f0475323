"""Checks of values about what is let in and shown: guardrail, pages of other sites, header lines."""

from __future__ import annotations

import re
from typing import get_args

from cellgate.proxy.config.settings import GuardrailAnswer, GuardrailFail, ShownTo
from cellgate.proxy.config.values import MisfitError, choice, page

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+", re.ASCII)


def shown_to(found: object) -> str:
    """Who gets header lines that tell of the gate's insides."""
    return choice("who gets them", found, get_args(ShownTo))


def guardrail_url(found: object) -> str:
    """Where a guardrail is asked: a page, or a Unix socket."""
    if isinstance(found, str) and found.startswith("unix:"):
        if not re.fullmatch(r"unix:///[!-~]+", found, re.ASCII):
            raise MisfitError("unix:///PATH of a socket")
        return found
    return page(found)


def guardrail_answer(found: object) -> str:
    """How a guardrail sees answers."""
    # YAML reads a bare off as false.
    return choice("how it sees answers", "off" if found is False else found, get_args(GuardrailAnswer))


def guardrail_fail(found: object) -> str:
    """What follows without a verdict."""
    return choice("what follows without a verdict", found, get_args(GuardrailFail))


def origins(found: object) -> tuple[str, ...]:
    """Origins of pages (RFC 6454), or `*` alone."""
    listed = isinstance(found, list) and bool(found) and all(isinstance(each, str) for each in found)
    if not listed or not all(each == "*" or _ORIGIN.fullmatch(each) for each in found):  # type: ignore[attr-defined]
        raise MisfitError('a list of origins like https://app.example.com, without a path, or ["*"]')
    return tuple(found)  # type: ignore[arg-type]
