"""Splits the raw text of a model into reasoning, text and tool calls, piece by piece. Pure.

A unit that continues by token ids sends raw text: its engine's parsers do not run. So the gate splits it, and
only in formats in which what a client sees is copied from the raw text:

- reasoning between `<think>` and `</think>`, or from the beginning on, where the prompt has opened it;
- calls as vLLM's `hermes` parser shows them: `<tool_call>{"name": "…", "arguments": {…}}</tool_call>`,
  without any text between or behind them.

That it does so as the engine does is proven for each stream: all that was shown must come out (RawChat).
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Any, NamedTuple

from xxhash import xxh3_64_hexdigest

from cellgate.proxy.resume.eligible import stops_of
from cellgate.proxy.resume.proof import UnprovenError
from cellgate.proxy.resume.shown import REASONING, THINK, MismatchError
from cellgate.proxy.resume.transcript import Transcript

THINK_END = "</think>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_RAW_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"')
_ARGUMENTS = re.compile(r'\s*,\s*"arguments"\s*:\s*(?=\{)')
_HEAD_CHARS = 4096
_TAIL = re.compile(r"\s*\}\s*")


class RawPart(Enum):
    """What a piece is a part of."""

    REASONING = auto()
    TEXT = auto()
    NAME = auto()
    """The name of the next call, whole."""
    ARGUMENTS = auto()
    """Of the last call."""


class Piece(NamedTuple):
    """A piece of an answer as it is shown."""

    part: RawPart
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
        return _STATE_STEPS[self._state](self)

    def _begin(self) -> bool:
        if THINK.startswith(self._held) and self._held != THINK:
            return False
        self._held, self._state = self._held.removeprefix(THINK), _State.REASONING
        return True

    def _reason(self) -> bool:
        return self._until(THINK_END, RawPart.REASONING, _State.TEXT)

    def _say(self) -> bool:
        if not self._calls:
            self._show(RawPart.TEXT, self._held)
            self._held = ""
            return False
        return self._until(TOOL_CALL, RawPart.TEXT, _State.CALL_HEAD)

    def _wait_for_call(self) -> bool:
        """Text behind a call is not shown."""
        before, found, self._held = self._held.partition(TOOL_CALL)
        if not found:
            self._held = before[len(before) - _overlap(before, TOOL_CALL) :]
            return False
        self._state = _State.CALL_HEAD
        return True

    def _begin_call(self) -> bool:
        found = self._match(_RAW_NAME, _State.NAMED)
        if found is not None:
            self._show(RawPart.NAME, found[1])
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
                    self._show(RawPart.ARGUMENTS, self._space + self._held[: at + 1])
                    self._space = ""
                    self._held = self._held[at + 1 :]
                    self._state = _State.CALL_TAIL
                    return True
        text = self._space + self._held
        shown = text.rstrip()
        self._show(RawPart.ARGUMENTS, shown)
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

    def _until(self, marker: str, part: RawPart, state: _State) -> bool:
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

    def _show(self, part: RawPart, text: str) -> None:
        if text:
            self._out.append(Piece(part, text))


_STATE_STEPS = {
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


# Turns the events of a completion, which continues a chat by token ids, into events of the chat. Pure.
#
# Its raw text is split as above. That this is how the engine splits it is proven by what was shown.


_SPECIFICATION = TOOL_CALL + '\n{"name":'
"""Prompts that explain calls in the one known format have this, and none of the others."""
_OTHER_FORMATS = ("<function=", "[TOOL_CALLS]", "<|python_tag|>", "<｜tool")


class RawChat:
    """The rest of one chat, of which `raw` is the raw text so far, and `prompt` the text of its prompt.

    Raises UnprovenError if what was shown cannot be found in the raw text, or what follows might be in a
    format that nobody knows.
    """

    __slots__ = ("_calls", "_id", "_names", "_raw", "_waiting")

    def __init__(self, body: dict[str, Any], transcript: Transcript, raw: str, prompt: str) -> None:
        if reason := _why_not(body):
            raise UnprovenError(reason)
        shown = transcript.shown
        has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
        if has_tools and not shown.calls and not _explains_calls(prompt):
            raise UnprovenError("the format of its tool calls is not known")
        self._id = f"{transcript.frame.get('id')}"
        self._names = shown.reasoning_names or REASONING[:1]
        is_reasoning = bool(shown.reasoning) or raw.startswith(THINK)
        is_marked = str(shown.reasoning).startswith(THINK)
        self._raw = RawAnswer(is_reasoning=is_reasoning, calls=has_tools, is_marked=is_marked)
        try:
            pieces = self._raw.feed(raw)
        except MismatchError as error:
            raise UnprovenError(f"it has sent {error}") from error
        self._calls = len(shown.calls)
        self._waiting = _beyond(pieces, transcript)

    def translated(self, document: dict[str, Any]) -> dict[str, Any]:
        """The same event of a chat. Raises MismatchError for a tool call in an unknown format."""
        choices = document.get("choices")
        document["object"] = "chat.completion.chunk"
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return document
        choice = choices[0]
        text = choice.pop("text", None)
        if not isinstance(text or "", str):
            raise MismatchError("a content that is not text")
        pieces, self._waiting = self._waiting + self._raw.feed(text or ""), []
        choice["delta"] = self._delta(pieces)
        if choice.get("finish_reason") == "stop" and self._calls:
            choice["finish_reason"] = "tool_calls"
        return document

    def _delta(self, pieces: list[Piece]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        reasoning = "".join(piece.text for piece in pieces if piece.part is RawPart.REASONING)
        if reasoning:
            delta |= dict.fromkeys(self._names, reasoning)
        if text := "".join(piece.text for piece in pieces if piece.part is RawPart.TEXT):
            delta["content"] = text
        if calls := [
            self._call(piece) for piece in pieces if piece.part in (RawPart.NAME, RawPart.ARGUMENTS)
        ]:
            delta["tool_calls"] = calls
        return delta

    def _call(self, piece: Piece) -> dict[str, Any]:
        if piece.part is RawPart.ARGUMENTS:
            return {"index": self._calls - 1, "function": {"arguments": piece.text}}
        index, self._calls = self._calls, self._calls + 1
        known_as = f"chatcmpl-tool-{xxh3_64_hexdigest(f'{self._id} {index}'.encode())}"
        return {"index": index, "id": known_as, "type": "function", "function": {"name": piece.text}}


def _why_not(body: dict[str, Any]) -> str:
    """What the engine does to a chat and not to a completion."""
    if body.get("logprobs"):
        return "log probabilities of a completion have another format"
    if any(stops_of(body)):
        return "a stop string may span reasoning, text and calls"
    if body.get("parallel_tool_calls") is False:
        return "only an engine's grammar can keep it to one tool call"
    tools = body.get("tools") or ()
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    if any(isinstance(function, dict) and function.get("strict") for function in functions):
        return "a strict tool is called by an engine's grammar"
    return ""


def _explains_calls(prompt: str) -> bool:
    return _SPECIFICATION in prompt and not any(other in prompt for other in _OTHER_FORMATS)


def _beyond(pieces: list[Piece], transcript: Transcript) -> list[Piece]:
    """What the engine has held back of the pieces. Raises UnprovenError if they are not what was shown."""
    shown = transcript.shown
    left = {RawPart.REASONING: str(shown.reasoning), RawPart.TEXT: str(shown.text)}
    names = [call.name for call in shown.calls]
    arguments = [str(call.arguments) for call in shown.calls]
    beyond: list[Piece] = []
    call = -1
    for piece in pieces:
        call += piece.part is RawPart.NAME
        if piece.part is RawPart.NAME:
            if names[call : call + 1] not in ([], [piece.text]):
                raise _unlike()
            text = piece.text if call >= len(names) else ""
        elif piece.part is RawPart.ARGUMENTS:
            again = arguments[call] if call < len(arguments) else ""
            text, rest = _cut(piece.text, again)
            if call < len(arguments):
                arguments[call] = rest
        else:
            text, left[piece.part] = _cut(piece.text, left[piece.part])
        if beyond and len(text) < len(piece.text):
            # Something was shown behind what was not.
            raise _unlike()
        if text:
            beyond.append(Piece(piece.part, text))
    if any(left.values()) or any(arguments) or call + 1 < len(names):
        raise _unlike()
    return beyond


def _cut(piece: str, again: str) -> tuple[str, str]:
    if not again.startswith(piece[: len(again)]):
        raise _unlike()
    return piece[len(again) :], again[len(piece) :]


def _unlike() -> UnprovenError:
    return UnprovenError("its tool calls or its reasoning are in a format that is not known")
