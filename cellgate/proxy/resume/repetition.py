"""What a unit that starts again must repeat of what was shown, before anything it says is new. Pure.

The repeated part never goes to the client again. Whatever differs from what was shown is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cellgate.proxy.resume.shown import REASONING, Shown, ShownCall, logprobs_in
from cellgate.proxy.wire.sse import split

THINK = "<think>"
"""Begins reasoning. vLLM's `deepseek_r1` shows it if it comes in one event with more tokens, else not."""


class MismatchError(Exception):
    """The second unit sent what cannot follow: something that differs from what was sent before, or nothing.

    `shown` is what the client still gets of the events before it.
    """

    shown = b""


def stitched(events: bytes, stitch: Callable[[bytes], bytes], is_over: Callable[[], bool]) -> bytes:
    """What the client gets of complete events: each is stitched, until the answer is over. Raises
    MismatchError with what it gets of those before.
    """
    out = []
    whole, tail = split(events)
    # The last event of a stream may lack its empty line.
    for event in [*whole, tail] if tail else whole:
        try:
            out.append(stitch(event))
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

    def __init__(self, text: str, shown: Shown | None = None) -> None:
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
