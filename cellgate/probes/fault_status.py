"""The fault status of an engine: which of its ranks it says are not healthy, while its `/health` says 200.

vLLM has it with `--enable-fault-tolerance`: `{"schema_version": 1, "total_engines": 1, "engines": [{"id": 0,
"status": "unhealthy", "fault_info": "RuntimeError"}]}`. Each API server tells of its own ranks only, so those
of other nodes are asked as well, where an HTTP probe of the node says at which address they are.

1. A rank that is unhealthy, dead or paused is a fatal fault of its unit: requests hang there.
2. That all ranks are healthy ends the fault and proves nothing: the status is a cache in the API server, and
   stays healthy when an engine hangs. A canary has to pass.
3. An engine that says it recovers stands still on purpose: its requests stay, for as long as a hold may last.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cellgate.probes.base import REST_SAME_S, Fetch, FetchError, Net, ProbeContext, is_in_use, rested_s
from cellgate.probes.engines import engine, parsed, short_text
from cellgate.probes.nodes import HttpProbe, split_url
from cellgate.router.nouns import (
    EnginePause,
    Evidence,
    Finding,
    HoldKind,
    RankFault,
    RankFaults,
    Sign,
    Strength,
    Unit,
    Verdict,
)

ASK_S = 0.5
"""The timeout of one question: the front end answers by itself."""
FAULT_RANKS_MAX = 64
"""So many ranks are looked at; an API server has one, mostly."""
SERVERS_MAX = 16
"""And so many API servers beside the leader's."""
_WELL = "healthy"
_RECOVERS = frozenset({"recovering", "retrying"})
DEAD = "dead"
FAULTY = frozenset({"unhealthy", DEAD, "paused"})
_INFO_CHARS = 80
_NOT_THERE = frozenset({404, 405, 501})

_SEEN = "seen"
"""Note: what was seen last."""


@dataclass(frozen=True, slots=True)
class FaultStatus:
    """Asks an engine that has the status every `period_s` while it is in use or not UP, else every `idle_s`;
    one that has it not again after `absent_s`.
    """

    name: ClassVar[str] = "fault_status"
    period_s: float = 1.0
    idle_s: float = 2.0
    absent_s: float = 60.0
    rest_s: float = 3600.0

    def limit_s(self, context: ProbeContext) -> float:
        """The timeouts of all questions."""
        return 2.0 * ASK_S * (1 + len(_followers(context.unit)))

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """Seldom, of an engine that is not known to have it; soon, while it is not known which one it is."""
        seen = _seen(context)
        if not context.engine:
            return last_at + self.period_s
        if seen.engine != context.engine:
            return last_at + (self.period_s if engine(context.engine).faults else self.rest_s)
        if not any(path for _, path in seen.paths):
            absent_s = self.absent_s if engine(context.engine).faults else self.rest_s
            return last_at + rested_s(context, context.fetch, last_at, absent_s, REST_SAME_S)
        is_urgent = is_in_use(context) or context.verdict is not Verdict.UP
        return last_at + (
            self.period_s if is_urgent else rested_s(context, context.fetch, last_at, self.idle_s)
        )

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """What the ranks say, if it is news or a fault."""
        before, now = _seen(context), context.now()
        if not engine(context.engine).faults:
            context.notes[_SEEN] = _Seen(context.engine, now)
            return
        paths, said = await _ask_all(context, dict(before.paths) if before.engine == context.engine else {})
        if said is None:
            return
        faults = tuple(fault for fault in said if fault.status in FAULTY)
        is_recovering = not faults and any(fault.status in _RECOVERS for fault in said)
        context.notes[_SEEN] = _Seen(context.engine, now, tuple(paths.items()), faults, is_recovering)
        if faults or before.faults:
            yield RankFaults(context.unit.name, faults)
            yield _evidence(context, self.name, paths[""] or "its fault status", faults)
        if is_recovering or before.is_recovering:
            kind = HoldKind.RECOVERING if is_recovering else None
            yield EnginePause(context.unit.name, kind, now, is_of_faults=True)


