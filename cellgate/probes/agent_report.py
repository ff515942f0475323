"""Reads what the agent of a node reports beside its processes: `GET /report` (docs/agent.md).

It finds no evidence: proxy/control/stack_watch.py and rank_watch.py compare the reports. An agent that is
older, late, or says nonsense is asked again later, and that is all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, TypeVar

import orjson

from cellgate.probes.base import FetchError, ProbeContext
from cellgate.router.node_nouns import Behind, Communicator, NodeFacts, RankPlace
from cellgate.router.nouns import Finding, Verdict

T = TypeVar("T", int, str)

REPORT_BYTES = 256 << 10
NAMES_MAX = 256
COUNTERS_MAX = 1024
ADDRESSES_MAX = 64
COMMUNICATORS_MAX = 8
RANKS_MAX = 16
TEXT_MAX = 120

_TROUBLE = (Verdict.SUSPECT, Verdict.DOWN)

_NOT_BEFORE = "not before"
_ASKED = "asked"
"""Note: how often ranks were asked since the unit was last well."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Asks the agent at `address` (HOST:PORT) every `every_s`; one that has no reports every `absent_s`.

    While the unit is suspect or DOWN its ranks are asked, too: `rank_asks` times every `rank_s`, then as
    usual.
    """

    name: ClassVar[str] = "report"
    address: str
    token: str = field(default="", repr=False)
    every_s: float = 30.0
    absent_s: float = 600.0
    rank_s: float = 2.0
    rank_asks: int = 10
    timeout_s: float = 10.0

    def limit_s(self, _context: ProbeContext) -> float:
        """One request."""
        return self.timeout_s + 1.0

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """A period after the last one; soon while the unit is in trouble."""
        is_soon = context.verdict in _TROUBLE and context.notes.get(_ASKED, 0) < self.rank_asks
        not_before: float = context.notes.get(_NOT_BEFORE, last_at)
        return max(not_before, last_at + (self.rank_s if is_soon else self.every_s))

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """The report, if there is one."""
        of_ranks = context.verdict in _TROUBLE
        context.notes[_ASKED] = context.notes.get(_ASKED, 0) + 1 if of_ranks else 0
        fetch = context.net.fetch(f"http://{self.address}", token=self.token)
        target = "/report?ranks" if of_ranks else "/report"
        try:
            reply = await fetch("GET", target, timeout_s=self.timeout_s, max_bytes=REPORT_BYTES)
        except FetchError:
            return
        if reply.status != 200:
            context.notes[_NOT_BEFORE] = context.now() + (self.absent_s if reply.status == 404 else 0.0)
            return
        facts = _facts(context, _parsed(reply.body), of_ranks=of_ranks)
        if facts is not None:
            yield facts


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _facts(context: ProbeContext, said: dict[str, Any], *, of_ranks: bool) -> NodeFacts | None:
    if said.get("cellgate_agent") != 1 or context.node is None:
        return None
    counters = _texts(said.get("counters"), int, COUNTERS_MAX)
    addresses = (text for text in _items(said.get("addresses"), ADDRESSES_MAX) if isinstance(text, str))
    return NodeFacts(
        context.unit.name,
        context.node.name,
        context.now(),
        {name: _printable(text) for name, text in _texts(said.get("stack"), str, NAMES_MAX).items()},
        counters,
        frozenset(map(_printable, addresses)),
        _communicators(said.get("ranks")) if of_ranks else (),
        of_ranks,
    )


def _communicators(said: object) -> tuple[Communicator, ...]:
    """What its ranks say; nothing when any of it is not as the agent writes it."""
    try:
        return tuple(_communicator(comm) for comm in _items(said, COMMUNICATORS_MAX))
    except (KeyError, TypeError, ValueError, IndexError):
        return ()


def _communicator(comm: dict[str, Any]) -> Communicator:
    behind, missing, failed = (comm[key][:RANKS_MAX] for key in ("behind", "missing", "failed"))
    return Communicator(
        _printable(comm["id"]),
        _whole(comm["size"]),
        _whole(comm["launched"]),
        _whole(comm["behind_count"]),
        tuple(Behind(_place(row), _printable(row[3]), _whole(row[4]), _whole(row[5])) for row in behind),
        tuple((_place(row), bool(row[3])) for row in missing),
        tuple((_place(row), _whole(row[3])) for row in failed),
    )


def _place(row: list[Any]) -> RankPlace:
    return RankPlace(_whole(row[0]), _printable(row[1]), _whole(row[2]))


def _whole(said: object) -> int:
    """Raises TypeError for what is no whole number."""
    if not isinstance(said, int):
        raise TypeError(f"expected a whole number, found {said!r:.80}")
    return int(said)


def _items(said: object, most: int) -> list[Any]:
    return said[:most] if isinstance(said, list) else []


def _texts(said: object, kind: type[T], most: int) -> dict[str, T]:
    """Values of this kind by names that are safe for a log line; the rest is dropped."""
    pairs = islice(said.items(), most) if isinstance(said, dict) else ()
    return {_printable(name): value for name, value in pairs if isinstance(value, kind)}


def _printable(text: str) -> str:
    """Raises TypeError for what is no text."""
    return "".join(char if char.isprintable() else "?" for char in text[:TEXT_MAX])
