"""Resuming a broken stream: what was sent, the proof that another unit can resume it, its request.

eligible.py and transcript.py decide what may be resumed, proof.py how. questions.py sends the requests of the
proof to the unit.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from cellgate.proxy.config.limits import reached
from cellgate.proxy.resume.eligible import AGAIN, LONG_STOPS, OPEN, why_ineligible
from cellgate.proxy.resume.passage import Rewriter
from cellgate.proxy.resume.proof import LLAMA_CPP, Tokens, extended, prove, remaining
from cellgate.proxy.resume.questions import MakeHead, Questions
from cellgate.proxy.resume.repeat_guard import RepeatGuard
from cellgate.proxy.resume.replay_buffer import ReplayBuffer, plain
from cellgate.proxy.resume.stitch import Stitch, ending, wants_usage
from cellgate.proxy.resume.stop_strings import stops_of, token_start
from cellgate.proxy.wire.failure import Failure
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.request import Request


class Resuming(Protocol):
    """The exchange. One of these is called once after `Resumption.begin`, unless that is abandoned."""

    def go_on(self, body: bytes, replay: ReplayBuffer, stitch: Rewriter) -> None:
        """It is proven: send the unit this, and stitch its answer to what was sent before."""

    def conclude(self, events: bytes) -> None:
        """The text is complete: these are the last events."""

    def refused(self, reason: str) -> None:
        """The unit cannot resume the stream, and neither could any other."""

    def failed(self, failure: Failure) -> None:
        """The unit failed before it was proven."""


class Resumption:
    """One broken stream, of which `keep` has been shown."""

    __slots__ = (
        "_again",
        "_body",
        "_chat",
        "_engine",
        "_owner",
        "_questions",
        "_replay",
        "_request",
        "_start",
    )

    def __init__(self, request: Request, replay: ReplayBuffer, *, chat: bool) -> None:
        self._owner: Resuming
        self._request = request
        self._replay = replay
        self._chat = chat
        self._body: dict[str, Any] = orjson.loads(request.body)
        self._questions: Questions[Tokens] | None = None
        self._start = 0
        self._again = False
        """Whether the units start from the beginning: what was shown is no text, or is not proven."""
        self._engine = ""

    @property
    def is_proving(self) -> bool:
        """Whether a unit is being asked."""
        return self._questions is not None and self._questions.is_open

    def why_not(self) -> str:
        """Why it cannot be continued as it stands; empty when it can, or is complete."""
        if reason := why_ineligible(self._body, chat=self._chat):
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
        self._owner = owner
        transcript = plain(self._replay)
        self._start = (
            len(transcript.text) if transcript.finish else token_start(transcript.text, stops_of(self._body))
        )
        is_open = bool(self._replay.ways & OPEN) and not transcript.shown.beyond_text and not self._again
        if not is_open or not (self._start or transcript.finish):
            self._start_again()
            return
        self._engine = engine
        text = transcript.text[: self._start]
        if transcript.finish and not self._body.get("include_stop_str_in_output"):
            # The stop string was generated as well; only its tokens are counted here.
            text += transcript.stop
        proof = prove(self._body, text, chat=self._chat, engine=engine)
        self._questions = Questions(proof, self, self._proven, pool, head)
        self._questions.begin(fresh=fresh)

    def _start_again(self) -> None:
        """The request is the same, and the unit must repeat what was shown."""
        stitch = Stitch(self._body, plain(self._replay), Tokens(None, 0), 0, again=True)
        self._owner.go_on(self._request.body, self._replay, stitch)

    def unproven(self, reason: str) -> None:
        """No unit can continue it as an open message."""
        if self._replay.ways & AGAIN:
            self._again = True
            self._start_again()
        else:
            self._owner.refused(reason)

    def abandon(self) -> None:
        """Stop asking."""
        if self._questions is not None:
            self._questions.abandon()

    # -- the result of the proof ---------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        """The unit failed before it was proven."""
        self._owner.failed(failure)

    def _proven(self, tokens: Tokens) -> None:
        transcript, body = plain(self._replay), self._body
        is_llama_cpp = self._engine == LLAMA_CPP
        left = None
        if not transcript.finish:
            left = remaining(body, tokens.shown, chat=self._chat, engine=self._engine)
        if left is not None:
            text = transcript.text[: self._start]
            guard = RepeatGuard(text) if self._chat and is_llama_cpp else None
            stitch = Stitch(body, transcript, tokens, self._start, guard=guard)
            # llama.cpp does not count its tokens before the last event.
            counting = {} if is_llama_cpp else stitch.ask_usage()
            longer = extended(body, text, chat=self._chat) | left | counting
            self._owner.go_on(orjson.dumps(longer), self._replay, stitch)
            return
        events = ending(body, transcript, tokens, chat=self._chat)
        if events is None:
            assert wants_usage(body)
            self.unproven("the text was complete, but only the broken unit knew the token counts")
        else:
            self._owner.conclude(events)
