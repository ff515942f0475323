"""What was shown of one answer: its text, its reasoning, its tool calls. Pure.

Fields of a delta as OpenAI's API, vLLM, SGLang and llama.cpp name them; the reasoning is `reasoning` or
`reasoning_content`, and some engines send it under both names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from cellgate.proxy.http.sse import split

REASONING = ("reasoning", "reasoning_content")

_PART_CHARS = 1 << 16
"""Texts are joined up to this length."""
_MAX_CALLS = 256
_EMPTY: tuple[object, ...] = (None, "", [], {}, False)
_OF_A_CHOICE = frozenset(
    {"index", "delta", "text", "finish_reason", "stop_reason", "matched_stop", "logprobs"}
)
_OF_A_DELTA = frozenset({"role", "content", "tool_calls", *REASONING})
_OF_A_CALL = frozenset({"index", "id", "type", "function"})
_SHOWN_OF_A_FUNCTION = frozenset({"name", "arguments"})


class GrowingText:
    """A text that comes in pieces."""

    __slots__ = ("_parts", "_settled")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._settled = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __str__(self) -> str:
        if len(self._parts) > 1:
            self._parts, self._settled = ["".join(self._parts)], 0
        return self._parts[0] if self._parts else ""

    @property
    def last(self) -> str:
        """The last piece; there must be one."""
        return self._parts[-1]

    def add(self, piece: str) -> None:
        if piece:
            self._parts.append(piece)

    def settle(self) -> None:
        """Join small pieces: very many would take more memory, and leave holes in it when they go."""
        at = self._settled
        if at and len(self._parts[at - 1]) < _PART_CHARS:
            at -= 1
        if len(self._parts) > at:
            self._parts[at:] = ["".join(self._parts[at:])]
        self._settled = len(self._parts)


class ShownCall:
    """One tool call; `arguments` is JSON, as far as it has come."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = self.name = ""
        self.arguments = GrowingText()


class SentText:
    """All that was shown of the one choice. `logprobs` is of how many tokens log probabilities were sent,
    `pieces` how many characters each event has brought, 0 of some without any.
    """

    __slots__ = ("calls", "logprobs", "pieces", "reasoning", "reasoning_names", "size", "text")

    def __init__(self) -> None:
        self.text = GrowingText()
        self.reasoning = GrowingText()
        self.reasoning_names: tuple[str, ...] = ()
        self.calls: list[ShownCall] = []
        self.logprobs = 0
        self.size = 0
        self.pieces = array("I")

    def take(self, choice: dict[str, Any]) -> GrowingText | None:
        """Add a choice that `unsupported_in` has passed; returns what grew, if that is one text."""
        grown, before = list[GrowingText](), self.size
        delta = choice.get("delta") or {}
        if text := delta.get("content") or choice.get("text"):
            grown.append(self.text)
            self.grow(self.text, text)
        names = tuple(name for name in REASONING if delta.get(name))
        if names:
            self.reasoning_names = names
            grown.append(self.reasoning)
            self.grow(self.reasoning, delta[names[0]])
        for each in delta.get("tool_calls") or ():
            grown.append(self._take_call(each))
        if grown:
            self.pieces.append(self.size - before)
        if count := logprobs_in(choice):
            self.logprobs += count
            return None
        return grown[0] if len(grown) == 1 else None

    @property
    def beyond_text(self) -> str:
        """What it has besides text, in the words of the API; empty: nothing."""
        if self.calls:
            return "tool_calls"
        return "".join(self.reasoning_names[:1]) or ("logprobs" if self.logprobs else "")

    def settle(self) -> None:
        """Keep it in little memory."""
        for grown in (self.text, self.reasoning, *(call.arguments for call in self.calls)):
            grown.settle()

    def _take_call(self, each: dict[str, Any]) -> GrowingText:
        call = self.call_at(each.get("index") or 0)
        function = each.get("function") or {}
        call.id = call.id or each.get("id") or ""
        call.name = call.name or function.get("name") or ""
        self.grow(call.arguments, function.get("arguments") or "")
        return call.arguments

    def call_at(self, index: int) -> ShownCall:
        """The call of this index; it begins if it is the next one."""
        while len(self.calls) <= index:
            self.calls.append(ShownCall())
        return self.calls[index]

    def grow(self, grown: GrowingText, piece: str) -> None:
        """Add to one of the texts."""
        self.size += len(piece)
        grown.add(piece)


def logprobs_in(choice: dict[str, Any]) -> int:
    """Of how many tokens a choice has log probabilities: of chat, or of completions."""
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("content") or logprobs.get("tokens") or ())


def unsupported_in(document: dict[str, Any]) -> str:
    """What the object of an event has besides one choice with a text, reasoning, tool calls and log
    probabilities; empty: nothing.
    """
    choices = document.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return "choices in an unknown format"
    if len(choices) > 1 or any(choice.get("index") for choice in choices):
        return "a second choice"
    for choice in choices:
        delta = {} if choice.get("delta") is None else choice["delta"]
        if not isinstance(delta, dict):
            return "a choice in an unknown format"
        if strange := _unknown(choice, _OF_A_CHOICE) or _unknown(delta, _OF_A_DELTA):
            return strange
        texts = (choice.get("text"), *(delta.get(name) for name in ("content", *REASONING)))
        if not all(isinstance(text or "", str) for text in texts):
            return "a content that is not text"
        if not isinstance(choice.get("logprobs") or {}, dict):
            return "log probabilities in an unknown format"
        if strange := _strange_calls(delta.get("tool_calls") or []):
            return strange
    return ""


