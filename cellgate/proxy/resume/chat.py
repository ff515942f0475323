"""Joins two streams: the events of the second unit are rewritten as if the first had sent them. Pure.

The client sees one id, one role, one token count and one end; the boundary is invisible.

In this order: `StreamJoiner`, `RepeatGuard`, `BrokenStream`, `Questions`, `Resumption`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from cellgate.probes.engines import object_of
from cellgate.proxy.config.limits import reached
from cellgate.proxy.http.call import Call
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.request import Request
from cellgate.proxy.http.sse import WORKING, extra_field, payload
from cellgate.proxy.http.unit import Pool
from cellgate.proxy.observe.counters import ResumeKind
from cellgate.proxy.resume.eligible import (
    AGAIN,
    LONG_STOPS,
    OPEN,
    TOKENS,
    BoundaryStops,
    is_deterministic,
    stops_of,
    token_start,
    why_ineligible,
)
from cellgate.proxy.resume.messages import given
from cellgate.proxy.resume.proof import (
    LLAMA_CPP,
    UNKNOWN_CHARACTER,
    ProofRequest,
    Tokens,
    UnprovenError,
    check_count,
    extended,
    ids_of,
    is_counted,
    model_field,
    prove,
    prove_tokens,
    remaining,
    rendered,
    resumed_by_ids,
    spelt,
    tokens_generated,
)
from cellgate.proxy.resume.raw import RawChat
from cellgate.proxy.resume.replay import EventRewriter, ReplayBuffer, plain
from cellgate.proxy.resume.shown import (
    REASONING,
    MismatchError,
    Repetition,
    logprobs_in,
    stitched,
    unsupported_in,
)
from cellgate.proxy.resume.transcript import (
    DONE,
    STOPPED_BY,
    TokenLog,
    Transcript,
    asking,
    asking_counts,
    kind_of,
)
from cellgate.router.nouns import BUSY_STATUSES

_WORKING_EVENTS = 64
"""The client gets a comment for so many events that repeat what it knows."""


class StreamJoiner:
    """Rewrites the events of one unit. `transcript` is what the client was sent, and grows with them.

    The unit continues after the first `start` characters of the text, which are `tokens` by its count; or it
    starts from the very beginning (`again`), and must repeat all that was shown.
    `raw`: it sends raw text, which is split. `prompt`: its first event must have these token ids. `ids` are
    those of the answer behind which it goes on, if not all that came are.
    `is_over`: the answer is complete, further events are ignored.
    """

    def __init__(
        self,
        body: dict[str, Any],
        transcript: Transcript,
        tokens: Tokens,
        start: int | None = None,
        *,
        guard: RepeatGuard | None = None,
        again: bool = False,
        raw: RawChat | None = None,
        prompt: list[int] | None = None,
        ids: list[int] | None = None,
    ) -> None:
        self.transcript = transcript
        self._ids = ids
        self._guard = guard
        self._tokens = tokens
        text = transcript.text
        start = len(text) if start is None else start
        self._stop_strings = BoundaryStops(text[:start], _stops(body, tokens.shown))
        self._again = again
        self._raw = raw
        self._prompt = prompt
        # It was sent after the point where the unit starts.
        self._repetition = Repetition(text[start:], transcript.shown if again else None)
        # It was sent as well, if it is known here.
        self._finish = transcript.finish
        self._repeated = 0
        """Events that have only repeated."""
        self._spells_stops = bool(body.get("include_stop_str_in_output"))
        self._wants_usage = wants_usage(body)
        self._usage_so_far = _option(body, "continuous_usage_stats")
        self._asks_usage = False
        self._options = body.get("stream_options")
        self._used: dict[str, Any] | None = None
        """The last usage it reported, summed over both parts."""
        self._events = 0
        """Of its text: usually one for each token."""
        self.is_over = False

    def ask_usage(self) -> dict[str, Any]:
        """Additional fields of its request: if the text may end here, its tokens must be counted here."""
        counts = self.transcript.counts is not None
        if not counts and (self._stop_strings.is_over or not self._wants_usage):
            return {}
        self._asks_usage = True
        options = self._options if isinstance(self._options, dict) else {}
        return {"stream_options": {**options, "continuous_usage_stats": True}}

    def feed(self, events: bytes) -> bytes:
        """Complete events in, what the client gets out. Raises MismatchError."""
        return stitched(events, self._stitched, lambda: self.is_over)

    def _stitched(self, event: bytes) -> bytes:
        if name := extra_field(event):
            raise MismatchError(f"events with {name}")
        data = payload(event)
        if not data:
            return event
        if data == DONE:
            self.transcript.is_done = True
            return _event(DONE)
        return self._rewritten(data)

    def _rewritten(self, data: bytes) -> bytes:
        document = _object(data)
        if self._prompt is not None and document.get("choices"):
            self._check_prompt(document)
        if self.transcript.tokens is not None:
            self._take_ids(self.transcript.tokens, document)
        if self._raw is not None:
            document = self._raw.translated(document)
        if strange := unsupported_in(document):
            raise MismatchError(strange)
        document.update((key, value) for key, value in self.transcript.frame.items() if key in document)
        choices = document.get("choices")
        usage = self._take_usage(document)
        if choices and not self._join_choice(choices[0]) and not usage:
            self._repeated += 1
            return b"" if self._repeated % _WORKING_EVENTS else WORKING
        self.transcript.take(document)
        event = _event(document)
        if self.is_over:
            event += self._ended(document)
        return event

    def _take_ids(self, log: TokenLog, document: dict[str, Any]) -> None:
        if self._ids is not None and document.get("choices"):
            # Until now the ids that came before were worth more.
            log.restart(self._ids)
            self._ids = None
        log.take(document)

    def _check_prompt(self, document: dict[str, Any]) -> None:
        if document.get("prompt_token_ids") != self._prompt:
            raise MismatchError("an answer to other tokens than those that it was given")
        self._prompt = None

    def _take_usage(self, document: dict[str, Any]) -> dict[str, Any] | None:
        """The usage for the client, summed over both parts."""
        usage, choices = document.get("usage"), document.get("choices") or []
        self._events += bool(choices) and not _is_role(choices[0])
        if not usage:
            return None
        if not isinstance(usage, dict) or not all(
            isinstance(usage.get(key) or 0, int) for key in _CHAT_COUNTS
        ):
            raise MismatchError("a usage in an unknown format")
        self._used = _summed(usage, self._tokens)
        if choices and self.transcript.counts is not None:
            self.transcript.counts.take(self._used)
        if choices and self._asks_usage and not self._usage_so_far:
            # The gate requested it, not the client.
            del document["usage"]
            return None
        return self._used

    def _join_choice(self, choice: dict[str, Any]) -> bool:
        """Whether the choice has anything for the client."""
        part, key = (choice["delta"], "content") if choice.get("delta") is not None else (choice, "text")
        if part is not choice and self.transcript.has_role:
            part.pop("role", None)
        if not self._again and self._raw is None and any(part.get(name) for name in REASONING):
            # An engine that takes an open message for reasoning would go on with the text there.
            raise MismatchError("reasoning")
        old = text = part.get(key) or ""
        if self._guard is not None:
            text = self._guarded(text, ended=bool(choice.get("finish_reason")))
        if not (self._repetition.is_over and self._stop_strings.is_over):
            text = self._past_boundary(choice, text)
        if text != old:
            part[key] = text
        is_more = logprobs_in(choice) or (part is not choice and any(part.values()))
        if self._finish:
            self._check_end(choice, is_more=bool(text or is_more))
            return False
        return bool(text or choice.get("finish_reason") or is_more)

    def _check_end(self, choice: dict[str, Any], *, is_more: bool) -> None:
        """The client knows already how the answer ends."""
        if is_more or (choice.get("finish_reason") or self._finish) != self._finish:
            raise MismatchError("an end that differs from what was sent before")

    def _guarded(self, text: str, *, ended: bool) -> str:
        assert self._guard is not None
        new = self._guard.feed(text)
        if new is None:
            raise MismatchError("the text that had been shown, or one that begins like it")
        return new + self._guard.flush() if ended else new

    def _past_boundary(self, choice: dict[str, Any], text: str) -> str:
        """The new part of `text`; it ends at the end of a stop string that began before the boundary."""
        text, stop = self._stop_strings.feed(text)
        if stop is not None:
            if self._wants_usage and self._tokens.prompt is None and self._used is None:
                raise MismatchError("no token counts, although its text ends here")
            choice["finish_reason"] = "stop"
            choice |= {name: self._stop_strings.stop for name in STOPPED_BY if name in choice}
            self.is_over = True
            news = self._news(choice, stop)
            return news if self._spells_stops else ""
        if choice.get("finish_reason"):
            text += self._stop_strings.flush()
        return self._news(choice, text)

    def _news(self, choice: dict[str, Any], text: str) -> str:
        """`text` without what was shown already; so is the rest of the choice."""
        text = self._repetition.cut_text(text)
        self._repetition.cut_delta(choice)
        self._repetition.check(choice, text)
        return text

    def _ended(self, document: dict[str, Any]) -> bytes:
        """The events after the end of the text, when the gate ends it."""
        self.transcript.is_done = True
        usage, prompt = self._used, self._tokens.prompt
        if usage is None and prompt is not None:
            usage = _usage(prompt, self._tokens.shown + self._events)
        if usage is None or not self._wants_usage:
            return _event(DONE)
        return _event({**document, "choices": [], "usage": usage}) + _event(DONE)


def ending(
    body: dict[str, Any], transcript: Transcript, tokens: Tokens | None, *, chat: bool
) -> bytes | None:
    """The last events of a stream whose text is complete; None when they cannot be known.

    `tokens`, of the text and the stop string that ended it, are needed when the client wants its usage and
    has not been told.
    """
    kind = "chat.completion.chunk" if chat else "text_completion"
    document = {"object": kind, **transcript.frame}
    out = b""
    if not transcript.finish:
        part: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        out += _event({**document, "choices": [{"index": 0, **part, "finish_reason": "length"}]})
    if wants_usage(body) and not transcript.has_usage:
        if tokens is None or tokens.prompt is None:
            return None
        # The token that ended the text has no text, unless the text was cut there.
        has_end = tokens.is_exact or bool(transcript.stop) or transcript.finish != "stop"
        shown_tokens = tokens.shown + (not has_end)
        out += _event({**document, "choices": [], "usage": _usage(tokens.prompt, shown_tokens)})
    return out + _event(DONE)


def wants_usage(body: dict[str, Any]) -> bool:
    """Whether the client has asked for an event with the token counts at the end."""
    return _option(body, "include_usage")


def _option(body: dict[str, Any], name: str) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get(name))


def _is_role(choice: dict[str, Any]) -> bool:
    """Whether the choice has only a role."""
    delta = choice.get("delta") or {}
    return "role" in delta and not delta.get("content") and not choice.get("finish_reason")


def _object(data: bytes) -> dict[str, Any]:
    if (document := object_of(data)) is None:
        raise MismatchError("an event that is not a JSON object")
    return document


def _stops(body: dict[str, Any], shown: int) -> Iterable[str]:
    least = body.get("min_tokens")
    return () if isinstance(least, int) and least > shown else stops_of(body)


def _summed(usage: dict[str, Any], tokens: Tokens) -> dict[str, Any]:
    """What the unit took for a part of the prompt was generated."""
    said = (usage.get("completion_tokens") or 0) + tokens.shown
    prompt = (usage.get("prompt_tokens") or 0) - tokens.shown if tokens.prompt is None else tokens.prompt
    usage |= _usage(prompt, said)
    if tokens.shown:
        # It knows only its own part.
        usage.pop("completion_tokens_details", None)
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
        details["cached_tokens"] = min(cached, prompt)
    return usage


def _usage(prompt: int, said: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _event(data: bytes | dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % (data if isinstance(data, bytes) else orjson.dumps(data))


# Guards against a unit that repeats the text it was given to continue. Pure.
#
# Some builds of llama.cpp send an open last message of the assistant again before they continue it, and
# others do not. An answer may also repeat itself. Where new text might be either, nobody can tell which one
# it is.


class RepeatGuard:
    """Holds new text back for as long as it may be the text `given`, sent once more."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._matched = 0
        """So many characters came that are those of the text given; all of them are held back."""

    def feed(self, text: str) -> str | None:
        """The text that is certainly new; None: all of the text given has come once more."""
        given, matched = self._given, self._matched
        if text.startswith(given[matched : matched + len(text)]) and given:
            self._matched += len(text)
            return None if self._matched >= len(given) else ""
        return self.flush() + text

    def flush(self) -> str:
        """What was held back, once no more can come: whoever repeats, repeats all."""
        held, self._given, self._matched = self._given[: self._matched], "", 0
        return held


