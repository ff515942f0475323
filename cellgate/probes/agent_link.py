"""The gate's side of `cellgate agent`: one connection per node, held for as long as it lasts.

1. The state of processes is believed at once; an agent that cannot be reached is only a suspicion.
2. Each change is reported once: the same state after a reconnect, or a heartbeat, is not a change.
3. A missing heartbeat counts only if this gate was reading meanwhile: a gate that was blocked reads first.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from cellgate.probes.agent import BEAT_S, PRESSURE, TOKEN_VARIABLE
from cellgate.probes.agent_stream import AgentLostError, AgentMessage, AgentStream, NotAnAgentError
from cellgate.probes.base import FetchError, ProbeContext, Trouble
from cellgate.router.node_nouns import AGENT
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

SILENCE_S = 3 * BEAT_S

_Weight = tuple[Sign, Strength]

_NOTHING: _Weight = (Sign.NEUTRAL, Strength.WEAK)
_UNREACHABLE: _Weight = (Sign.BAD, Strength.STRONG)
# The states that an agent reports, and their weight; an unknown state is that of a newer agent.
_STATES: dict[str, _Weight] = {
    "ok": (Sign.GOOD, Strength.WEAK),
    "absent": _NOTHING,
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
_LOSSES = "losses"
"""Note: connections that were lost or failed, so far."""


class AgentState(NamedTuple):
    """The state of one agent: whether it is connected, and how many connections were lost or failed."""

    connected: bool
    losses: int


def agent_state(notes: Mapping[str, Any]) -> AgentState:
    """The same, from the notes of the probe."""
    return AgentState(notes.get(_CONNECTED, False), notes.get(_LOSSES, 0))


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

    def limit_s(self, _patient: ProbeContext) -> float:
        """No limit: the link itself notices a missing heartbeat."""
        return math.inf

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """When the pause after the last failure is over."""
        not_before: float = context.notes.get(_NOT_BEFORE, -math.inf)
        return max(last_at + self.pause_s, not_before)

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """The agent's reports until it is lost, and then the reason."""
        stream = AgentStream(context.heard, SILENCE_S)
        ending: Evidence | None
        try:
            async with context.net.follow(
                self.address, "/watch", stream, token=self.token, timeout_s=self.connect_timeout_s
            ):
                async for message in stream:
                    for evidence in self._hear(context, message):
                        yield evidence
        except (FetchError, AgentLostError) as error:
            ending = self._lose(context, error)
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
        sign, strength = _STATES.get(message.state, _NOTHING)
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

    def _lose(self, context: ProbeContext, error: FetchError | AgentLostError) -> Evidence | None:
        """A loss is bad evidence once; later reports of the same loss are neutral."""
        notes, now = context.notes, context.now()
        notes[_FAILURES] = failures = min(notes.get(_FAILURES, 0) + 1, _FAILURES_MAX)
        notes[_NOT_BEFORE] = now + min(self.pause_s * 2 ** (failures - 1), self.pause_max_s)
        if _STATES.get(notes.get(_REPORTED, ("",))[0], _NOTHING)[0] is not Sign.BAD:
            # The next connection reports a good state again, but not a bad one that was reported before.
            notes.pop(_REPORTED, None)
        if isinstance(error, FetchError) and error.trouble is Trouble.OWN:
            return self._evidence(context, _NOTHING, f"agent {self.address} not asked: {error}")
        notes[_LOSSES] = notes.get(_LOSSES, 0) + 1
        since = notes.get(_LOST_AT)
        if since is not None and now - notes[_SAID_AT] < _UNREACHABLE_PERIOD_S:
            return None
        notes[_SAID_AT] = now
        if since is None:
            notes[_LOST_AT] = now
            return self._evidence(context, _UNREACHABLE, f"agent {self.address} unreachable: {error}")
        lasts = f"agent {self.address} unreachable for {now - since:.0f} s: {error}"
        return self._evidence(context, _NOTHING, lasts)

    def _shun(self, context: ProbeContext, error: NotAnAgentError) -> Evidence:
        """A wrong address or token is a fault of the configuration: neutral evidence."""
        context.notes[_NOT_BEFORE] = context.now() + self.stranger_s
        context.notes[_LOSSES] = context.notes.get(_LOSSES, 0) + 1
        if error.status == 401 and self.token:
            reason = f"agent {self.address} does not accept the token of this gate ({TOKEN_VARIABLE})"
        elif error.status == 401:
            reason = f"agent {self.address} requires a token: set {TOKEN_VARIABLE} for this gate"
        elif error.status == 503:
            reason = f"agent {self.address} accepts no more connections: {error}"
        else:
            reason = f"{self.address} is not a cellgate agent: {error}"
        return self._evidence(context, _NOTHING, reason)

    def _evidence(
        self, context: ProbeContext, weight: _Weight, reason: str, epoch: str | None = None
    ) -> Evidence:
        node = context.node.name if context.node is not None else None
        unit, now = context.unit.name, context.now()
        return Evidence(unit, *weight, self.name, reason, now, epoch=epoch or None, node=node)
