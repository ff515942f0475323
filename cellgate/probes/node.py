"""The common part of the probes of a node: their period, and the weight of their findings.

1. A bad report of the node itself (a status, NOT_SERVING, a refusal, a rule that matches) is strong, and
   fatal when there was no good one since the last: one may be an accident, two mean a node that cannot work.
2. A node that is late, unreachable or sends garbage is only suspected, because it may be busy.
3. Two probes of one node have different names, because only the source of a fatal report can clear it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import ClassVar, NamedTuple

from cellgate.probes.base import FetchError, PageGet, ProbeContext, Reply, Trouble
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

_NAME_MAX = 120
_REASON_MAX = 400

_BAD_REPORTS = "bad_reports"
"""Note: bad reports of the node in a row."""


class NodeState(Enum):
    """The result of one probe of a node."""

    GOOD = "good"
    BAD = "bad"
    """A bad report of the node itself."""
    DOUBT = "doubt"
    """Late, unreachable, cut short, garbage."""
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
    """Probes `context.node` every `period_s`: a NodePage or a NodeTalk."""

    kind: ClassVar[str]
    refusal: ClassVar[NodeState] = NodeState.BAD
    """The state that a refused connection means."""

    period_s: float = 1.0
    timeout_s: float = 3.0

    @property
    @abstractmethod
    def about(self) -> str:
        """The subject of this probe, to distinguish it from others of its kind."""

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

    def evidence(self, context: ProbeContext, said: NodeReport | FetchError) -> Evidence:
        """What a report is, or that there is none."""
        if isinstance(said, FetchError):
            said = NodeReport(self._state_of(said.trouble), str(said))
        node = context.node.name if context.node is not None else None
        return Evidence(
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


class NodePage(NodeProbe):
    """Reads one page of the node. A subclass defines its subject, which page, and what it reports."""

    __slots__ = ()

    @abstractmethod
    def page(self, context: ProbeContext) -> PageGet:
        """What to ask for."""

    @abstractmethod
    def report(self, context: ProbeContext, reply: Reply) -> NodeReport:
        """What the page says. Raises FetchError when it says nothing."""

    def read(self, context: ProbeContext, answer: Reply | FetchError) -> tuple[Evidence]:
        """One piece of evidence."""
        said: NodeReport | FetchError
        try:
            said = answer if isinstance(answer, FetchError) else self.report(context, answer)
        except FetchError as error:
            said = error
        return (self.evidence(context, said),)


class NodeTalk(NodeProbe):
    """Asks the node otherwise. A subclass defines its subject and its request."""

    __slots__ = ()

    @abstractmethod
    async def ask(self, context: ProbeContext) -> NodeReport:
        """One request, limited in time and bytes. Raises FetchError without an answer."""

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """One piece of evidence."""
        said: NodeReport | FetchError
        try:
            said = await self.ask(context)
        except FetchError as error:
            said = error
        yield self.evidence(context, said)


def _strength(context: ProbeContext, state: NodeState) -> Strength:
    """The weight of a report. Only a good one ends a row of bad ones."""
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
    """`text` may come from a server: it is made printable and cut."""
    text = text[:longest]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
