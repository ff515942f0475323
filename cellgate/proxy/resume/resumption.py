"""Resuming a broken stream of chat or completions: what was sent, the proof that another unit can resume it.

eligible.py and transcript.py decide what may be resumed, plain_ways.py how. questions.py sends the requests
of the proof to the unit.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from cellgate.proxy.config.limits import reached
from cellgate.proxy.resume.eligible import LONG_STOPS, TOKENS, why_ineligible
from cellgate.proxy.resume.passage import Rewriter
from cellgate.proxy.resume.plain_ways import BrokenStream, MakePlainWay, NextPart, ways_for
from cellgate.proxy.resume.questions import MakeHead, Questions
from cellgate.proxy.resume.replay_buffer import ReplayBuffer, plain
from cellgate.proxy.resume.stitch import ending
from cellgate.proxy.wire.failure import Failure
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.request import Request


class Resuming(Protocol):
    """The exchange. One of these is called once after `Resumption.begin`, unless that is abandoned."""

    def go_on(self, target: bytes, body: bytes, replay: ReplayBuffer, stitch: Rewriter) -> None:
        """It is proven: send the unit's path `target` this, and stitch its answer to what was sent before."""

    def conclude(self, events: bytes) -> None:
        """The text is complete: these are the last events."""

    def refused(self, reason: str) -> None:
        """The unit cannot resume the stream, and neither could any other."""

    def failed(self, failure: Failure) -> None:
        """The unit failed before it was proven."""


class Resumption:
    """One broken stream, of which `replay` has been shown."""

    __slots__ = (
        "_body",
        "_chat",
        "_head",
        "_left",
        "_owner",
        "_pool",
        "_questions",
        "_reason",
        "_replay",
        "_request",
        "_stream",
    )

    # From `begin` on.
    _owner: Resuming
    _pool: Pool
    _head: MakeHead
    _stream: BrokenStream
    _left: list[MakePlainWay]

    def __init__(self, request: Request, replay: ReplayBuffer, *, chat: bool) -> None:
        self._request = request
        self._replay = replay
        self._chat = chat
        self._body: dict[str, Any] = orjson.loads(request.body)
        self._questions: Questions[NextPart | bytes] | None = None
        self._reason = ""
        """Why the first way failed."""

    @property
    def is_proving(self) -> bool:
        """Whether a unit is being asked."""
        return self._questions is not None and self._questions.is_open

    def why_not(self) -> str:
        """Why it cannot be continued as it stands; empty when it can, or is complete."""
        has_ids = bool(self._replay.ways & TOKENS)
        if reason := why_ineligible(self._body, chat=self._chat, has_ids=has_ids):
            if reason is LONG_STOPS:
                reached("stop_bytes")
            return reason
        transcript = plain(self._replay)
        if not transcript.closed:
            return "it broke inside an event"
        return transcript.why_not or ("" if self._replay.ways else "only its end is in the replay buffer")

    def last_events(self) -> bytes | None:
        """The events that a complete text still lacks, if no unit is needed for them."""
        transcript = plain(self._replay)
        if transcript.is_done:
            return b""
        return ending(self._body, transcript, None, chat=self._chat) if transcript.finish else None

    def begin(self, owner: Resuming, pool: Pool, engine: str, head: MakeHead, *, fresh: bool = False) -> None:
        """Ask a unit that runs `engine` to resume the stream; `owner` gets the result."""
        self._owner, self._pool, self._head = owner, pool, head
        request, replay = self._request, self._replay
        self._stream = BrokenStream(
            self._body, request.body, request.target, plain(replay), replay.ways, self._chat, engine
        )
        self._left, self._reason = ways_for(self._stream), ""
        self._try_next(fresh=fresh)

    def abandon(self) -> None:
        """Stop asking."""
        if self._questions is not None:
            self._questions.abandon()

    # -- the result of a proof -----------------------------------------------------------------------------

    def unproven(self, reason: str) -> None:
        """The unit cannot go on in this way; the first reason is told, if no other way is left."""
        self._reason = self._reason or reason
        self._try_next()

    def failed(self, failure: Failure) -> None:
        """The unit failed before it was proven."""
        self._owner.failed(failure)

    def _try_next(self, *, fresh: bool = False) -> None:
        if not self._left:
            self._owner.refused(self._reason or "there is no way to continue it")
            return
        way = self._left.pop(0)(self._stream)
        self._questions = Questions(way, self, self._proven, self._pool, self._head)
        self._questions.begin(fresh=fresh)

    def _proven(self, found: NextPart | bytes) -> None:
        if isinstance(found, bytes):
            self._owner.conclude(found)
        else:
            self._owner.go_on(found.target, found.body, self._replay, found.stitch)
