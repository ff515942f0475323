"""Conversations in the form of ShareGPT: a JSON list of objects with `conversations` or `messages`.

As in vLLM's serving benchmark, the first turn of the user is the prompt, and the answer to it says how many
tokens to ask for. Tokens are estimated: four characters each.
"""

import json
from typing import Any

from loadtests.datasets.nouns import Request

TOKEN_CHARS = 4
_USERS = ("human", "user")


def parse(text: str) -> list[Request]:
    """The first exchange of each conversation that has one. Raises ValueError with the reason."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(document, list):
        raise ValueError("has to be a JSON list of conversations")
    return [request for number, each in enumerate(document) if (request := _first(number, each)) is not None]


def _first(number: int, conversation: Any) -> Request | None:
    turns = _turns(conversation)
    if turns is None:
        raise ValueError(f"entry {number} has neither conversations nor messages")
    said = [(_word(turn, "from", "role"), _word(turn, "value", "content")) for turn in turns]
    while said and said[0][0] not in _USERS:
        del said[0]
    if len(said) < 2 or not said[0][1]:
        return None
    [prompt, answer] = [text for _, text in said[:2]]
    return Request(0.0, _tokens(prompt), _tokens(answer), text=prompt)


def _turns(conversation: Any) -> list[Any] | None:
    if not isinstance(conversation, dict):
        return None
    turns = conversation.get("conversations", conversation.get("messages"))
    return turns if isinstance(turns, list) else None


def _word(turn: Any, *names: str) -> str:
    found = next((turn[name] for name in names if isinstance(turn, dict) and name in turn), "")
    return found if isinstance(found, str) else ""


def _tokens(text: str) -> int:
    return max(1, len(text) // TOKEN_CHARS)
