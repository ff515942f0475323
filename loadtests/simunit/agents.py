"""What the unit says to a chat with tools: some words, then a tool call; after a tool's result words alone.

Like all it says, the answer is a function of the text before it; whoever sends the prompt with a part of the
answer, or its token ids, gets the rest. Calls are written and shown as by a model and a parser of `hermes`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from loadtests.simunit.text import WORDS, pieces_of

CALL, CALL_END = "<tool_call>", "</tool_call>"
SPECIFICATION = (
    f'For each call return:\n{CALL}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
)
"""What the chat template puts before the tools."""

_ASSISTANT = "<|assistant|>\n"
_RESULT = "<|tool|>\n"
_FUNCTION = re.compile(r'"function": \{"name": "([^"]+)"')
_SAID_WORDS = 12
_ARGUMENT_WORDS = 40


def explained(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system message that explains tools, by their names: each API describes them in its own way."""
    functions = [{"function": {"name": tool.get("function", tool).get("name")}} for tool in tools]
    return f"<|system|>\n{SPECIFICATION}\n{json.dumps(functions)}<|end|>\n" if tools else ""


def called(name: str, arguments: str | Mapping[str, Any]) -> str:
    """A call in the history of a chat, whichever API it came by."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": name, "arguments": given})


def script(prompt: str) -> list[str] | None:
    """The tokens of the answer that are still to be said; None where no tools are explained."""
    if SPECIFICATION not in prompt or _ASSISTANT not in prompt:
        return None
    before, said = prompt.rsplit(_ASSISTANT, 1)
    whole = _answer(before)
    return pieces_of(whole[len(said) :]) if whole.startswith(said) else pieces_of(" something else")


def _answer(before: str) -> str:
    calls = before.count(_RESULT)
    said = _words(f"{before} text", _SAID_WORDS)
    if before.rstrip().endswith("<|end|>") and before.rfind(_RESULT) > before.rfind("<|user|>\n"):
        return said
    name = (_FUNCTION.search(before) or ["", "f"])[1]
    arguments = {"step": calls, "words": _words(f"{before} words", _ARGUMENT_WORDS).split()}
    return f"{said}{CALL}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CALL_END}"


def _words(seed: str, count: int) -> str:
    return "".join(
        WORDS[xxhash.xxh3_64_intdigest(f"{seed} {at}".encode()) % len(WORDS)] for at in range(count)
    )


class ShownCalls:
    """Turns raw text into deltas: reads all of it again with each token, and tells what is new."""

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._raw = self._text = self._arguments = ""
        self._is_named = False

    @property
    def has_called(self) -> bool:
        return self._is_named

    def delta(self, token: str) -> dict[str, object]:
        """What is shown of one more token."""
        self._raw += token
        text, found, call = self._raw.partition(CALL)
        if not found:
            text = _before(text, CALL)
        delta: dict[str, object] = {}
        if new := text[len(self._text) :]:
            delta["content"], self._text = new, text
        name = re.search(r'"name": "([^"]+)"', call)
        if name is not None and (calls := self._call(call, name[1])):
            delta["tool_calls"] = calls
        return delta

    def _call(self, call: str, name: str) -> list[dict[str, object]]:
        parts: list[dict[str, object]] = []
        if not self._is_named:
            head = {"index": 0, "id": self._call_id, "type": "function", "function": {"name": name}}
            parts, self._is_named = [head], True
        inside, is_closed, _ = call.partition(CALL_END)
        inside = inside if is_closed else _before(inside, CALL_END)
        _, found, arguments = inside.strip().partition('"arguments": ')
        if is_closed or _is_json(inside):
            arguments = arguments.rstrip()[:-1].rstrip()
        if found and (new := arguments[len(self._arguments) :]):
            parts.append({"index": 0, "function": {"arguments": new}})
            self._arguments = arguments
        return parts


def _before(text: str, tag: str) -> str:
    """The text without what may be the beginning of a tag at its end."""
    held = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return text[: len(text) - held]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
