"""Two streams made one: the events of the unit that goes on, rewritten as if the first had sent them. Pure.

The client has one id, one role, one count of tokens and one end; where the seam is, nothing tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from proxy.stream.plan import Tokens
from proxy.stream.said import DONE, Said
from proxy.stream.seam import SeamStops, stops_of
from proxy.stream.sse import payload, split


class UnlikeError(Exception):
    """The unit that goes on says what cannot follow: something else than was shown, or no text at all."""


class Stitch:
    """Rewrites what one unit sends. `said` is what the client has been shown, and grows with it.

    It goes on from the first `start` characters of the text, which are `tokens` by its count. `is_over`: all
    was said, the unit is not to be heard any more.
    """

    __slots__ = ("_again", "_seam", "_spells_stops", "_tokens", "_wants_usage", "is_over", "said")

    def __init__(self, body: dict[str, Any], said: Said, tokens: Tokens, start: int | None = None) -> None:
        self.said = said
        self._tokens = tokens
        text = said.text
        start = len(text) if start is None else start
        self._seam = SeamStops(text[:start], _stops(body, tokens.shown))
        # What it has to say once more, because it was shown behind the place where it goes on.
        self._again = text[start:]
        self._spells_stops = bool(body.get("include_stop_str_in_output"))
        self._wants_usage = wants_usage(body)
        self.is_over = False

    def feed(self, events: bytes) -> bytes:
        """Complete events in, what the client gets out. Raises UnlikeError."""
        out = []
        for event in split(events)[0]:
            data = payload(event)
            if data == DONE:
                self.said.is_done = True
            elif data is not None:
                event = self._rewritten(data)
            out.append(event)
            if self.is_over:
                break
        return b"".join(out)

    def _rewritten(self, data: bytes) -> bytes:
        document = orjson.loads(data) if data.startswith(b"{") else None
        if not isinstance(document, dict):
            raise UnlikeError("an event that is no JSON object")
        document.update((key, value) for key, value in self.said.frame.items() if key in document)
        if usage := document.get("usage"):
            document["usage"] = _summed(usage, self._tokens)
        choices = document.get("choices")
        if choices and not self._stitch_choice(choices[0]) and not usage:
            return b""
        self.said.take(document)
        if self.said.strange:
            raise UnlikeError(self.said.strange)
        event = _event(document)
        if self.is_over:
            event += self._ended(document)
        return event

    def _stitch_choice(self, choice: dict[str, Any]) -> bool:
        """Whether it has anything for the client."""
        part, key = (choice["delta"], "content") if choice.get("delta") is not None else (choice, "text")
        if part is not choice and self.said.has_role:
            part.pop("role", None)
        text = part.get(key) or ""
        if self._again or not self._seam.is_over:
            text = self._news(self._across_seam(choice, text), ended=bool(choice.get("finish_reason")))
            if text or key in part:
                part[key] = text
        return bool(text or choice.get("finish_reason") or (part is not choice and any(part.values())))

    def _across_seam(self, choice: dict[str, Any], text: str) -> str:
        """What may be shown of `text`; it ends where a stop string does that began before the seam."""
        shown, stop = self._seam.feed(text)
        if stop is not None:
            choice["finish_reason"] = "stop"
            self.is_over = True
            return stop if self._spells_stops else ""
        return shown + self._seam.flush() if choice.get("finish_reason") else shown

    def _news(self, text: str, *, ended: bool) -> str:
        """`text` without what was shown already."""
        again = self._again
        if not again.startswith(text[: len(again)]) or (ended and len(text) < len(again)):
            raise UnlikeError("another text than had been shown")
        self._again = again[len(text) :]
        return text[len(again) :]

    def _ended(self, document: dict[str, Any]) -> bytes:
        """What follows the event that ends the text, when it is us who end it."""
        self.said.is_done = True
        if not self._wants_usage or self._tokens.prompt is None:
            return _event(DONE)
        # How many tokens these were only the unit could tell; an event is usually one.
        usage = _usage(self._tokens.prompt, self._tokens.shown + self.said.events)
        return _event({**document, "choices": [], "usage": usage}) + _event(DONE)


def ending(body: dict[str, Any], said: Said, tokens: Tokens | None, *, chat: bool) -> bytes | None:
    """The last events of a stream whose text is complete; None when they cannot be known.

    `tokens` are needed when the client wants its usage and has not been told.
    """
    kind = "chat.completion.chunk" if chat else "text_completion"
    document = {"object": kind, **said.frame}
    out = b""
    if not said.finish:
        part: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        out += _event({**document, "choices": [{"index": 0, **part, "finish_reason": "length"}]})
    if wants_usage(body) and not said.has_usage:
        if tokens is None or tokens.prompt is None:
            return None
        out += _event({**document, "choices": [], "usage": _usage(tokens.prompt, tokens.shown)})
    return out + _event(DONE)


def wants_usage(body: dict[str, Any]) -> bool:
    """Whether the client has asked for an event with the token counts at the end."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _stops(body: dict[str, Any], shown: int) -> Iterable[str]:
    least = body.get("min_tokens")
    return () if isinstance(least, int) and least > shown else stops_of(body)


def _summed(usage: dict[str, Any], tokens: Tokens) -> dict[str, Any]:
    """What the unit took for a part of the prompt was generated."""
    said = (usage.get("completion_tokens") or 0) + tokens.shown
    prompt = usage.get("prompt_tokens", 0) - tokens.shown if tokens.prompt is None else tokens.prompt
    usage |= _usage(prompt, said)
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
        details["cached_tokens"] = min(cached, prompt)
    return usage


def _usage(prompt: int, said: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _event(data: bytes | dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % (data if isinstance(data, bytes) else orjson.dumps(data))