class _Seen(NamedTuple):
    """The path that each API server has (empty: none), for which engine, as of when; what its ranks said."""

    engine: str = ""
    at: float = 0.0
    paths: tuple[tuple[str, str], ...] = ()
    faults: tuple[RankFault, ...] = ()
    is_recovering: bool = False


def _evidence(context: ProbeContext, source: str, path: str, faults: tuple[RankFault, ...]) -> Evidence:
    unit, now = context.unit.name, context.now()
    if not faults:
        reason = f"GET {path}: all ranks are healthy again; a canary has to pass"
        return Evidence(unit, Sign.GOOD, Strength.WEAK, source, reason, now)
    reason = f"GET {path}: " + ", ".join(map(rank_words, faults[:3]))
    reason += f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Evidence(unit, Sign.BAD, Strength.FATAL, source, reason, now)


def rank_words(fault: RankFault) -> str:
    """`rank 1 is unhealthy (RuntimeError)`."""
    return f"rank {fault.rank} is {fault.status}" + (f" ({fault.info})" if fault.info else "")


def status_servers(unit: Unit, fetch: Fetch, net: Net) -> dict[str, Fetch]:
    """How the API server of each node is reached: by the node's name; the leader's has an empty one."""
    return {"": fetch} | {name: net.fetch(root) for name, root in _followers(unit)}


async def _ask_all(
    context: ProbeContext, paths: dict[str, str]
) -> tuple[dict[str, str], list[RankFault] | None]:
    """The path that each API server has, and what all ranks say; None: the leader's does not answer."""
    said: list[RankFault] = []
    for node, fetch in status_servers(context.unit, context.fetch, context.net).items():
        known = paths.get(node)
        try:
            path, ranks = await _ask(fetch, (known,) if known else engine(context.engine).faults)
        except FetchError:
            # Others say whether it lives. What its own ranks said last stands until it answers.
            if not node:
                return paths, None
            said += [fault for fault in _seen(context).faults if fault.node == node]
            continue
        paths[node] = path
        said += [fault._replace(node=node) for fault in ranks]
        if not node and not path:
            break
    return paths, said


async def _ask(fetch: Fetch, paths: tuple[str, ...]) -> tuple[str, list[RankFault]]:
    """The path that is there, empty if none is, and what it says. Raises FetchError."""
    for path in paths:
        reply = await fetch("GET", path, timeout_s=ASK_S)
        if reply.status == 200:
            return path, ranks_in(reply.body)
        if reply.status not in _NOT_THERE:
            return path, []
    return "", []


def ranks_in(page: bytes) -> list[RankFault]:
    """The ranks that are not healthy, as the page says. What has another shape says nothing."""
    return list(_ranks(parsed(page)))


def _ranks(found: object) -> Iterator[RankFault]:
    engines = found.get("engines") if isinstance(found, dict) else None
    for each in engines[:FAULT_RANKS_MAX] if isinstance(engines, list) else ():
        if not isinstance(each, dict) or not isinstance(status := each.get("status"), str):
            continue
        if status.lower() != _WELL:
            info = each.get("fault_info")
            words = short_text(info)[:_INFO_CHARS] if isinstance(info, str) else ""
            yield RankFault(short_text(str(each.get("id", "?")))[:_INFO_CHARS], status.lower(), words)


def _followers(unit: Unit) -> list[tuple[str, str]]:
    """The API servers of other nodes, by their HTTP probes: the node's name, and the server."""
    own, found = split_url(unit.url)[0], dict[str, str]()
    for node in unit.nodes:
        for probe in node.probes:
            if isinstance(probe, HttpProbe) and (root := split_url(probe.url)[0]) != own:
                found.setdefault(node.name, root)
    return list(found.items())[:SERVERS_MAX]


def _seen(context: ProbeContext) -> _Seen:
    seen: _Seen = context.notes.get(_SEEN, _Seen())
    return seen