def _strange_calls(calls: object) -> str:
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return "tool_calls in an unknown format"
    return ""


def _is_call(each: object) -> bool:
    if not isinstance(each, dict) or _unknown(each, _OF_A_CALL):
        return False
    function = each.get("function") or {}
    if not isinstance(function, dict) or _unknown(function, _SHOWN_OF_A_FUNCTION):
        return False
    index = each.get("index") or 0
    texts = (each.get("id"), each.get("type"), function.get("name"), function.get("arguments"))
    return (
        type(index) is int and 0 <= index < _MAX_CALLS and all(isinstance(text or "", str) for text in texts)
    )


def _unknown(fields: dict[str, Any], known: frozenset[str]) -> str:
    """An unknown field with a value."""
    return next((key for key in fields.keys() - known if fields[key] not in _EMPTY), "")


# What a unit that starts again must repeat of what was shown, before anything it says is new. Pure.
#
# The repeated part never goes to the client again. Whatever differs from what was shown is found here.


THINK = "<think>"
"""Begins reasoning. vLLM's `deepseek_r1` shows it if it comes in one event with more tokens, else not."""


class MismatchError(Exception):
    """The second unit sent what cannot follow: something that differs from what was sent before, or nothing.

    `shown` is what the client still gets of the events before it.
    """

    shown = b""


def stitched(events: bytes, joiner: Callable[[bytes], bytes], is_over: Callable[[], bool]) -> bytes:
    """What the client gets of complete events: each is stitched, until the answer is over. Raises
    MismatchError with what it gets of those before.
    """
    out = []
    whole, tail = split(events)
    # The last event of a stream may lack its empty line.
    for event in [*whole, tail] if tail else whole:
        try:
            out.append(joiner(event))
        except MismatchError as error:
            error.shown = b"".join(out)
            raise
        if is_over():
            break
    return b"".join(out)


class Repetition:
    """Takes from each choice of the unit what was `shown` before. `is_over`: all of it has come again.

    `text` is what it has to repeat of the text, `whole` whether it starts from the beginning: then it has to
    repeat reasoning and tool calls as well.
    """

    __slots__ = ("_calls", "_is_opening", "_logprobs", "_reasoning", "_text")

    def __init__(self, text: str, shown: SentText | None = None) -> None:
        self._text = text
        self._reasoning = str(shown.reasoning).removeprefix(THINK) if shown else ""
        self._is_opening = bool(self._reasoning)
        self._calls = [_ToRepeat(call) for call in shown.calls] if shown else []
        self._logprobs = shown.logprobs if shown else 0

    @property
    def is_over(self) -> bool:
        return not (self._text or self._reasoning or self._logprobs or any(self._calls))

    def cut_text(self, text: str) -> str:
        """The new part of `text`."""
        news, self._text = _cut(text, self._text)
        return news

    def cut_delta(self, choice: dict[str, Any]) -> None:
        """Leave what is new of the choice's reasoning, tool calls and log probabilities."""
        delta = choice.get("delta") or {}
        rest = self._reasoning
        for name in REASONING:
            if piece := delta.get(name):
                piece = piece.removeprefix(THINK) if self._is_opening else piece
                delta[name], rest = _cut(piece, self._reasoning)
        self._is_opening = self._is_opening and rest == self._reasoning
        self._reasoning = rest
        if delta.get("tool_calls"):
            delta["tool_calls"] = [each for each in delta["tool_calls"] if self._is_news(each)]
        if self._logprobs and (count := logprobs_in(choice)):
            cut = min(count, self._logprobs)
            self._logprobs -= cut
            choice["logprobs"] = {name: each[cut:] for name, each in choice["logprobs"].items() if each}

    def check(self, choice: dict[str, Any], text: str) -> None:
        """`choice` and `text` are what is new: nothing may be, as long as anything has to be repeated.

        Raises MismatchError.
        """
        delta = choice.get("delta") or {}
        is_new = text or delta.get("tool_calls") or any(delta.get(name) for name in REASONING)
        if (is_new or choice.get("finish_reason")) and not self.is_over:
            raise MismatchError("something else than what was sent before")

    def _is_news(self, each: dict[str, Any]) -> bool:
        index = each.get("index") or 0
        return index >= len(self._calls) or self._calls[index].cut(each)


class _ToRepeat:
    """One tool call that was shown."""

    __slots__ = ("_arguments", "_call", "_is_named")

    def __init__(self, call: ShownCall) -> None:
        self._call = call
        self._arguments = str(call.arguments)
        self._is_named = not call.name

    def __bool__(self) -> bool:
        return bool(self._arguments) or not self._is_named

    def cut(self, each: dict[str, Any]) -> bool:
        """Whether there is anything new in this part of the call; the rest is taken from it."""
        function = each.get("function") or {}
        if name := function.get("name"):
            if self._call.name and name != self._call.name:
                raise MismatchError(f"a call of {name[:64]!r} instead of the one that was sent before")
            self._is_named = True
        if self._call.name:
            # The client knows the call by the id that it was sent first.
            each.pop("id", None)
            each.pop("type", None)
            function.pop("name", None)
        if arguments := function.get("arguments"):
            function["arguments"], self._arguments = _cut(arguments, self._arguments)
        return bool(function.get("arguments")) or not self._call.name


def _cut(piece: str, again: str) -> tuple[str, str]:
    """What is new of `piece`, and what is left to be repeated of `again`."""
    if not again.startswith(piece[: len(again)]):
        raise MismatchError("a text that differs from what was sent before")
    return piece[len(again) :], again[len(piece) :]
