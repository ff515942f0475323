"""Splits the raw text of a model into reasoning, text and tool calls, piece by piece. Pure.

A unit that continues by token ids sends raw text: its engine's parsers do not run. So the gate splits it, and
only in formats in which what a client sees is copied from the raw text:

- reasoning between `<think>` and `</think>`, or from the beginning on, where the prompt has opened it;
- calls as vLLM's `hermes` parser shows them: `<tool_call>{"name": "…", "arguments": {…}}</tool_call>`,
  without any text between or behind them.

That it does so as the engine does is proven for each stream: all that was shown must come out (raw_chat.py).
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

from cellgate.proxy.resume.repetition import THINK, MismatchError

THINK_END = "</think>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"')
_ARGUMENTS = re.compile(r'\s*,\s*"arguments"\s*:\s*(?=\{)')
_HEAD_CHARS = 4096
_TAIL = re.compile(r"\s*\}\s*")


class Part(Enum):
    """What a piece is a part of."""

    REASONING = auto()
    TEXT = auto()
    NAME = auto()
    """The name of the next call, whole."""
    ARGUMENTS = auto()
    """Of the last call."""


class Piece(NamedTuple):
    """A piece of an answer as it is shown."""

    part: Part
    text: str


class _State(Enum):
    BEGIN = auto()
    REASONING = auto()
    TEXT = auto()
    CALL_HEAD = auto()
    NAMED = auto()
    ARGUMENTS = auto()
    CALL_TAIL = auto()
    BETWEEN = auto()


class RawAnswer:
    """Splits one answer. `is_reasoning`: it begins with reasoning, of which the marker is shown as well if
    `is_marked`; `calls`: it may have tool calls.
    """

    __slots__ = ("_calls", "_depth", "_held", "_in_string", "_is_escaped", "_out", "_space", "_state")

    def __init__(self, *, is_reasoning: bool, calls: bool, is_marked: bool = False) -> None:
        begin = _State.REASONING if is_marked else _State.BEGIN
        self._state = begin if is_reasoning else _State.TEXT
        self._calls = calls
        self._held = ""
        self._out: list[Piece] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._space = ""
        """White space of arguments: an engine shows it with what follows."""

    def feed(self, text: str) -> list[Piece]:
        """What can be shown with this text. Raises MismatchError for a call in another format."""
        self._held += text
        while self._held and self._step():
            pass
        out, self._out = self._out, []
        return out

    def _step(self) -> bool:
        """Take from what is held; False: that needs more text."""
        return _STEPS[self._state](self)

    def _begin(self) -> bool:
        if THINK.startswith(self._held) and self._held != THINK:
            return False
        self._held, self._state = self._held.removeprefix(THINK), _State.REASONING
        return True

    def _reason(self) -> bool:
        return self._until(THINK_END, Part.REASONING, _State.TEXT)

    def _say(self) -> bool:
        if not self._calls:
            self._show(Part.TEXT, self._held)
            self._held = ""
            return False
        return self._until(TOOL_CALL, Part.TEXT, _State.CALL_HEAD)

    def _wait_for_call(self) -> bool:
        """Text behind a call is not shown."""
        before, found, self._held = self._held.partition(TOOL_CALL)
        if not found:
            self._held = before[len(before) - _overlap(before, TOOL_CALL) :]
            return False
        self._state = _State.CALL_HEAD
        return True

    def _begin_call(self) -> bool:
        found = self._match(_NAME, _State.NAMED)
        if found is not None:
            self._show(Part.NAME, found[1])
        return found is not None

    def _begin_arguments(self) -> bool:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        return self._match(_ARGUMENTS, _State.ARGUMENTS) is not None

    def _match(self, pattern: re.Pattern[str], state: _State) -> re.Match[str] | None:
        """What is held must begin with this, which leads to another state; None: it may yet."""
        found = pattern.match(self._held)
        if found is not None:
            self._held, self._state = self._held[found.end() :], state
        elif len(self._held) > _HEAD_CHARS or TOOL_CALL_END in self._held:
            raise MismatchError("a tool call in an unknown format")
        return found

    def _argue(self) -> bool:
        for at, char in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if not self._depth:
                    self._show(Part.ARGUMENTS, self._space + self._held[: at + 1])
                    self._space = ""
                    self._held = self._held[at + 1 :]
                    self._state = _State.CALL_TAIL
                    return True
        text = self._space + self._held
        shown = text.rstrip()
        self._show(Part.ARGUMENTS, shown)
        self._held, self._space = "", text[len(shown) :]
        return False

    def _end_call(self) -> bool:
        before, found, behind = self._held.partition(TOOL_CALL_END)
        if not found:
            if not _may_be_tail(self._held):
                raise MismatchError("a tool call in an unknown format")
            return False
        if not _TAIL.fullmatch(before):
            raise MismatchError("a tool call in an unknown format")
        self._held, self._state = behind, _State.BETWEEN
        return True

    def _until(self, marker: str, part: Part, state: _State) -> bool:
        """Show what precedes the marker, which begins another state."""
        before, found, behind = self._held.partition(marker)
        if found:
            self._show(part, before)
            self._held, self._state = behind, state
            return True
        held = _overlap(before, marker)
        self._show(part, before[: len(before) - held])
        self._held = before[len(before) - held :]
        return False

    def _show(self, part: Part, text: str) -> None:
        if text:
            self._out.append(Piece(part, text))


_STEPS = {
    _State.BEGIN: RawAnswer._begin,
    _State.REASONING: RawAnswer._reason,
    _State.TEXT: RawAnswer._say,
    _State.CALL_HEAD: RawAnswer._begin_call,
    _State.NAMED: RawAnswer._begin_arguments,
    _State.ARGUMENTS: RawAnswer._argue,
    _State.CALL_TAIL: RawAnswer._end_call,
    _State.BETWEEN: RawAnswer._wait_for_call,
}


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if marker.startswith(text[-size:])), 0)


def _may_be_tail(text: str) -> bool:
    rest = text.lstrip()
    if rest.startswith("}"):
        rest = rest[1:].lstrip()
    return TOOL_CALL_END.startswith(rest)
