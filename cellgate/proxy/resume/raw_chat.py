"""Turns the events of a completion, which continues a chat by token ids, into events of the chat. Pure.

Its raw text is split by raw_answer.py. That this is how the engine splits it is proven by what was shown.
"""

from __future__ import annotations

from typing import Any

from xxhash import xxh3_64_hexdigest

from cellgate.proxy.resume.proof import UnprovenError
from cellgate.proxy.resume.raw_answer import TOOL_CALL, Part, Piece, RawAnswer
from cellgate.proxy.resume.repetition import THINK, MismatchError
from cellgate.proxy.resume.shown import REASONING
from cellgate.proxy.resume.stop_strings import stops_of
from cellgate.proxy.resume.transcript import Transcript

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
        reasoning = "".join(piece.text for piece in pieces if piece.part is Part.REASONING)
        if reasoning:
            delta |= dict.fromkeys(self._names, reasoning)
        if text := "".join(piece.text for piece in pieces if piece.part is Part.TEXT):
            delta["content"] = text
        if calls := [self._call(piece) for piece in pieces if piece.part in (Part.NAME, Part.ARGUMENTS)]:
            delta["tool_calls"] = calls
        return delta

    def _call(self, piece: Piece) -> dict[str, Any]:
        if piece.part is Part.ARGUMENTS:
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
    left = {Part.REASONING: str(shown.reasoning), Part.TEXT: str(shown.text)}
    names = [call.name for call in shown.calls]
    arguments = [str(call.arguments) for call in shown.calls]
    beyond: list[Piece] = []
    call = -1
    for piece in pieces:
        call += piece.part is Part.NAME
        if piece.part is Part.NAME:
            if names[call : call + 1] not in ([], [piece.text]):
                raise _unlike()
            text = piece.text if call >= len(names) else ""
        elif piece.part is Part.ARGUMENTS:
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
