"""Whole streams of every dialect, written, cut and framed in many ways: the client gets what the unit sent,
the unit is not blamed, and what it told of its tokens is known."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
import pytest

from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.resume.eligible import AGAIN, OPEN
from cellgate.proxy.resume.streams import PLAIN_ROUTES, STREAMS
from cellgate.router.cost_model import Usage
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk

STREAMS_GENERATED = int(os.environ.get("WHOLE_STREAMS", "400"))
NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 0, "output_tokens": 0}
TEMPTING = (
    'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    '"usage":{"prompt_tokens":0,"completion_tokens":0,"input_tokens":0,"output_tokens":0}',
    "usage",
    "data: [DONE]\n\n",
    'message_stop"}}]',
    '"finish_reason":"stop"',
    "\\",
    '"',
)
"""What a client or a model may say, and no engine has meant."""


class Told(NamedTuple):
    """A stream as an engine sends it: the objects of its events, and what they tell. `ends`: it is whole."""

    events: list[tuple[str, Any]]
    usage: Usage | None
    ends: bool


def echo(rng: random.Random, size: int) -> dict[str, Any]:
    """What an engine repeats of a request."""
    tool = {
        "type": "function",
        "parameters": {"properties": {"usage": NOTHING, "type": "response.completed"}},
    }
    text = rng.choice(TEMPTING) * (1 + size // 100)
    return {
        "instructions": text[:size],
        "tools": [tool] * rng.choice([0, 1, 1 + size // 400]),
        "metadata": {"usage": NOTHING, "user": rng.choice(TEMPTING)},
        "usage_": NOTHING,
    }


def chat(rng: random.Random, size: int, *, text: bool) -> Told:
    is_whole, n = rng.random() < 0.8, rng.choice([1, 1, 1, 3])
    usage = Usage(rng.randrange(1, 999), rng.randrange(999), None) if rng.random() < 0.7 else None
    numbers = None if usage is None else {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    more: dict[str, Any] = rng.choice([{}, {"usage": None}, {"usage": None, "x": []}])
    with_null = rng.random() < 0.8

    def part(index: int, said: str, finish: str | None = None, **other: Any) -> tuple[str, Any]:
        delta: dict[str, Any] = {"text": said} if text else {"delta": {"content": said}}
        done = {"finish_reason": finish} if with_null or finish else {}
        choice = {"index": index, **delta, **other, **done}
        return "", {"id": "c", "object": "x", "created": 1, "choices": [choice], **more}

    words = [part(rng.randrange(n), rng.choice([*TEMPTING, " a", " b"])) for _ in range(rng.randrange(60))]
    ends = [part(index, rng.choice(["", " x"]), "stop", logprobs=echo(rng, size)) for index in range(n)]
    events = [part(0, ""), *words, *(ends if is_whole else [])]
    if numbers is not None and is_whole:
        last = {"id": "c", "choices": [], "usage": numbers, **echo(rng, size * rng.randrange(4))}
        events.append(("", last))
    if is_whole and rng.random() < 0.7:
        events.append(("", "[DONE]"))
    return Told(events, usage if is_whole else None, is_whole)


def messages(rng: random.Random, size: int) -> Told:
    is_whole = rng.random() < 0.8
    usage = Usage(rng.randrange(1, 999), rng.randrange(1, 999), None)
    begun: dict[str, Any] = {
        "type": "message_start",
        "message": {"id": "m", "usage": {"input_tokens": usage[0], "output_tokens": 0}},
    }
    block: dict[str, Any] = {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}
    texts = [rng.choice([*TEMPTING, " a"]) for _ in range(rng.randrange(40))]
    said = {"type": "content_block_delta", "index": 0}
    words = [said | {"delta": {"type": "text_delta", "text": text}} for text in texts]
    numbers = {"output_tokens": usage[1]} | rng.choice([{}, {"input_tokens": usage[0]}, {"input_tokens": 0}])
    last = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        **echo(rng, size),
        "usage": numbers,
    }
    events = [begun, block, *words, {"type": "content_block_stop", "index": 0}]
    events += [last, {"type": "message_stop"}] if is_whole else []
    told = usage if is_whole else Usage(usage[0], 0, None)
    return Told([(each["type"], each) for each in events], told, is_whole)


def responses(rng: random.Random, size: int) -> Told:
    is_whole = rng.random() < 0.8
    usage = Usage(rng.randrange(1, 999), rng.randrange(999), 3)
    numbers: dict[str, Any] = {"input_tokens": usage[0], "output_tokens": usage[1]}
    numbers["input_tokens_details"] = {"cached_tokens": 3}
    body = {"id": "resp_1", "error": None, **echo(rng, size)}
    said = {"output_index": 0, "content_index": 0}
    texts = [rng.choice([*TEMPTING, " a"]) for _ in range(rng.randrange(40))]
    events: list[dict[str, Any]] = [
        # The first event has to be whole in the gate.
        {"type": "response.created", "response": {"usage": None, **echo(rng, min(size, 50_000))}},
        {"type": "response.output_item.added", **said, "item": {"type": "message", "usage": NOTHING}},
        *({"type": "response.output_text.delta", **said, "delta": text} for text in texts),
        {"type": "response.output_text.done", **said, "text": rng.choice(TEMPTING) * (size // 50)},
    ]
    if is_whole:
        end = rng.choice(["response.completed", "response.incomplete"])
        fields = [("a", {}), ("usage", numbers), ("user", "u" * size), ("output", [NOTHING] * 9)]
        order = dict(rng.sample(fields, 4))
        events.append({"type": end, "response": {"status": "completed", **body, **order}})
    numbered = [each | {"sequence_number": number} for number, each in enumerate(events)]
    return Told([(each["type"], each) for each in numbered], usage if is_whole else None, is_whole)


def written(rng: random.Random, told: Told) -> list[bytes]:
    """The events in bytes, with line ends and comments as they may be."""
    line = rng.choice([b"\n", b"\n", b"\r\n", b"\r"])
    option = rng.choice([0, 0, orjson.OPT_INDENT_2])
    named, spaced = rng.random() < 0.8, rng.random() < 0.8
    out: list[bytes] = []
    for name, data in told.events:
        body = data.encode() if isinstance(data, str) else orjson.dumps(data, option=option)
        head = b"event: %b%b" % (name.encode(), line) if name and named else b""
        lines = [(b"data: " if spaced else b"data:") + each + line for each in body.split(b"\n")]
        out.append(head + b"".join(lines) + line)
        if rng.random() < 0.05:
            out.append(b": working" + line * 2)
    if rng.random() < 0.3:
        out += [b": ping" + line * 2] * rng.randrange(60)
    if told.ends and told.events[-1][1] == "[DONE]" and rng.random() < 0.1:
        out[-1] = out[-1].rstrip(b"\r\n") + rng.choice([b"", line])
    return out


def framed(rng: random.Random, events: list[bytes]) -> bytes:
    """The body in chunks: an event in each, all in one, or cut anywhere."""
    how = rng.randrange(3)
    if how == 0:
        return b"".join(map(chunk, events))
    body = b"".join(events)
    return chunk(body) if how == 1 else b"".join(chunk(each) for each in pieces(rng, body))


def pieces(rng: random.Random, data: bytes) -> Iterator[bytes]:
    largest = (
        rng.choice([1448, 4096, 65536, 1 << 18]) if len(data) > 20_000 else rng.choice([3, 60, 1448, 65536])
    )
    at = 0
    while at < len(data):
        size = rng.randrange(1, largest + 1) if rng.random() < 0.5 else largest
        yield data[at : at + size]
        at += size


DIALECTS = {
    "chat": lambda rng, size: chat(rng, size, text=False),
    "completions": lambda rng, size: chat(rng, size, text=True),
    "messages": messages,
    "responses": responses,
}


class Reading(Rig):
    """Reads a stream of `route`, and keeps it as these `ways` to resume it need it."""

    route = "chat"
    ways = 0

    def committed(self, first: bytes, at: float) -> None:
        super().committed(first, at)
        self.response.read_answer(is_typed=self.route not in PLAIN_ROUTES)
        self.response.record_replay(self.ways, STREAMS[self.route].shape)


def sizes(rng: random.Random) -> int:
    return int(1000 * 4000 ** (rng.random() ** 3))


@pytest.mark.parametrize("part", range(4))
def test_a_stream_is_whole_and_counted_however_it_is_written_and_cut(part: int) -> None:
    for seed in range(part, STREAMS_GENERATED, 4):
        rng = random.Random(seed)
        route = rng.choice(list(DIALECTS))
        told = DIALECTS[route](rng, sizes(rng))
        events = written(rng, told)
        rig = Reading(http10=rng.random() < 0.2)
        rig.route, rig.ways = route, rng.choice([0, OPEN, OPEN | AGAIN])
        rig.feed(pieces(rng, SSE_HEAD + framed(rng, events) + LAST_CHUNK))
        while rig.due:
            rig.turn()
        case = f"seed {seed}: {route}, {rig.failures}"
        assert rig.bugs == [], case
        if told.ends:
            assert rig.failures == [], case
            assert rig.ends == ["committed", "done"], case
            assert rig.reply().body.lstrip(b"\r\n") == b"".join(events).lstrip(b"\r\n"), case
            assert rig.response.usage() == told.usage, case
        else:
            assert [failure.kind for failure in rig.failures] == [FailureKind.TRUNCATED], case
