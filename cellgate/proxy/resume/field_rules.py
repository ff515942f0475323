"""Which fields of a request let its stream be resumed, and how. Pure.

A table lists harmless fields, not harmful ones: an unknown field might mean anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.resume.eligible import AGAIN, OPEN, SAMPLED, is_deterministic


@dataclass(frozen=True)
class FieldRules:
    """The fields of one API: those that are harmless, those that are so with one of these values, of just
    this type, and those with which a unit that computes the whole answer again computes the same answer.
    """

    harmless: frozenset[str]
    only_as: Mapping[str, tuple[object, ...]]
    computed: frozenset[str]

    def ways_of(self, body: dict[str, Any]) -> int:
        """How the stream that `body` asks for may be resumed (eligible.py); 0: not at all."""
        if len(body) > LIMITS.fields:
            return 0
        ways = OPEN | AGAIN if is_deterministic(body) else OPEN
        for name in body.keys() - self.harmless:
            if not self._is_harmless(name, body[name]):
                ways &= AGAIN if name in self.computed else 0
        return ways

    def why_none(self, body: dict[str, Any]) -> str:
        """Why there is no way to resume the stream that `body` asks for."""
        if len(body) > LIMITS.fields:
            return f"the request has more than {LIMITS.fields} fields"
        harmful = [
            name for name in body if not (name in self.harmless or self._is_harmless(name, body[name]))
        ]
        for name in sorted(harmful, key=self.computed.__contains__):
            if name in self.computed:
                return f"the request has {name}, {SAMPLED}"
            return (
                f"the request has {name}" if name in self.only_as else f"the request has {name}, unknown here"
            )
        return "its input is not plain text"

    def _is_harmless(self, name: str, value: object) -> bool:
        # Compared and not serialised: a client may send values of any size and depth.
        return value is None or any(
            type(value) is type(each) and value == each for each in self.only_as.get(name, ())
        )
