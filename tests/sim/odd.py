"""Odd answers, as data: what an engine may say to anybody, by chance or because it was asked to. No I/O.

An answer is a list of pieces, each with the seconds before it; the same for a stream and for a whole answer.
To add a kind: a function that makes an `Odd`, and a line in `KINDS`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import orjson

from loadtests.simunit.nonsense import EVENTS, JSON

STEP_S = 0.02
"""From one token to the next."""
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Odd:
    """One answer. `pieces`: seconds to wait, then bytes, and how many tokens they are; `head_s`: until its
    head comes; or, of status 0, the end of the connection.
    """

    pieces: tuple[tuple[float, bytes, int], ...] = ()
    status: int = 200
    content_type: str = JSON
    head_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of the request: whether it is a stream, how many tokens it allows."""

    stream: bool
    tokens: int
    rng: Random


Kind = Callable[[Asked], Odd]


def said(asked: Asked, deltas: list[dict[str, Any]], finish: str = "stop", choices: int = 1) -> Odd:
    """A chat that says these, one after another, in each of its choices."""
    head = {"id": "chatcmpl-odd", "created": 0, "model": "tiny"}
    if asked.stream:
        pieces = [(STEP_S, _event(head, 0, {"role": "assistant", "content": ""}), 0)]
        for delta in deltas:
            pieces += [(STEP_S, _event(head, index, delta), 1) for index in range(choices)]
        pieces += [(0.0, _event(head, index, {}, finish), 0) for index in range(choices)]
        return Odd((*pieces, (0.0, _DONE, 0)), content_type=EVENTS)
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for delta in deltas:
        for name, value in delta.items():
            message[name] = (message.get(name) or "") + value if isinstance(value, str) else value
    each = [{"index": index, "message": message, "finish_reason": finish} for index in range(choices)]
    used = {"prompt_tokens": 4, "completion_tokens": len(deltas), "total_tokens": 4 + len(deltas)}
    body = orjson.dumps(head | {"object": "chat.completion", "choices": each, "usage": used})
    # Its counters move while it computes.
    return Odd((*((STEP_S, b"", 1) for _ in deltas), (0.0, body, 0)))


