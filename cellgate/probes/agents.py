"""The gate's side of `cellgate agent`: one connection per node, held for as long as it lasts.

1. The state of processes is believed at once; an agent that cannot be reached is only a suspicion.
2. Each change is reported once: the same state after a reconnect, or a heartbeat, is not a change.
3. A missing heartbeat counts only if this gate was reading meanwhile: a gate that was blocked reads first.

In this order: `AgentLink`, `AgentReport`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, TypeVar

import orjson

from cellgate.probes.agent_stream import AgentLostError, AgentMessage, AgentStream, NotAnAgentError
from cellgate.probes.base import FetchError, ProbeContext, Trouble
from cellgate.router.nouns import (
    AGENT,
    Behind,
    Communicator,
    Evidence,
    Finding,
    NodeFacts,
    RankPlace,
    Sign,
    Strength,
    Verdict,
)

# What an agent does. Its program is one file that imports nothing of a gate, and has these as well.
LOOK_S = 0.1
"""An agent looks at its processes so often."""
BEAT_S = 0.25
PRESSURE = 0.9
"""The share of its limit of open files from which on a process is about to fail."""
TOKEN_VARIABLE = "CELLGATE_AGENT_TOKEN"
SILENCE_S = 3 * BEAT_S

_Weight = tuple[Sign, Strength]

_SAYS_NOTHING: _Weight = (Sign.NEUTRAL, Strength.WEAK)
_UNREACHABLE: _Weight = (Sign.BAD, Strength.STRONG)
# The states that an agent reports, and their weight; an unknown state is that of a newer agent.
_STATES: dict[str, _Weight] = {
    "ok": (Sign.GOOD, Strength.WEAK),
    "absent": _SAYS_NOTHING,
    "gone": (Sign.BAD, Strength.FATAL),
    "zombie": (Sign.BAD, Strength.FATAL),
    "stopped": (Sign.BAD, Strength.FATAL),
    "blocked": (Sign.BAD, Strength.STRONG),
}
_PRESSED_PERIOD_S = 1.0
_UNREACHABLE_PERIOD_S = 10.0
_FAILURES_MAX = 16

_REPORTED = "reported"
"""Note: the state, reason and epoch that were reported last; absent before the first."""
_PRESSED_AT = "pressed at"
_LOST_AT = "lost at"
"""Note: since when the agent cannot be reached; absent while it can."""
_SAID_AT = "said at"
"""Note: when that was last reported."""
_FAILURES = "failures"
"""Note: failed connections in a row."""
_NOT_BEFORE = "not before"
_CONNECTED = "connected"


def is_connected(notes: Mapping[str, Any]) -> bool:
    """Whether an agent is connected, from the notes of its probe."""
    return bool(notes.get(_CONNECTED))


@dataclass(frozen=True, slots=True)
class AgentLink:
    """Follows the agent at `address` (HOST:PORT), with `token`; one run lasts as long as the connection.

    After a loss it reconnects after `pause_s`, doubled with each failure up to `pause_max_s`; after
    `stranger_s` when another program answers there.
    """

    name: ClassVar[str] = AGENT
    address: str
    token: str = field(default="", repr=False)
    connect_timeout_s: float = 1.0
    pause_s: float = 0.25
    pause_max_s: float = 2.0
    stranger_s: float = 30.0

    def limit_s(self, _context: ProbeContext) -> float:
        """No limit: the link itself notices a missing heartbeat."""
        return math.inf

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """When the pause after the last failure is over."""
        not_before: float = context.notes.get(_NOT_BEFORE, -math.inf)
        return max(last_at + self.pause_s, not_before)

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """The agent's reports until it is lost, and then the reason."""
        stream = AgentStream(context.received, SILENCE_S)
        ending: Evidence | None
        try:
            async with context.net.follow(
                self.address, "/watch", stream, token=self.token, timeout_s=self.connect_timeout_s
            ):
                async for message in stream:
                    for evidence in self._hear(context, message):
                        yield evidence
        except (FetchError, AgentLostError) as error:
            ending = self._fail(context, error)
        except NotAnAgentError as error:
            ending = self._shun(context, error)
        finally:
            context.notes[_CONNECTED] = False
            stream.close()
        if ending is not None:
            yield ending

    def _hear(self, context: ProbeContext, message: AgentMessage) -> list[Evidence]:
        """The changes in a message."""
        notes, found = context.notes, []
        notes[_CONNECTED] = True
        notes.pop(_LOST_AT, None)
        notes[_FAILURES] = 0
        sign, strength = _STATES.get(message.state, _SAYS_NOTHING)
        # A good report is the same when only the name of a process changes.
        news = (message.state, "" if sign is Sign.GOOD else message.reason, message.epoch)
        if notes.get(_REPORTED) != news:
            epoch = message.epoch if sign is Sign.GOOD else None
            found.append(self._evidence(context, (sign, strength), message.reason, epoch))
            notes[_REPORTED] = news
        pressed = sign is Sign.GOOD and message.open_files >= PRESSURE
        if pressed and context.now() - notes.get(_PRESSED_AT, -math.inf) >= _PRESSED_PERIOD_S:
            reason = f"a process has {message.open_files:.0%} of its file descriptors in use"
            found.append(self._evidence(context, (Sign.BAD, Strength.WEAK), reason))
            notes[_PRESSED_AT] = context.now()
        return found

    def _fail(self, context: ProbeContext, error: FetchError | AgentLostError) -> Evidence | None:
        """A loss is bad evidence once; later reports of the same loss are neutral."""
        notes, now = context.notes, context.now()
        notes[_FAILURES] = failures = min(notes.get(_FAILURES, 0) + 1, _FAILURES_MAX)
        notes[_NOT_BEFORE] = now + min(self.pause_s * 2 ** (failures - 1), self.pause_max_s)
        if _STATES.get(notes.get(_REPORTED, ("",))[0], _SAYS_NOTHING)[0] is not Sign.BAD:
            # The next connection reports a good state again, but not a bad one that was reported before.
            notes.pop(_REPORTED, None)
        if isinstance(error, FetchError) and error.trouble is Trouble.OWN:
            return self._evidence(context, _SAYS_NOTHING, f"agent {self.address} not asked: {error}")
        since = notes.get(_LOST_AT)
        if since is not None and now - notes[_SAID_AT] < _UNREACHABLE_PERIOD_S:
            return None
        notes[_SAID_AT] = now
        if since is None:
            notes[_LOST_AT] = now
            reason = f"agent {self.address} unreachable: {error}"
            return replace(self._evidence(context, _UNREACHABLE, reason), is_unseen=True)
        lasts = f"agent {self.address} unreachable for {now - since:.0f} s: {error}"
        return self._evidence(context, _SAYS_NOTHING, lasts)

    def _shun(self, context: ProbeContext, error: NotAnAgentError) -> Evidence:
        """A wrong address or token is a fault of the configuration: neutral evidence."""
        context.notes[_NOT_BEFORE] = context.now() + self.stranger_s
        if error.status == 401 and self.token:
            reason = f"agent {self.address} does not accept the token of this gate ({TOKEN_VARIABLE})"
        elif error.status == 401:
            reason = f"agent {self.address} requires a token: set {TOKEN_VARIABLE} for this gate"
        elif error.status == 503:
            reason = f"agent {self.address} accepts no more connections: {error}"
        else:
            reason = f"{self.address} is not a cellgate agent: {error}"
        return self._evidence(context, _SAYS_NOTHING, reason)

    def _evidence(
        self, context: ProbeContext, weight: _Weight, reason: str, epoch: str | None = None
    ) -> Evidence:
        node = context.node.name if context.node is not None else None
        unit, now = context.unit.name, context.now()
        return Evidence(unit, *weight, self.name, reason, now, epoch=epoch or None, node=node)


