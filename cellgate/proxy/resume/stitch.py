"""Joins two streams: the events of the second unit are rewritten as if the first had sent them. Pure.

The client sees one id, one role, one token count and one end; the boundary is invisible.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.raw_chat import RawChat
from cellgate.proxy.resume.repeat_guard import RepeatGuard
from cellgate.proxy.resume.repetition import MismatchError, Repetition, stitched
from cellgate.proxy.resume.shown import REASONING, logprobs_in, unsupported_in
from cellgate.proxy.resume.stop_strings import BoundaryStops, stops_of
from cellgate.proxy.resume.transcript import DONE, STOPPED_BY, Transcript
from cellgate.proxy.wire.sse import WORKING, extra_field, payload

_COUNTS = ("prompt_tokens", "completion_tokens")


_WORKING_EVENTS = 64
"""The client gets a comment for so many events that repeat what it knows."""


class Stitch:
    """Rewrites the events of one unit. `transcript` is what the client was sent, and grows with them.

    The unit continues after the first `start` characters of the text, which are `tokens` by its count; or it
    starts from the very beginning (`again`), and must repeat all that was shown.
    `raw`: it sends raw text, which is split. `prompt`: its first event must have these token ids.
    `is_over`: the answer is complete, further events are ignored.
    """

    __slots__ = (
        "_again",
        "_asks_usage",
        "_events",
        "_finish",
        "_guard",
        "_options",
        "_prompt",
        "_raw",
        "_repeated",
        "_repetition",
        "_spells_stops",
        "_stop_strings",
        "_tokens",
        "_usage_so_far",
        "_used",
        "_wants_usage",
        "is_over",
        "transcript",
    )

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
    ) -> None:
        self.transcript = transcript
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
        if self._stop_strings.is_over or not self._wants_usage or not isinstance(self._options, dict):
            return {}
        self._asks_usage = True
        return {"stream_options": {**self._options, "continuous_usage_stats": True}}

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
            self.transcript.tokens.take(document)
        if self._raw is not None:
            document = self._raw.translated(document)
        if strange := unsupported_in(document):
            raise MismatchError(strange)
        document.update((key, value) for key, value in self.transcript.frame.items() if key in document)
        choices = document.get("choices")
        usage = self._take_usage(document)
        if choices and not self._stitch_choice(choices[0]) and not usage:
            self._repeated += 1
            return b"" if self._repeated % _WORKING_EVENTS else WORKING
        self.transcript.take(document)
        event = _event(document)
        if self.is_over:
            event += self._ended(document)
        return event

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
        if not isinstance(usage, dict) or not all(isinstance(usage.get(key) or 0, int) for key in _COUNTS):
            raise MismatchError("a usage in an unknown format")
        self._used = _summed(usage, self._tokens)
        if choices and self._asks_usage and not self._usage_so_far:
            # The gate requested it, not the client.
            del document["usage"]
            return None
        return self._used

    def _stitch_choice(self, choice: dict[str, Any]) -> bool:
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
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
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
