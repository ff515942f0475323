"""What the values of a configuration that are about probing have to be (see proxy/config/checks.py)."""

from __future__ import annotations

import re

from cellgate.probes import NODE_PROBES
from cellgate.probes.engines import CANARIES, ENGINES
from cellgate.probes.exporter import PRESETS, RuleError, parse
from cellgate.proxy.config.checks import InvalidValueError, choice


def engine(found: object) -> str:
    """The name of an inference engine."""
    return choice("an engine", found, sorted(ENGINES))


def canary(found: object) -> str:
    """The API that a canary goes through."""
    return choice("a canary", found, sorted(CANARIES))


def probe(found: object) -> str:
    """The kind of a node's probe."""
    return choice("a probe", found, sorted(NODE_PROBES))


def preset(found: object) -> str:
    """The name of a preset of rules."""
    return choice("a preset", found, sorted(PRESETS))


def rule(found: object) -> str:
    """A rule on the samples of an exporter."""
    expected = 'a rule such as node_load1 > 100 or increase(errors_total{type="hardware"}) > 0'
    if not isinstance(found, str):
        raise InvalidValueError(expected)
    try:
        return parse(found).text
    except RuleError as error:
        raise InvalidValueError(expected, error.hint) from None


def service(found: object) -> str:
    """The name of a gRPC service, as its health service knows it."""
    if isinstance(found, str) and re.fullmatch(r"[!-~]{1,256}", found):
        return found
    raise InvalidValueError("a service name, such as inference.GRPCInferenceService")


def statuses(found: object) -> tuple[int, ...]:
    """HTTP statuses."""
    if not isinstance(found, list) or not found or not all(type(s) is int and 200 <= s <= 599 for s in found):
        hint = f"did you mean [{found}]?" if type(found) is int else ""
        raise InvalidValueError("a list of HTTP statuses from 200 to 599", hint)
    return tuple(found)