_CHAT_COUNTS = ("prompt_tokens", "completion_tokens")


# How another unit goes on with a stream of chat or completions, and what is tried for which kind. Pure.
#
# A way is a generator: it yields requests of its proof, is sent the unit's answers, and returns what the unit
# gets, or the last events if nothing else is missing. It raises UnprovenError; then the next way is tried.


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
    """What the unit gets: a body for its path `target`; `joiner` joins its answer to what was shown."""

    target: bytes
    body: bytes
    joiner: EventRewriter


PlainWay = Generator[ProofRequest, dict[str, Any], NextPart | bytes]
"""Returns the next part, or the last events."""


def open_message(stream: BrokenStream) -> PlainWay:
    """The text as an open message of the assistant, or behind the prompt.

    Its tokens are counted by their ids, else by the events that brought it: a model may spell a text in other
    tokens than a tokenizer.
    """
    tokens = stream.transcript.tokens
    if tokens is not None and tokens.ids and tokens.prompt:
        return (yield from _open_by_ids(stream, tokens))
    body, transcript = stream.body, stream.transcript
    text = transcript.text
    start = len(text) if transcript.finish else token_start(text, stops_of(body))
    if not start and not transcript.finish:
        return (yield from again(stream))
    given = text[:start]
    if transcript.finish and not body.get("include_stop_str_in_output"):
        # The stop string was generated as well; only its tokens are counted here.
        given += transcript.stop
    counted = yield from prove(body, given, chat=stream.chat, engine=stream.engine)
    if is_counted(body, chat=stream.chat) or is_deterministic(body):
        counted = yield from _counted(stream, given, counted)
    if counted.spans and is_deterministic(body):
        raise UnprovenError("one token spans the end of its prompt and the begin of its text")
    left = None
    if not transcript.finish:
        left = remaining(body, counted.shown, chat=stream.chat, engine=stream.engine)
    if left is None:
        return _last_events(stream, counted)
    is_llama_cpp = stream.engine == LLAMA_CPP
    guard = RepeatGuard(given) if stream.chat and is_llama_cpp else None
    joiner = StreamJoiner(body, transcript, counted, start, guard=guard)
    # llama.cpp does not count its tokens before the last event.
    counting = {} if is_llama_cpp else joiner.ask_usage()
    longer = orjson.dumps(extended(body, given, chat=stream.chat) | left | counting)
    return NextPart(stream.target, stream.asks_ids(longer), joiner)


