"""One streamed answer of a chat, as a client puts it together, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from loadtests.wire.blocking import BlockingConnection
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

SILENCE_S = 90.0


@dataclass(slots=True)
class Call:
    """A tool call."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """What came. `events` with data; `error` is the message of an error event, or how it was cut."""

    events: int = 0
    reasoning: str = ""
    text: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    dones: int = 0
    leaks: int = 0
    """Events with fields that the client has not asked for."""
    error: str = ""

    def take(self, data: bytes) -> None:
        """Add the data of one event."""
        self.events += 1
        if data == b"[DONE]":
            self.dones += 1
            return
        document = orjson.loads(data)
        if "error" in document:
            self.error = document["error"]["message"]
            return
        self.ids.add(document["id"])
        self.leaks += bool(document.get("prompt_token_ids"))
        self.usages += [document["usage"]] if document.get("usage") else []
        for choice in document["choices"]:
            self._choose(choice)

    def _choose(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.leaks += bool(choice.get("token_ids"))
        self.roles += "role" in delta
        self.reasoning += delta.get("reasoning") or ""
        self.text += delta.get("content") or ""
        self.tokens += [each["token"] for each in (choice.get("logprobs") or {}).get("content") or []]
        self.finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []
        for each in delta.get("tool_calls") or []:
            call = self.calls.setdefault(each["index"], Call())
            call.id = call.id or each.get("id") or ""
            call.name += each["function"].get("name") or ""
            call.arguments += each["function"].get("arguments") or ""

    @property
    def thought(self) -> str:
        """The reasoning. vLLM's `deepseek_r1` parser shows the marker in an event of several tokens."""
        return self.reasoning.removeprefix("<think>")

    def wrong(self) -> str:
        """Why it is not valid and whole; empty when it is."""
        once = (len(self.ids), self.roles, self.dones, len(self.finishes), len(self.usages), self.leaks)
        if once != (1, 1, 1, 1, 1, 0):
            return f"ids, roles, ends, finish reasons, usages, leaks: {once}"
        if self.finishes != (["tool_calls"] if self.calls else ["stop"]):
            return f"it ended with {self.finishes}, after {len(self.calls)} calls"
        for call in self.calls.values():
            try:
                orjson.loads(call.arguments)
            except orjson.JSONDecodeError:
                return f"arguments that are no JSON: {call.arguments!r}"
            if not call.name or not call.id:
                return f"a call without a name or an id: {call}"
        has_tags = any(tag in self.text + self.thought for tag in ("<think>", "</think>", "tool_call>"))
        return f"a marker in the text: {self.thought!r}, {self.text!r}" if has_tags else ""

    def differs_from(self, whole: Answer) -> str:
        """How it differs from an unbroken answer; empty: it does not."""
        if wrong := self.wrong():
            return wrong
        pairs = {
            "reasoning": (self.thought, whole.thought),
            "text": (self.text, whole.text),
            "calls": (self._called(), whole._called()),
            "finish reason": (self.finishes, whole.finishes),
            "usage": (self._counts(), whole._counts()),
            "tokens with log probabilities": (self.tokens, whole.tokens),
        }
        unlike = [(what, one, other) for what, (one, other) in pairs.items() if one != other]
        return "; ".join(f"{what} {one!r} instead of {other!r}" for what, one, other in unlike)

    def _called(self) -> list[tuple[str, str]]:
        return [(call.name, call.arguments) for _, call in sorted(self.calls.items())]

    def _counts(self) -> list[int]:
        return [self.usages[0][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


def ask(url: str, body: dict[str, Any]) -> Answer:
    """The answer to one request for a stream."""
    answer, tail = Answer(), b""

    def take(piece: bytes) -> None:
        nonlocal tail
        *events, tail = (tail + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                answer.take(event[6:])

    request = post(orjson.dumps(body), path="/v1/chat/completions", host="drill")
    reply = Reply(take)
    try:
        with BlockingConnection(url, SILENCE_S) as connection:
            connection.exchange(request, reply)
    except OSError as error:
        answer.error = answer.error or f"cut without a word: {error!r}"
    if reply.status != 200:
        answer.error = f"{reply.status} {reply.body[:200]!r}"
    return answer
