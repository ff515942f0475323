"""Requests and answers of `/v1/messages` and `/v1/responses`, for drills: what one stream says as a whole."""

from dataclasses import dataclass, field
from typing import Any

import orjson

from loadtests.vllm.unit import MODEL_NAME

Body = dict[str, Any]
TOKENS = 160
_TOPICS = ("rivers", "a lighthouse", "winter", "old maps", "bread", "the moon", "trains", "a garden")
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def body_of(dialect: str, number: int) -> Body:
    """The request of this number: every second one belongs to a loop with a tool."""
    text = f"Write about {_TOPICS[number % len(_TOPICS)]} in {number + 3} words."
    make = _messages if dialect == "messages" else _responses
    return make(text, number, with_tools=number % 2 == 1)


def _messages(text: str, number: int, *, with_tools: bool) -> Body:
    body: Body = {"model": MODEL_NAME, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    body["system"] = [
        {"type": "text", "text": "You are brief. "},
        {"type": "text", "text": f"Rule {number}."},
    ]
    messages: list[Any] = [{"role": "user", "content": text}]
    if with_tools:
        call = {"type": "tool_use", "id": f"call_{number}", "name": "weather", "input": {"city": "Rome"}}
        result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": "It rains."}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]})
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "And now?"}]})
        body["tools"] = [{"name": "weather", "description": "The weather", "input_schema": _SCHEMA}]
    return body | {"messages": messages}


def _responses(text: str, number: int, *, with_tools: bool) -> Body:
    body: Body = {"model": MODEL_NAME, "max_output_tokens": TOKENS, "temperature": 0, "stream": True}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
    if with_tools:
        called = f"call_{number}"
        items.append({"role": "assistant", "content": "I look."})
        items.append(
            {"type": "function_call", "call_id": called, "name": "weather", "arguments": '{"city": "Rome"}'}
        )
        items.append({"type": "function_call_output", "call_id": called, "output": "It rains."})
        tool = {"type": "function", "name": "weather", "description": "The weather", "parameters": _SCHEMA}
        body["tools"] = [tool | {"strict": False}]
    return body | {"input": items, "instructions": f"You are brief. Rule {number}."}


@dataclass
class Answer:
    """One stream, read. `names` are all ids that it gave, `size` its bytes."""

    text: str = ""
    finish: str = ""
    usage: tuple[int, int] = (0, 0)
    error: str = ""
    kinds: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    whole_texts: set[str] = field(default_factory=set)
    numbers: list[int] = field(default_factory=list)
    size: int = 0

    def content(self) -> tuple[object, ...]:
        """What must be the same of two answers to one request."""
        numbered = self.numbers == list(range(len(self.numbers)))
        return (
            self.text,
            self.finish,
            self.usage,
            self.error,
            self.kinds,
            len(self.names),
            numbered,
            len(self.whole_texts),
        )

    def told(self) -> str:
        """For a person."""
        numbered = self.numbers == list(range(len(self.numbers)))
        return (
            f"{self.error or self.finish} {self.usage} {len(self.names)} names numbered={numbered}"
            f" {self.kinds[-6:]} {self.text[-60:]!r}"
        )


def read_answer(dialect: str, stream: bytes) -> Answer:
    """What a stream says. Pieces of a text may be cut in any way."""
    answer = Answer(size=len(stream))
    read = _read_message if dialect == "messages" else _read_response
    for event in stream.split(b"\n\n"):
        data = next((line[6:] for line in event.splitlines() if line.startswith(b"data: ")), b"")
        if not data:
            continue
        document = orjson.loads(data)
        kind = document.get("type", "error")
        if "error" in document:
            answer.error = str(document["error"])
        elif not (kind.endswith("delta") and answer.kinds[-1:] == [kind]):
            answer.kinds.append(kind)
        read(answer, document)
    return answer


def _read_message(answer: Answer, document: dict[str, Any]) -> None:
    if message := document.get("message"):
        answer.names.add(message["id"])
    delta = document.get("delta", {})
    answer.text += delta.get("text", "")
    if document["type"] == "message_delta":
        answer.finish = delta["stop_reason"]
        answer.usage = document["usage"]["input_tokens"], document["usage"]["output_tokens"]


def _read_response(answer: Answer, document: dict[str, Any]) -> None:
    answer.numbers.append(document["sequence_number"])
    for thing in (document.get("response"), document.get("item")):
        if thing:
            answer.names.add(thing["id"])
    if "item_id" in document:
        answer.names.add(document["item_id"])
    if document["type"].endswith("text.delta"):
        answer.text += document["delta"]
    if document["type"].endswith("text.done"):
        answer.whole_texts.add(document["text"])
    response = document.get("response", {})
    if usage := response.get("usage"):
        reason = (response["incomplete_details"] or {}).get("reason", "")
        answer.finish = f"{response['status']} {reason}"
        answer.usage = usage["input_tokens"], usage["output_tokens"]
        texts = [part["text"] for item in response["output"] for part in item["content"]]
        answer.whole_texts |= {answer.text, *texts}
