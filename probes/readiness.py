"""Readiness: what the leader says of itself at `/health`.

Its 200 is weak news: it proves the front end, not the engine behind it. Its 503 is believed more: an engine
that calls itself dead rarely errs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import ClassVar

from probes.base import FetchError, Patient, Trouble
from router.nouns import Evidence, Finding, Sign, Strength

_Weight = tuple[Sign, Strength]

_NOTHING: _Weight = (Sign.NEUTRAL, Strength.WEAK)
_STATUSES: dict[int, _Weight] = {
    200: (Sign.GOOD, Strength.WEAK),
    # Triton says "not ready" with a 400.
    400: (Sign.BAD, Strength.WEAK),
}
_TROUBLES: dict[Trouble, _Weight] = {
    Trouble.REFUSED: (Sign.BAD, Strength.FATAL),
    Trouble.UNREACHABLE: (Sign.BAD, Strength.WEAK),
    Trouble.TIMEOUT: (Sign.BAD, Strength.WEAK),
    Trouble.BROKEN: (Sign.BAD, Strength.WEAK),
    Trouble.OWN: _NOTHING,
}


@dataclass(frozen=True, slots=True)
class Readiness:
    """GET `path` every `period_s`.

    `timeout_s` (3) is so long because some engines generate a token before they answer: with it, slow
    answers alone stay below the rate that makes a busy unit suspect (5 in 10 s).
    """

    name: ClassVar[str] = "readiness"
    path: str = "/health"
    period_s: float = 1.0
    timeout_s: float = 3.0

    def limit_s(self, _patient: Patient) -> float:
        """One fetch."""
        return self.timeout_s

    def due_at(self, _patient: Patient, last_at: float) -> float:
        """One period after the last look."""
        return last_at + self.period_s

    async def look(self, patient: Patient) -> AsyncGenerator[Finding, None]:
        """One piece of evidence."""
        try:
            reply = await patient.fetch("GET", self.path, timeout_s=self.timeout_s)
        except FetchError as error:
            (sign, strength), said = _TROUBLES[error.trouble], str(error)
        else:
            (sign, strength), said = _weigh(reply.status), f"HTTP {reply.status}"
        reason = f"GET {self.path}: {said}"
        yield Evidence(patient.unit.name, sign, strength, self.name, reason, patient.now())


def _weigh(status: int) -> _Weight:
    if status >= 500:
        return Sign.BAD, Strength.STRONG
    # Anything else (no such path, not allowed) proves only that somebody is there.
    return _STATUSES.get(status, _NOTHING)
