"""How another unit goes on with a stream of chat or completions, and what is tried for which kind. Pure.

A way is a generator: it yields requests of its proof, is sent the unit's answers, and returns what the unit
gets, or the last events if nothing else is missing. It raises UnprovenError; then the next way is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from cellgate.proxy.metrics.continuations import ContinuationKind
from cellgate.proxy.resume.eligible import AGAIN, OPEN, TOKENS
from cellgate.proxy.resume.kinds import kind_of
from cellgate.proxy.resume.prompt_proof import given
from cellgate.proxy.resume.proof import (
    LLAMA_CPP,
    ProofRequest,
    Tokens,
    UnprovenError,
    extended,
    prove,
    remaining,
)
from cellgate.proxy.resume.raw_chat import RawChat
from cellgate.proxy.resume.repeat_guard import RepeatGuard
from cellgate.proxy.resume.same_tokens import continued_by_ids, ids_of, prove_tokens
from cellgate.proxy.resume.stitch import Stitch, ending
from cellgate.proxy.resume.stop_strings import stops_of, token_start
from cellgate.proxy.resume.token_ids import asking
from cellgate.proxy.resume.transcript import Transcript

_COMPLETIONS = b"/v1/completions"


@dataclass(frozen=True, slots=True)
class BrokenStream:
    """One stream, as a unit that runs `engine` is asked to go on with it.

    `body` is its request, parsed; `sent` and `target` are the body and the path that its client sent; `ways`
    are those that its request allows (eligible.py).
    """

    body: dict[str, Any]
    sent: bytes
    target: bytes
    transcript: Transcript
    ways: int
    chat: bool
    engine: str

    def asks_ids(self, body: bytes) -> bytes:
        """The body of a request, which asks for token ids if they are known so far."""
        return asking(body) if self.transcript.tokens is not None else body


class NextPart(NamedTuple):
    """What the unit gets: a body for its path `target`; `stitch` joins its answer to what was shown."""

    target: bytes
    body: bytes
    stitch: Stitch


PlainWay = Generator[ProofRequest, dict[str, Any], NextPart | bytes]
"""Returns the next part, or the last events."""


def open_message(stream: BrokenStream) -> PlainWay:
    """The text as an open message of the assistant, or behind the prompt."""
    body, transcript = stream.body, stream.transcript
    text = transcript.text
    start = len(text) if transcript.finish else token_start(text, stops_of(body))
    if not start and not transcript.finish:
        return (yield from again(stream))
    given = text[:start]
    if transcript.finish and not body.get("include_stop_str_in_output"):
        # The stop string was generated as well; only its tokens are counted here.
        given += transcript.stop
    tokens = yield from prove(body, given, chat=stream.chat, engine=stream.engine)
    left = None
    if not transcript.finish:
        left = remaining(body, tokens.shown, chat=stream.chat, engine=stream.engine)
    if left is None:
        return _last_events(stream, tokens)
    is_llama_cpp = stream.engine == LLAMA_CPP
    guard = RepeatGuard(given) if stream.chat and is_llama_cpp else None
    stitch = Stitch(body, transcript, tokens, start, guard=guard)
    # llama.cpp does not count its tokens before the last event.
    counting = {} if is_llama_cpp else stitch.ask_usage()
    longer = orjson.dumps(extended(body, given, chat=stream.chat) | left | counting)
    return NextPart(stream.target, stream.asks_ids(longer), stitch)


def open_tokens(stream: BrokenStream) -> PlainWay:
    """The same request behind exactly the tokens that were generated: then nothing that depends on them
    changes, and the engine itself tells text from calls. Its first event must show that it took them.
    """
    text = stream.transcript.text
    proven = yield from prove_tokens(stream.body, ids_of(stream.transcript))
    if not text or not proven.raw.endswith(text):
        raise UnprovenError("its last tokens are not those of its text")
    left = remaining(stream.body, proven.counts.shown, chat=True, engine=stream.engine)
    if left is None:
        return _last_events(stream, proven.counts)
    tokens = proven.prompt + proven.ids
    longer = stream.body | given(tokens)
    stitch = Stitch(stream.body, stream.transcript, proven.counts, prompt=tokens)
    counting = stitch.ask_usage()
    return NextPart(stream.target, stream.asks_ids(orjson.dumps(longer | left | counting)), stitch)


def by_tokens(stream: BrokenStream) -> PlainWay:
    """The tokens of the prompt and of what was shown: the unit sends raw text, which the gate splits."""
    proven = yield from prove_tokens(stream.body, ids_of(stream.transcript))
    prompt = (yield from proven.prompt_text()) if stream.body.get("tools") else ""
    chat = RawChat(stream.body, stream.transcript, proven.raw, prompt)
    left = remaining(stream.body, proven.counts.shown, chat=True, engine=stream.engine)
    if left is None:
        return _last_events(stream, proven.counts)
    body = continued_by_ids(stream.body, proven, left)
    stitch = Stitch(stream.body, stream.transcript, proven.counts, raw=chat)
    return NextPart(_COMPLETIONS, orjson.dumps(body), stitch)


def again(stream: BrokenStream) -> PlainWay:
    """The same request: the unit must repeat what was shown. This needs no proof beforehand."""
    yield from ()
    if stream.transcript.tokens is not None:
        stream.transcript.tokens.restart()
    stitch = Stitch(stream.body, stream.transcript, Tokens(None, 0), 0, again=True)
    return NextPart(stream.target, stream.asks_ids(stream.sent), stitch)


MakePlainWay = Callable[[BrokenStream], PlainWay]

PLAIN_WAYS: dict[ContinuationKind, tuple[MakePlainWay, ...]] = {
    ContinuationKind.TEXT: (open_message, open_tokens, again),
    ContinuationKind.TOOLS: (open_message, open_tokens, again),
    ContinuationKind.TOOL_CALL: (by_tokens, again),
    ContinuationKind.REASONING: (open_tokens, again, by_tokens),
    ContinuationKind.LOGPROBS: (open_tokens, again),
    ContinuationKind.PENALTIES: (open_tokens, again),
    ContinuationKind.CONSTRAINED: (again,),
}
_NEEDS: dict[MakePlainWay, int] = {open_message: OPEN, open_tokens: TOKENS, by_tokens: TOKENS, again: AGAIN}


def ways_for(stream: BrokenStream) -> list[MakePlainWay]:
    """The ways to try, in order."""
    shown = stream.transcript.shown
    if not (shown.size or shown.calls or stream.transcript.finish):
        return [again]
    return [way for way in PLAIN_WAYS[kind_of(stream.body, shown)] if stream.ways & _NEEDS[way]]


def _last_events(stream: BrokenStream, tokens: Tokens) -> bytes:
    events = ending(stream.body, stream.transcript, tokens, chat=stream.chat)
    if events is None:
        raise UnprovenError("the text was complete, but only the broken unit knew the token counts")
    return events
