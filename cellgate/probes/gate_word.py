"""The health of a unit as reported by the gate in front of it: replaces the canary for units of other gates.

That gate sends canaries, and this one reads the results in Redis. Only when there are none, or after a failed
request, is the gate itself probed, at its `/healthz/unit/NAME`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote

from cellgate.probes.base import FetchError, ProbeContext, Reply, Trouble
from cellgate.router.nouns import Evidence, Finding, Node, Role, Sign, Strength, Unit, Verdict

VIA_GATE = "cellgate"
"""The engine of a unit that is reached through another gate."""
GATE_EPOCHS = "epochs at its gate"
"""The reader of the epochs of such a unit: a number that restarts with each process of this gate."""


def via_gate(name: str) -> tuple[Node, ...]:
    """The node of a unit that is called `name` at its gate: it has no probes here."""
    return (Node(name, Role.LEADER),)


def name_there(unit: Unit) -> str:
    """The name of a unit at its gate; here it may have another name."""
    return unit.nodes[0].name


_Weight = tuple[Sign, Strength]

_BAD: _Weight = (Sign.BAD, Strength.STRONG)
_NOTHING: _Weight = (Sign.NEUTRAL, Strength.WEAK)
_TROUBLES: dict[Trouble, _Weight] = {
    Trouble.REFUSED: (Sign.BAD, Strength.FATAL),
    Trouble.UNREACHABLE: _BAD,
    Trouble.TIMEOUT: _BAD,
    Trouble.BROKEN: _BAD,
    Trouble.OWN: _NOTHING,
}
_NOT_USABLE = frozenset({404, 503})


@dataclass(frozen=True, slots=True)
class GateHealth:
    """Runs every `period_s`; for an UP unit only after `quiet_s` without progress.

    Its name is the canary's: it runs when a canary is wanted, and counts as one.
    """

    name: ClassVar[str] = "canary"
    period_s: float = 1.0
    quiet_s: float = 4.0
    timeout_s: float = 2.0

    def limit_s(self, _patient: ProbeContext) -> float:
        """One fetch."""
        return self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """A period after the last run; for an UP unit not while it makes progress."""
        due = last_at + self.period_s
        return max(due, context.life_at + self.quiet_s) if context.verdict is Verdict.UP else due

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """One piece of evidence."""
        path = f"/healthz/unit/{quote(name_there(context.unit), safe='')}"
        try:
            reply = await context.fetch("GET", path, timeout_s=self.timeout_s)
        except FetchError as error:
            (sign, strength), said = _TROUBLES[error.trouble], str(error)
        else:
            (sign, strength), said = _weigh(context, reply), f"HTTP {reply.status}"
        reason = f"GET {path} at its gate: {said}"
        yield Evidence(context.unit.name, sign, strength, self.name, reason, context.now())


def _weigh(context: ProbeContext, reply: Reply) -> _Weight:
    if reply.status in _NOT_USABLE:
        return _BAD
    if reply.status != 200:
        return _NOTHING
    # Its gate suspects it as well, or finds it slow: that does not clear it.
    if context.verdict is Verdict.SUSPECT and "x-envoy-degraded" in reply.headers:
        return _NOTHING
    return Sign.GOOD, Strength.STRONG