def _counted(
    stream: BrokenStream, given: str, counted: Tokens
) -> Generator[ProofRequest, dict[str, Any], Tokens]:
    """The tokens of an answer of which the unit gets this text, `counted` by its tokenizer, as they were
    generated. Raises UnprovenError.
    """
    body, transcript, whole = stream.body, stream.transcript, counted
    text, pieces = transcript.text, [size for size in transcript.shown.pieces if size]
    if given != text:
        whole = yield from prove(body, text, chat=stream.chat, engine=stream.engine)
    if transcript.counts is None or not transcript.counts.shown:
        check_count(whole.shown, pieces)
        if stream.engine != LLAMA_CPP:
            # That sends each token in an event of its own.
            yield from spelt(model_field(body), text, pieces)
        return counted
    reported = tokens_generated(body, text, whole.shown, transcript.counts, transcript.finish, pieces)
    if reported == whole.shown and not transcript.finish:
        return counted
    if given != text or is_deterministic(body):
        raise UnprovenError("its text is spelt in other tokens than the model has said")
    return Tokens(transcript.counts.prompt, reported, spans=counted.spans)


def _open_by_ids(stream: BrokenStream, tokens: TokenLog) -> PlainWay:
    """The same where the token ids are known. A completion is asked for behind them."""
    body, transcript = stream.body, stream.transcript
    proven = yield from prove_tokens(body, tokens, chat=stream.chat)
    text, is_all = transcript.text, proven.raw.startswith(transcript.text)
    if transcript.finish and is_all:
        return _last_events(stream, proven.counts)
    kept = yield from proven.within(text)
    if is_all and not kept.ids:
        return (yield from again(stream))
    if transcript.finish or not kept.ids:
        raise UnprovenError("the tokens already sent do not spell its text")
    left = remaining(body, kept.counts.shown, chat=stream.chat, engine=stream.engine)
    if left is None:
        return _last_events(stream, proven.counts)
    if stream.chat:
        longer = extended(body, kept.raw, chat=True)
        if (yield from rendered(longer))[0] != kept.prompt + kept.ids:
            if is_deterministic(body):
                raise UnprovenError("its text is spelt in other tokens than the model has said")
            yield from prove(body, kept.raw, chat=True, engine=stream.engine)
    else:
        longer = body | {"prompt": kept.prompt + kept.ids}
    joiner = StreamJoiner(body, transcript, kept.counts, len(kept.raw), ids=kept.ids)
    longer |= left | joiner.ask_usage()
    return NextPart(stream.target, stream.asks_ids(orjson.dumps(longer)), joiner)


