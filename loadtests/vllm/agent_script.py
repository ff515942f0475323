"""What the agents' model has learnt by heart: requests, and the answers that it gives to them, as raw text.

Without imports beyond the standard library: the model's script reads it inside .venv-vllm, the drill outside.
"""

from __future__ import annotations

import json
from typing import Any

COUNT = 4
"""Dialogues of each kind."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object"},
        },
    }
    for name, description in (("search", "Search the library."), ("read", "Read some pages of a book."))
]

_SUBJECTS = ("rivers", "bridges", "lanterns", "gardens", "clocks", "harbours")
_DETAILS = (
    "they were built long before anybody wrote their names down",
    "people still walk there every morning to look at the water",
    "nobody agrees on how many of them there are in the old town",
    "the oldest of them stands behind the market and is closed in winter",
    "a good map shows all of them, but not the small ones in the north",
    "each spring somebody paints them in another colour",
)


def _details(number: int, count: int) -> str:
    return "; ".join(_DETAILS[(number + at) % len(_DETAILS)] for at in range(count))


def _call(name: str, arguments: dict[str, Any]) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def _search(number: int) -> str:
    subject = _SUBJECTS[number]
    filters = {"after": 1900 + number, "tags": [subject, "history"], "note": _details(number, 2)}
    return _call("search", {"query": f"the {subject} of the old town", "filters": filters})


def _read(number: int) -> str:
    pages = {"from": 10 * number, "to": 10 * number + 7, "chapters": [_SUBJECTS[number], "index"]}
    return _call("read", {"query": f"a book about {_SUBJECTS[number]}", "pages": pages})


def answers(kind: str, number: int) -> str:
    """The raw text of the answer of one kind, without its end."""
    subject = _SUBJECTS[number]
    text = f"About the {subject}: {_details(number, 4)}."
    recalled = f"The user wants to know of {subject}. I recall that {_details(number + 1, 3)}."
    thought = f"<think>\n{recalled}\n</think>\n\n"
    return {
        "text": text,
        "call": f"I look up the {subject}. {_search(number)}",
        "calls": f"{_search(number)}\n{_read(number)}",
        "reasoning": thought + text,
        "reasoning and call": f"{thought}I look that up.\n{_search(number)}",
    }[kind]


KINDS = ("text", "call", "calls", "reasoning", "reasoning and call")


def request(kind: str, number: int) -> dict[str, Any]:
    """The request for that answer, without model and sampling."""
    question = f"Please {kind}: tell me of the {_SUBJECTS[number]}."
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    if "call" in kind:
        body |= {"tools": TOOLS, "tool_choice": "auto"}
    if "reasoning" in kind:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body
