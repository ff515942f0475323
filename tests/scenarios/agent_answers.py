"""What an agent makes of a stream, and whether that is the answer that one engine alone would have given.

Bytes are not compared: an engine that is asked for token ids sends an event for each token, also for those
that show nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(slots=True)
class Told:
    """A stream, put together. `errors` are error events; `once` counts what may come once only."""

    reasoning: str = ""
    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finishes: list[str] = field(default_factory=list)
    usages: list[Any] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    dones: int = 0
    errors: int = 0
    leaks: int = 0

    def take(self, data: bytes) -> None:
        """The data of one event."""
        if data == b"[DONE]":
            self.dones += 1
            return
        document = orjson.loads(data)
        if "error" in document:
            self.errors += 1
            return
        self.ids.add(document["id"])
        self.usages += [document["usage"]] if document.get("usage") else []
        self.leaks += bool(document.get("prompt_token_ids"))
        for choice in document["choices"]:
            self.leaks += bool(choice.get("token_ids"))
            self.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
            self._add(choice["delta"])

    def _add(self, delta: dict[str, Any]) -> None:
        self.roles += "role" in delta
        self.reasoning += delta.get("reasoning") or ""
        self.text += delta.get("content") or ""
        for each in delta.get("tool_calls") or []:
            call = self.calls.setdefault(each["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += each.get("id") or ""
            call["name"] += each["function"].get("name") or ""
            call["arguments"] += each["function"].get("arguments") or ""

    def meaning(self) -> tuple[object, ...]:
        """All but the ids of calls."""
        return self.reasoning, self.text, self.called(), self.finishes, self.usages

    def called(self) -> list[tuple[str, str]]:
        """Names and arguments."""
        return [(call["name"], call["arguments"]) for _, call in sorted(self.calls.items())]


def told(body: bytes) -> Told:
    """What a stream says, as far as it came."""
    found = Told()
    for event in body.split(b"\n\n")[:-1]:
        if event.startswith(b"data: "):
            found.take(event[6:])
    return found


def unlike(body: bytes, expected: bytes, *, is_whole: bool) -> str | None:
    """How a stream differs from the one that was to come; None: it does not, or ends honestly before."""
    one, other = told(body), told(expected)
    if one.leaks or len(one.ids) > 1 or one.roles > 1 or one.dones > 1 or one.errors > 1:
        return f"ids, roles, ends, errors or token ids come more than once: {one}"
    if any(call["id"].count("call-") > 1 or not call["name"] for call in one.calls.values()):
        return f"calls without one id or a name: {one.calls}"
    if is_whole and not one.errors:
        here, there = one.meaning(), other.meaning()
        return None if here == there else f"{here} is not the whole {there}"
    begun = [(one.reasoning, other.reasoning), (one.text, other.text)]
    pairs = zip(one.called(), other.called(), strict=False)
    begun += [(" ".join(here), " ".join(there)) for here, there in pairs]
    is_beginning = all(whole.startswith(part) for part, whole in begun) and len(one.calls) <= len(other.calls)
    return None if is_beginning else f"{begun} are no beginnings"