def open_tokens(stream: BrokenStream) -> PlainWay:
    """The same request behind exactly the tokens that were generated: then nothing that depends on them
    changes, and the engine itself tells text from calls. Its first event must show that it took them.
    """
    text = stream.transcript.text
    proven = yield from prove_tokens(stream.body, ids_of(stream.transcript))
    # Of characters that are not whole nobody can say which were held back.
    if not text or not proven.raw.endswith(text) or proven.raw.endswith(UNKNOWN_CHARACTER):
        raise UnprovenError("its last tokens are not those of its text")
    left = remaining(stream.body, proven.counts.shown, chat=True, engine=stream.engine)
    if left is None:
        return _last_events(stream, proven.counts)
    tokens = proven.prompt + proven.ids
    longer = stream.body | given(tokens)
    joiner = StreamJoiner(stream.body, stream.transcript, proven.counts, prompt=tokens)
    counting = joiner.ask_usage()
    return NextPart(stream.target, stream.asks_ids(orjson.dumps(longer | left | counting)), joiner)


def by_tokens(stream: BrokenStream) -> PlainWay:
    """The tokens of the prompt and of what was shown: the unit sends raw text, which the gate splits."""
    proven = yield from prove_tokens(stream.body, ids_of(stream.transcript))
    if UNKNOWN_CHARACTER in proven.raw:
        raise UnprovenError("the tokens already sent are no text of their own")
    prompt = (yield from proven.prompt_text()) if stream.body.get("tools") else ""
    chat = RawChat(stream.body, stream.transcript, proven.raw, prompt)
    left = remaining(stream.body, proven.counts.shown, chat=True, engine=stream.engine)
    if left is None:
        return _last_events(stream, proven.counts)
    body = resumed_by_ids(stream.body, proven, left)
    joiner = StreamJoiner(stream.body, stream.transcript, proven.counts, raw=chat)
    return NextPart(_COMPLETIONS, orjson.dumps(body), joiner)