def _event(head: dict[str, Any], index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps(head | {"object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


def _words(asked: Asked) -> list[str]:
    return [f" {asked.rng.getrandbits(24):x}" for _ in range(asked.tokens)]


def _text(make: Callable[[Asked], list[str]], field: str = "content", choices: int = 1) -> Kind:
    return lambda asked: said(asked, [{field: text} for text in make(asked)], "length", choices)


def _lines(asked: Asked) -> list[str]:
    line = [" all", " work", " and", " no", " play\n"]
    return [line[number % len(line)] for number in range(asked.tokens)]


def _base64(asked: Asked) -> list[str]:
    text = base64.b64encode(asked.rng.randbytes(3 * asked.tokens)).decode()
    return [text[4 * number :][:4] for number in range(asked.tokens)]


def _tools(asked: Asked) -> Odd:
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return said(asked, [{"tool_calls": [call]}], "tool_calls")


def _refused(status: int) -> Kind:
    body = orjson.dumps({"error": {"message": "by chance", "type": "x", "param": None, "code": status}})
    return lambda _: Odd(((0.01, body, 0),), status)


def _error_event(asked: Asked) -> Odd:
    error = orjson.dumps({"error": {"message": "by chance", "type": "x", "code": 400}})
    if asked.stream:
        return Odd(((0.01, b"data: " + error + b"\n\n", 0),), content_type=EVENTS)
    return Odd(((0.01, error, 0),))


def _later(wait_s: float, again: int = 0, times: int = 1000, *, comments: bool = False) -> Kind:
    """Words of which nothing comes for so long; and after each so many `again`, so many `times`."""

    def make(asked: Asked) -> Odd:
        odd = _text(_words)(asked)
        first = 1 if asked.stream else 0
        waits = {first + at for at in range(0, asked.tokens, again or asked.tokens)[:times]}
        pieces = list[tuple[float, bytes, int]]()
        for at, (pause_s, data, tokens) in enumerate(odd.pieces):
            if at in waits and comments and asked.stream:
                pieces += [(1.0, b": keep-alive\n\n", 0)] * int(wait_s)
            elif at in waits:
                pause_s += wait_s
            pieces.append((0.0 if again == 60 and at not in waits else pause_s, data, tokens))
        return replace(odd, pieces=tuple(pieces))

    return make


GOOD: Mapping[str, Kind] = {
    "short": lambda asked: said(asked, [{"content": " yes"}]),
    "long": _text(_words),
    "base64": _text(_base64),
    "tools": _tools,
    "reasoning": _text(_words, "reasoning_content"),
    "json": lambda asked: said(asked, [{"content": text} for text in ('{"a"', ": 1", "}")]),
    "choices": _text(_words, choices=2),
}
"""Answers with which nothing is wrong."""
BAD: Mapping[str, Kind] = {
    "a word": _text(lambda asked: [" yes"] * asked.tokens),
    "a line": _text(_lines),
    "spaces": _text(lambda asked: [" "] * asked.tokens),
    "empty": lambda asked: said(asked, []),
    "stops": lambda asked: said(asked, [{"content": ""}]),
    "no text": lambda asked: said(asked, [{}] * asked.tokens, "length"),
    "no end": lambda asked: (
        Odd(((0.01, _DONE, 0),), content_type=EVENTS) if asked.stream else Odd(((0.01, b"{}", 0),))
    ),
    "400": _refused(400),
    "401": _refused(401),
    "404": _refused(404),
    "422": _refused(422),
    "an error event": _error_event,
}
"""Answers that are doubtful. Where all units give them alike, that is how it is."""
TIMING: Mapping[str, Kind] = {
    "slow": _later(10.0),
    "in bursts": _later(3.0, again=60),
    "a pause": _later(2.5, again=20, times=2),
    "comments first": _later(20.0, comments=True),
    "head late": lambda asked: replace(_text(_words)(asked), head_s=3.0),
}
"""Good answers that come in an odd way."""
MOVED: Mapping[str, Kind] = {"aborted": lambda asked: said(asked, [], "abort")}
"""Answers that their engine has ended by itself, as for a pause: another unit gives them."""
CUT: Mapping[str, Kind] = {"reset": lambda asked: Odd(status=0, head_s=0.02), "500": _refused(500)}
"""No answer: the connection is closed, or an error. Whoever meets three is refused: nobody draws these."""
OF_MODELS = ("a word", "a line", "spaces", "empty", "stops", "no text", *GOOD)
"""What a model may say to a canary as well."""
KINDS: Mapping[str, Kind] = {**GOOD, **BAD, **MOVED, **TIMING}


def _paced(times: float, at_once: int = 1) -> Kind:
    """Tokens that take so many times as long; and come so many at once, as drafts do that were accepted."""

    def make(asked: Asked) -> Odd:
        odd, made, pieces = _text(_words)(asked), 0, list[tuple[float, bytes, int]]()
        for pause_s, data, tokens in odd.pieces:
            pieces.append((pause_s * times if made % at_once == 0 else 0.0, data, tokens))
            made += tokens
        return replace(odd, pieces=tuple(pieces))

    return make


def _with_logprobs(asked: Asked) -> Odd:
    """Chunks of 10 kB."""
    if not asked.stream:
        return _text(_words)(asked)
    tops = [{"token": f"t{number}", "logprob": -1.5, "bytes": [116]} for number in range(200)]
    odd, found = _text(_words)(asked), b'"logprobs":' + orjson.dumps({"content": tops})
    pieces = tuple((s, d.replace(b'"delta":', found + b',"delta":'), n) for s, d, n in odd.pieces)
    return replace(odd, pieces=pieces)


def _late_refusal(asked: Asked) -> Odd:
    """A grammar that cannot be compiled."""
    return replace(_refused(400)(asked), head_s=0.8)


def _arguments(asked: Asked) -> Odd:
    """The arguments of a tool, word by word, and no text."""
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": ""}}
    words = [{"tool_calls": [{"index": 0, "function": {"arguments": word}}]} for word in _words(asked)]
    return said(asked, [{"tool_calls": [call]}, *(words if asked.stream else [])], "tool_calls")


MORE_TIMING: Mapping[str, Kind] = {
    "drafts": _paced(8.0, at_once=6),
    "slow steps": _paced(15.0),
    "an adapter is loaded": lambda asked: replace(_text(_words)(asked), head_s=15.0),
    "cache hits and misses": lambda asked: replace(
        _text(_words)(asked), head_s=asked.rng.choice((0.02, 0.5, 2.0, 6.0))
    ),
    "thinks in silence": _later(25.0),
}
MORE: Mapping[str, Kind] = {
    **MORE_TIMING,
    "log probabilities": _with_logprobs,
    "a grammar fails": _late_refusal,
    "arguments": _arguments,
    "a refusal": lambda asked: said(asked, [{"refusal": word} for word in (" I", " can", " not")]),
    "filtered": lambda asked: said(asked, [{"content": ""}], "content_filter"),
    "braces": lambda asked: said(asked, [{"content": "{"}, *[{"content": "\n"}] * asked.tokens], "length"),
}
"""Ordinary answers of newer engines. Apart, so that the seeds of scenes keep their kinds."""
