"""HTTP: a page of the node answers with a good status."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar
from urllib.parse import urlsplit

from cellgate.probes.base import FetchError, PageGet, ProbeContext, Reply
from cellgate.probes.node import NodePage, NodeReport, NodeState
from cellgate.router.nouns import Evidence, Sign

KNOWN = 16_384
"""The number of parsed URLs that are kept."""
_BUSY = 429

_PAGE = "page"
"""Note: what to ask for."""
_LAST = "last"
"""Note: the last reply and the evidence that it was, if that was good."""


@dataclass(frozen=True, slots=True)
class HttpProbe(NodePage):
    """GET `url`; good are the statuses in `expect`, or, when there are none, 200 to 299.

    A redirect is not followed, because it may lead to another machine. Busy (429) is neutral.
    """

    kind: ClassVar[str] = "http"
    url: str
    expect: tuple[int, ...] = ()

    @property
    def about(self) -> str:
        """The page; not its query, which may hold a secret."""
        return page_name(self.url)

    def page(self, context: ProbeContext) -> PageGet:
        """The URL."""
        page: PageGet | None = context.notes.get(_PAGE)
        if page is None:
            root, target = split_url(self.url)
            context.notes[_PAGE] = page = PageGet(context.net.fetch(root), target, self.timeout_s)
        return page

    def read(self, context: ProbeContext, answer: Reply | FetchError) -> tuple[Evidence]:
        """One piece of evidence. The same good reply is the same evidence, but for its time."""
        reply, good = context.notes.get(_LAST) or (None, None)
        if good is not None and answer is reply:
            evidence = Evidence(
                good.unit,
                good.sign,
                good.strength,
                good.source,
                good.reason,
                context.now(),
                node=good.node,
            )
        else:
            (evidence,) = NodePage.read(self, context, answer)
            context.notes[_LAST] = (answer, evidence) if evidence.sign is Sign.GOOD else None
        return (evidence,)

    def report(self, _context: ProbeContext, reply: Reply) -> NodeReport:
        """The result of the page's status."""
        good = reply.status in self.expect if self.expect else 200 <= reply.status < 300
        if good:
            return NodeReport(NodeState.GOOD, f"HTTP {reply.status}")
        if reply.status == _BUSY:
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
