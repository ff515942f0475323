"""The port of HAProxy's agent checks: a line with a unit's name, or `gate`, is answered with one line. A
second word is the name of the load balancer that asks: those behind one address are told apart by it.

1. Answered from memory; one connection is one question.
2. What is no question gets no answer: to HAProxy that is no statement, so that the state it knows stands.
3. A unit that is not configured (any more) is drained, as on its health URL.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from typing import cast

from cellgate.proxy.ingress.balancers import Balancers
from cellgate.proxy.ingress.haproxy_words import (
    AgentReply,
    ReplyFormatter,
    ServerState,
    gate_reply,
    unit_reply,
)
from cellgate.router.board import Board

GATE = "gate"
"""What `agent-send` has to say to hear of the gate itself. A unit of this name cannot be asked for here."""
QUESTION_WAIT_S = 1.0
"""Without `agent-send` HAProxy says nothing and waits: after so long it gets the reply about the gate. It
would give up after its agent-inter, 2 s by default."""
VISITORS_MAX = 512

_LINE_MAX = 256
# As names are in the configuration.
_QUESTION = re.compile(
    rb"[ \t]*([A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:[ \t]+([A-Za-z0-9._:/-]{1,64}))?[ \t]*\r?\n?"
)


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
        self._visitors: set[_Visitor] = set()
        kinds = (*(stand.value for stand in ServerState), "unknown", "malformed", "refused", "too_many")
        self.counts = dict.fromkeys(kinds, 0)

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Answer on these."""
        loop = asyncio.get_running_loop()
        for listener in listeners:
            self._servers.append(await loop.create_server(lambda: _Visitor(self, loop), sock=listener))

    def retire(self) -> None:
        """Accept no more: another process answers on the same listeners. Connected clients are still
        answered.
        """
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    def close(self) -> None:
        """Listen no more. HAProxy keeps the last reply, which for a gate that stops is `drain`."""
        self.retire()
        for visitor in list(self._visitors):
            visitor.leave()

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

    def admit(self, visitor: _Visitor, peer: str) -> bool:
        """Whether a visitor may ask."""
        if len(self._visitors) >= VISITORS_MAX:
            self.counts["too_many"] += 1
        elif not self._may_ask(peer):
            self.counts["refused"] += 1
        else:
            self._visitors.add(visitor)
            return True
        return False

    def left(self, visitor: _Visitor) -> None:
        """A visitor has left."""
        self._visitors.discard(visitor)

    def _reply(self, about: str, now: float) -> AgentReply | None:
        if about == GATE:
            return gate_reply(self._board, now, stopping=self._stopping())
        state = self._board.units.get(about)
        return None if state is None else unit_reply(state, now, self._board)


class _Visitor(asyncio.Protocol):
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
        if b"\n" in data or len(self._said) > _LINE_MAX:
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
