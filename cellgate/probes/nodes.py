"""The common part of the probes of a node: their period, and the weight of their findings.

1. A bad report of the node itself (a status, NOT_SERVING, a refusal, a rule that matches) is strong, and
   fatal when there was no good one since the last: one may be an accident, two mean a node that cannot work.
2. A node that is late, unreachable or sends garbage is only suspected, because it may be busy.
3. Two probes of one node have different names, because only the source of a fatal report can clear it.

In this order: `NodeProbe`, `HttpProbe`, `TcpProbe`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

from cellgate.probes.base import (
    FetchError,
    PageGet,
    ProbeContext,
    Reply,
    Trouble,
    keep_good,
    rested_s,
    said_before,
)
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

_NAME_MAX = 120
_NODE_REASON_MAX = 400

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

    def limit_s(self, _context: ProbeContext) -> float:
        return self.timeout_s

    def due_at(self, _context: ProbeContext, last_at: float) -> float:
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
            _on_one_line(said.reason, _NODE_REASON_MAX),
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

    def read(self, context: ProbeContext, answer: Reply | FetchError) -> tuple[Evidence, ...]:
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


KNOWN = 16_384
"""The number of parsed URLs that are kept."""
_TOO_MANY_REQUESTS = 429

_PAGE_NOTE = "page"
"""Note: what to ask for."""


@dataclass(frozen=True, slots=True)
class HttpProbe(NodePage):
    """GET `url`; good are the statuses 200 to 299.

    A redirect is not followed, because it may lead to another machine. Busy (429) is neutral.
    """

    kind: ClassVar[str] = "http"
    url: str

    @property
    def about(self) -> str:
        """The page; not its query, which may hold a secret."""
        return page_name(self.url)

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """One period after the last look; later while its unit rests."""
        page: PageGet | None = context.notes.get(_PAGE_NOTE)
        pause_s = self.period_s
        return last_at + (pause_s if page is None else rested_s(context, page.fetch, last_at, pause_s))

    def page(self, context: ProbeContext) -> PageGet:
        page: PageGet | None = context.notes.get(_PAGE_NOTE)
        if page is None:
            root, target = split_url(self.url)
            context.notes[_PAGE_NOTE] = page = PageGet(context.net.fetch(root), target, self.timeout_s)
        if context.is_calm and not page.fetch.is_held and context.rest(context.now()) > 1.0:
            page.fetch.hold(context.wake)
        return page

    def read(self, context: ProbeContext, answer: Reply | FetchError) -> tuple[Evidence, ...]:
        """One piece of evidence. The same good reply is the same evidence, but for its time: nothing, where
        that changes nothing.
        """
        if (known := said_before(context, answer)) is not None:
            return known
        (evidence,) = NodePage.read(self, context, answer)
        keep_good(context, answer, evidence)
        return (evidence,)

    def report(self, _context: ProbeContext, reply: Reply) -> NodeReport:
        """The result of the page's status."""
        if 200 <= reply.status < 300:
            return NodeReport(NodeState.GOOD, f"HTTP {reply.status}")
        if reply.status == _TOO_MANY_REQUESTS:
            return NodeReport(NodeState.NOTHING, f"busy, HTTP {reply.status}")
        return NodeReport(NodeState.BAD, _explain(reply))


def _explain(reply: Reply) -> str:
    if 300 <= reply.status < 400 and "location" in reply.headers:
        where = reply.headers["location"][:100]
        return f"HTTP {reply.status} redirects to {where}, which is not followed; configure the final URL"
    return f"HTTP {reply.status}"


@lru_cache(KNOWN)
def page_name(url: str) -> str:
    """`HOST:PORT/PATH` of a URL."""
    parts = urlsplit(url)
    return f"{parts.netloc}{parts.path}"


@lru_cache(KNOWN)
def split_url(url: str) -> tuple[str, str]:
    """`http://HOST:PORT/PATH?QUERY` as (`http://HOST:PORT`, `/PATH?QUERY`)."""
    parts = urlsplit(url)
    target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    return f"{parts.scheme}://{parts.netloc}", target


@dataclass(frozen=True, slots=True)
class TcpProbe(NodeTalk):
    """Connects to `address` (HOST:PORT), sends nothing and closes.

    It proves a listening process, not a working one: the kernel accepts for a process that is blocked.
    """

    kind: ClassVar[str] = "tcp"
    address: str

    @property
    def about(self) -> str:
        return self.address

    async def ask(self, context: ProbeContext) -> NodeReport:
        """Whether the address accepts."""
        transport, _ = await context.net.connect(self.address, asyncio.Protocol, timeout_s=self.timeout_s)
        transport.abort()
        return NodeReport(NodeState.GOOD, "it accepts connections")
