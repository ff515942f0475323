"""What the probes of a node have in common: when they look, and how much what they find weighs.

1. The node's own bad report (a status, NOT_SERVING, a refusal, a rule that holds) is strong, and fatal when
   no good news came since the last one: one may be a slip, two are a node that cannot work.
2. A node that is late, out of reach or talks nonsense is suspicious and no more: busy is not sick.
3. Two probes of one node have different names, because only who said a fatal thing can take it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import ClassVar, NamedTuple

from cellgate.probes.base import FetchError, ProbeContext, Trouble
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

_NAME_MAX = 120
_REASON_MAX = 400

_BAD_REPORTS = "bad_reports"
"""Note: how often the node said that it is not well, since it last said that it is."""


class NodeState(Enum):
    """The result of one probe of a node."""

    GOOD = "good"
    BAD = "bad"
    """The node says so itself."""
    DOUBT = "doubt"
    """Late, out of reach, cut short, nonsense."""
    NOTHING = "nothing"
    """Nothing is learnt of the node."""


class NodeReport(NamedTuple):
    """The state of a node, and the reason in words."""

    state: NodeState
    reason: str


_SIGNS = {
    NodeState.GOOD: Sign.GOOD,
    NodeState.BAD: Sign.BAD,
    NodeState.DOUBT: Sign.BAD,
    NodeState.NOTHING: Sign.NEUTRAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe(ABC):
    """Looks at `context.node` every `period_s`. A new one says what it is about, and asks."""

    kind: ClassVar[str]
    refusal: ClassVar[NodeState] = NodeState.BAD
    """What a refused connection says of the node."""

    period_s: float = 1.0
    timeout_s: float = 3.0

    @property
    @abstractmethod
    def about(self) -> str:
        """What this probe looks at, to tell it from others of its kind."""

    @abstractmethod
    async def ask(self, context: ProbeContext) -> NodeReport:
        """One question, bounded in time and bytes. Raises FetchError when there is no answer."""

    @property
    def name(self) -> str:
        """The source of the evidence."""
        return _name(self.kind, self.about)

    def limit_s(self, _patient: ProbeContext) -> float:
        """One question."""
        return self.timeout_s

    def due_at(self, _patient: ProbeContext, last_at: float) -> float:
        """One period after the last look."""
        return last_at + self.period_s

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """One piece of evidence."""
        try:
            said = await self.ask(context)
        except FetchError as error:
            said = NodeReport(self._state_of(error.trouble), str(error))
        node = context.node.name if context.node is not None else None
        yield Evidence(
            context.unit.name,
            _SIGNS[said.state],
            _strength(context, said.state),
            self.name,
            _on_one_line(said.reason, _REASON_MAX),
            context.now(),
            node=node,
        )

    def _state_of(self, trouble: Trouble) -> NodeState:
        if trouble is Trouble.REFUSED:
            return self.refusal
        return NodeState.NOTHING if trouble is Trouble.OWN else NodeState.DOUBT


def _strength(context: ProbeContext, state: NodeState) -> Strength:
    """How much a report counts. Only a good one ends a row of bad ones."""
    if state is NodeState.GOOD:
        context.notes[_BAD_REPORTS] = 0
    if state is not NodeState.BAD:
        return Strength.WEAK
    context.notes[_BAD_REPORTS] = bad_reports(context) + 1
    return Strength.STRONG if bad_reports(context) == 1 else Strength.FATAL


def bad_reports(context: ProbeContext) -> int:
    """How many times in a row the node has reported that it is not well."""
    said: int = context.notes.get(_BAD_REPORTS, 0)
    return said


@lru_cache(16_384)
def _name(kind: str, about: str) -> str:
    return _on_one_line(f"{kind} {about}", _NAME_MAX)


def _on_one_line(text: str, longest: int) -> str:
    """Servers' own words may stand in `text`: nothing of them moves a terminal's cursor, or is endless."""
    text = text[:longest]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