# Reads what the agent of a node reports beside its processes: `GET /report` (docs/agent.md).
#
# It finds no evidence: proxy/control/comparisons.py compares the reports. An agent that is
# older, late, or says nonsense is asked again later, and that is all.


T = TypeVar("T", int, str)

REPORT_BYTES = 256 << 10
AGENT_PROBE_NAMES_MAX = 256
COUNTERS_MAX = 1024
ADDRESSES_MAX = 64
COMMUNICATORS_MAX = 8
RANKS_MAX = 16
AGENT_PROBE_TEXT_MAX = 120

_TROUBLE = (Verdict.SUSPECT, Verdict.DOWN)

_ASKED_NOTE = "asked"
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
        is_soon = context.verdict in _TROUBLE and context.notes.get(_ASKED_NOTE, 0) < self.rank_asks
        not_before: float = context.notes.get(_NOT_BEFORE, last_at)
        return max(not_before, last_at + (self.rank_s if is_soon else self.every_s))

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """The report, if there is one."""
        of_ranks = context.verdict in _TROUBLE
        context.notes[_ASKED_NOTE] = context.notes.get(_ASKED_NOTE, 0) + 1 if of_ranks else 0
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
        {
            name: _printable(text)
            for name, text in _texts(said.get("stack"), str, AGENT_PROBE_NAMES_MAX).items()
        },
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
    return "".join(char if char.isprintable() else "?" for char in text[:AGENT_PROBE_TEXT_MAX])