def again(stream: BrokenStream) -> PlainWay:
    """The same request: the unit must repeat what was shown. This needs no proof beforehand."""
    yield from ()
    joiner = StreamJoiner(stream.body, stream.transcript, Tokens(None, 0), 0, again=True, ids=[])
    sent = stream.asks_ids(stream.sent)
    if stream.transcript.counts is not None and joiner.ask_usage():
        sent = asking_counts(sent)
    return NextPart(stream.target, sent, joiner)


MakePlainWay = Callable[[BrokenStream], PlainWay]

PLAIN_WAYS: dict[ResumeKind, tuple[MakePlainWay, ...]] = {
    ResumeKind.TEXT: (open_message, open_tokens, again),
    ResumeKind.TOOLS: (open_message, open_tokens, again),
    ResumeKind.TOOL_CALL: (by_tokens, again),
    ResumeKind.REASONING: (open_tokens, again, by_tokens),
    ResumeKind.LOGPROBS: (open_tokens, again),
    ResumeKind.PENALTIES: (open_tokens, again),
    ResumeKind.CONSTRAINED: (again,),
}
_NEEDS: dict[MakePlainWay, int] = {open_message: OPEN, open_tokens: TOKENS, by_tokens: TOKENS, again: AGAIN}


def ways_for(stream: BrokenStream) -> list[MakePlainWay]:
    """The ways to try, in order."""
    shown = stream.transcript.shown
    if not (shown.size or shown.calls or stream.transcript.finish):
        return [again]
    ways = [way for way in PLAIN_WAYS[kind_of(stream.body, shown)] if stream.ways & _NEEDS[way]]
    # What goes on behind the tokens of a completion is an open text.
    return ways if stream.chat else [way for way in ways if _NEEDS[way] != TOKENS]


def _last_events(stream: BrokenStream, tokens: Tokens) -> bytes:
    events = ending(stream.body, stream.transcript, tokens, chat=stream.chat)
    if events is None:
        raise UnprovenError("the text was complete, but only the broken unit knew the token counts")
    return events


# Asks a unit what a proof has to know: its requests are sent one after another.


MakeHead = Callable[[bytes, int], bytes]
"""The head of a request to the unit, of a path and the length of a body."""
Proved = NextPart | bytes | str | Failure
"""What comes of a proof: what the unit gets next; the last events, because the text is complete; why the unit
cannot resume the stream; or how it failed before that was known.
"""


