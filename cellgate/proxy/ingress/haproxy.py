"""The replies of HAProxy's agent protocol for one verdict. Pure, but for the last weight that was sent.

1. Whatever is not taken back stands for ever: only `up` ends a `down`, only `ready` ends a `drain`. So every
   good answer says both, also when this process has reported nothing bad: the one before it may have.
2. A weight tells what a unit can do beside what it was configured for; how busy it is, HAProxy counts itself.
3. 0 has a meaning of its own (a weight of 0 is a drain, a maxconn of 0 no limit), and is never sent.
4. Only what HAProxy 2.6 takes as well: to it `down#reason` without the space and `weight:62%` mean nothing,
   and it says so nowhere but in its statistics.

In this order: `HaproxyAgent`, `Balancers`, `_AgentConnection`.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.ingress.reasons import why
from cellgate.router.board import Board
from cellgate.router.departures import is_draining
from cellgate.router.nouns import Verdict
from cellgate.router.unit_state import UnitState

SUSPECT_PERCENT = 1
"""The weight of a suspected unit: in rotation, after all others."""
STEADY = 0.05
"""A weight or a maxconn is sent again when it has changed by more than this share of its whole."""
_HAPROXY_REASON_MAX = 80


class HaproxyAgent:
    """Answers agent checks. `may_ask` says whether an address may; `counts` is for the metrics."""

    def __init__(
        self,
        board: Board,
        now: Callable[[], float],
        stopping: Callable[[], bool],
        may_ask: Callable[[str], bool],
        balancers: Balancers,
    ) -> None:
        self._board = board
        self._now = now
        self._stopping = stopping
        self._may_ask = may_ask
        self._balancers = balancers
        self._formatter = ReplyFormatter()
        self._servers: list[asyncio.Server] = []
        self._connections: set[_AgentConnection] = set()
        kinds = (*(stand.value for stand in ServerState), "unknown", "malformed", "refused", "too_many")
        self.counts = dict.fromkeys(kinds, 0)

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Answer on these."""
        loop = asyncio.get_running_loop()
        for listener in listeners:
            self._servers.append(
                await loop.create_server(lambda: _AgentConnection(self, loop), sock=listener)
            )

    def retire(self) -> None:
        """Accept no more, as another process does on these listeners; connected clients are answered."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    async def close(self) -> None:
        """Listen no more. HAProxy keeps the last reply, which for a gate that stops is `drain`."""
        self.retire()
        for connection in list(self._connections):
            connection.leave()

    def answer(self, question: bytes, peer: str) -> bytes:
        """The line for one question (without any: of the gate); empty: there is nothing to say to it."""
        match = _QUESTION.fullmatch(question or GATE.encode())
        if match is None:
            self.counts["malformed"] += 1
            return b""
        about, now = match[1].decode(), self._now()
        reply = self._reply(about, now)
        if reply is None:
            self.counts["unknown"] += 1
            self._formatter.forget(about)
            return self._formatter.line(about, AgentReply(ServerState.DRAIN), 1)
        self.counts[reply.state.value] += 1
        self._balancers.asked(about, f"{peer} {(match[2] or b'').decode()}", now)
        return self._formatter.line(about, reply, self._balancers.count(about, now))

    def admit(self, connection: _AgentConnection, peer: str) -> bool:
        """Whether one more may ask."""
        if len(self._connections) >= CONNECTIONS_MAX:
            self.counts["too_many"] += 1
        elif not self._may_ask(peer):
            self.counts["refused"] += 1
        else:
            self._connections.add(connection)
            return True
        return False

    def left(self, connection: _AgentConnection) -> None:
        self._connections.discard(connection)

    def _reply(self, about: str, now: float) -> AgentReply | None:
        if about == GATE:
            return gate_reply(self._board, now, stopping=self._stopping())
        state = self._board.units.get(about)
        return None if state is None else unit_reply(state, now, self._board)


class ServerState(Enum):
    """What HAProxy is to do with a server."""

    UP = "up"
    DRAIN = "drain"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class AgentReply:
    """The reply about a unit, or the gate. `percent` is of its configured weight, `slots` is how
    many requests all load balancers together may send at once; both of no meaning unless UP.
    """

    state: ServerState
    percent: int = 100
    slots: int = 1
    reason: str = ""


def unit_reply(state: UnitState, now: float, board: Board) -> AgentReply:
    """The word about one unit."""
    if state.drained or state.hold is not None or is_draining(state):
        return AgentReply(ServerState.DRAIN)
    if not state.is_usable():
        return AgentReply(ServerState.DOWN, reason=f"{state.case.verdict.value}: {why(state)}")
    if state.case.verdict is Verdict.SUSPECT:
        percent = SUSPECT_PERCENT
    else:
        percent = _percent(state.share(now, board.rules), state.weight)
    return AgentReply(ServerState.UP, percent, state.unit.max_in_flight)


def gate_reply(board: Board, now: float, *, stopping: bool) -> AgentReply:
    """The word about the gate itself: what it can do is what its usable units can."""
    if stopping:
        return AgentReply(ServerState.DRAIN)
    usable = [state for state in board if state.is_usable()]
    if not usable:
        return AgentReply(ServerState.DOWN, reason=f"0/{len(board.units)} units usable")
    share = sum(state.share(now, board.rules) for state in usable)
    return AgentReply(
        ServerState.UP,
        _percent(share, sum(state.weight for state in board)),
        sum(state.unit.max_in_flight for state in usable),
    )


class ReplyFormatter:
    """Formats replies as lines, and repeats the last weight while the new one is nearly the same."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}

    def line(self, about: str, reply: AgentReply, balancers: int) -> bytes:
        """The answer about a unit or the gate, for each of so many load balancers."""
        if reply.state is ServerState.DRAIN:
            return b"drain\n"
        if reply.state is ServerState.DOWN:
            return b"down #%b\n" % _harmless(reply.reason)
        places = max(1, reply.slots // balancers)
        percent_said, places_said = self._last.get(about, (0, 0))
        percent = _steady(percent_said, reply.percent, 100)
        places = _steady(places_said, places, max(places, places_said))
        self._last[about] = percent, places
        return b"up ready %d%% maxconn:%d\n" % (percent, places)

    def forget(self, about: str) -> None:
        self._last.pop(about, None)


def _percent(part: float, whole: float) -> int:
    return max(1, min(100, round(100.0 * part / whole)))


def _steady(last: int, found: int, whole: int) -> int:
    """`last` while it is nearly right. 100 percent is always sent, or it is never reached."""
    is_nearly = last > 0 and abs(found - last) <= STEADY * whole
    return last if is_nearly and found != 100 else found


def _harmless(reason: str) -> bytes:
    """A reason that stays within its line."""
    return "".join(c if " " <= c <= "~" else "?" for c in reason)[:_HAPROXY_REASON_MAX].encode()


# Counts the load balancers that ask for the gate or one of its units: each may use only its part. Pure.
#
# They are known by what comes to the agent port, which is theirs alone: the address, and the name that stands
# behind the question. A request of a client says nothing of them, whatever is written in it.


SEEN_S = 30.0
"""A balancer without checks for this long is gone: fifteen checks at HAProxy's default of 2 s."""


class Balancers:
    """Which balancer asked for what (a unit's name, or `gate`), and when last."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}

    def asked(self, about: str, who: str, now: float) -> None:
        """One asks. Of more than `LIMITS.balancers` the one that was heard longest ago is forgotten."""
        seen = self._seen
        seen.pop((about, who), None)
        seen[about, who] = now
        while now - next(iter(seen.values())) > SEEN_S:
            del seen[next(iter(seen))]
        if self.count(about, now) > LIMITS.balancers:
            reached("balancers")
            del seen[next(key for key in seen if key[0] == about)]

    def count(self, about: str, now: float) -> int:
        """How many ask for it now; at least 1."""
        return max(1, sum(a == about and now - at <= SEEN_S for (a, _), at in self._seen.items()))


# The port of HAProxy's agent checks: a line with a unit's name, or `gate`, is answered with one line. A
# second word is the name of the load balancer that asks: those behind one address are told apart by it.
#
# 1. Answered from memory; one connection is one question.
# 2. What is no question gets no answer: to HAProxy that is no statement, so that the state it knows stands.
# 3. A unit that is not configured (any more) is drained, as on its health URL.


GATE = "gate"
"""What `agent-send` has to say to hear of the gate itself. A unit of this name cannot be asked for here."""
QUESTION_WAIT_S = 1.0
"""Without `agent-send` HAProxy says nothing and waits: after so long it gets the reply about the gate. It
would give up after its agent-inter, 2 s by default."""
CONNECTIONS_MAX = 512

_HAPROXY_LINE_MAX = 256
# As names are in the configuration.
_QUESTION = re.compile(
    rb"[ \t]*([A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:[ \t]+([A-Za-z0-9._:/-]{1,64}))?[ \t]*\r?\n?"
)


class _AgentConnection(asyncio.Protocol):
    """One connection: it asks, or says nothing for a while, is answered, and leaves."""

    def __init__(self, agent: HaproxyAgent, loop: asyncio.AbstractEventLoop) -> None:
        self._agent = agent
        self._loop = loop
        self._said = b""
        self._peer = ""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # A connection that was reset in the meantime has no peer.
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if peer else ""
        if self._agent.admit(self, self._peer):
            self._timer = self._loop.call_later(QUESTION_WAIT_S, self._answer)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._said += data
        if b"\n" in data or len(self._said) > _HAPROXY_LINE_MAX:
            self._answer()

    def eof_received(self) -> bool:
        if self._said:
            self._answer()
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._agent.left(self)

    def leave(self) -> None:
        """End without an answer."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self) -> None:
        transport = self._transport
        if self._timer is None or transport is None or transport.is_closing():
            return
        self._timer.cancel()
        self._timer = None
        transport.pause_reading()
        line = self._agent.answer(self._said, self._peer)
        if line:
            transport.write(line)
        transport.close()