class Questions:
    """One proof, on one unit; `tell` gets its result, once, unless it is abandoned."""

    def __init__(self, proof: PlainWay, tell: Callable[[Proved], None], pool: Pool, head: MakeHead) -> None:
        self._proof = proof
        self._tell = tell
        self._pool = pool
        self._head = head
        self._optional = False
        self._call: Call | None = None

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited."""
        return self._call is not None and not self._call.over

    def begin(self, *, fresh: bool) -> None:
        """Ask the first one, on a new connection if `fresh`."""
        self._ask(None, fresh=fresh)

    def abandon(self) -> None:
        if self._call is not None:
            self._call.abandon()

    def answered(self, status: int, body: bytes) -> None:
        if status >= 500 or status == 429:
            kind = FailureKind.BUSY if status in BUSY_STATUSES else FailureKind.UNIT_ERROR
            reason = f"it answered {status} to the check before resuming the stream"
            self._tell(Failure(kind, reason))
            return
        answer = object_of(body) if status == 200 else None
        if answer is None and not self._optional:
            self._tell(f"its engine answered {status} to the check before resuming the stream")
        else:
            self._ask(answer or {})

    def failed(self, failure: Failure) -> None:
        self._tell(failure)

    def _ask(self, answer: dict[str, Any] | None, *, fresh: bool = False) -> None:
        try:
            # Sending None starts the generator.
            question = self._proof.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self._tell(end.value)
        except UnprovenError as error:
            self._tell(str(error))
        else:
            body = orjson.dumps(question.body)
            self._optional = question.is_optional
            self._call = Call(self, self._pool, self._head(question.path.encode(), len(body)), body)
            self._call.begin(fresh=fresh)


# Resuming a broken stream of chat or completions: what was sent, the proof that another unit can resume it.
#
# eligible.py and transcript.py decide what may be resumed, the ways above how; Questions sends the
# requests of the proof to the unit.


class Resumption:
    """One broken stream, of which `replay` has been shown."""

    # From `begin` on.
    _tell: Callable[[Proved], None]
    _pool: Pool
    _head: MakeHead
    _stream: BrokenStream
    _left: list[MakePlainWay]

    def __init__(self, request: Request, replay: ReplayBuffer, *, chat: bool) -> None:
        self._request = request
        self.replay = replay
        self._chat = chat
        self._body: dict[str, Any] = orjson.loads(request.body)
        self._questions: Questions | None = None
        self._reason = ""
        """Why the first way failed."""

    @property
    def is_proving(self) -> bool:
        return self._questions is not None and self._questions.is_open

    def why_not(self) -> str:
        """Why it cannot be continued as it stands; empty when it can, or is complete."""
        has_ids = bool(self.replay.ways & TOKENS)
        if reason := why_ineligible(self._body, chat=self._chat, has_ids=has_ids):
            if reason is LONG_STOPS:
                reached("stop_bytes")
            return reason
        transcript = plain(self.replay)
        if not transcript.closed:
            return "it broke inside an event"
        return transcript.why_not or ("" if self.replay.ways else "only its end is in the replay buffer")

    def last_events(self) -> bytes | None:
        """The events that a complete text still lacks, if no unit is needed for them."""
        transcript = plain(self.replay)
        if transcript.is_done:
            return b""
        return ending(self._body, transcript, None, chat=self._chat) if transcript.finish else None

    def begin(
        self, tell: Callable[[Proved], None], pool: Pool, engine: str, head: MakeHead, *, fresh: bool = False
    ) -> None:
        """Ask a unit that runs `engine` to resume the stream; `tell` gets the result."""
        self._tell, self._pool, self._head = tell, pool, head
        request, replay = self._request, self.replay
        self._stream = BrokenStream(
            self._body, request.body, request.target, plain(replay), replay.ways, self._chat, engine
        )
        self._left, self._reason = ways_for(self._stream), ""
        self._try_next(fresh=fresh)

    def abandon(self) -> None:
        if self._questions is not None:
            self._questions.abandon()

    def _proven(self, found: Proved) -> None:
        """If the unit cannot go on in this way, the first reason is told when no other way is left."""
        if isinstance(found, str):
            self._reason = self._reason or found
            self._try_next()
        else:
            self._tell(found)

    def _try_next(self, *, fresh: bool = False) -> None:
        if not self._left:
            self._tell(self._reason or "there is no way to continue it")
            return
        way = self._left.pop(0)(self._stream)
        self._questions = Questions(way, self._proven, self._pool, self._head)
        self._questions.begin(fresh=fresh)
