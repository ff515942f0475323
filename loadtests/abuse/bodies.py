"""Abuses by what stands in a body: its size and its shape."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable

from loadtests.abuse.client import ask_all
from loadtests.abuse.nouns import Abuse, Got, Place
from loadtests.wire.messages import post

MIB = 1 << 20
OPEN = b'{"model":"sim","stream":true,"max_tokens":1,"messages":[{"role":"user","content":"Why?"}],'


def repeated(before: bytes, piece: bytes, after: bytes, size: int) -> bytes:
    """A body of about `size` bytes: as many `piece`, with commas between them, as fit."""
    return before + b",".join([piece] * ((size - len(before)) // (len(piece) + 1))) + after


def sends(*bodies: bytes, lines: str = "") -> Callable[[Place], Awaitable[Got]]:
    """An abuse that sends each of these bodies, one after the other."""

    async def act(place: Place) -> Got:
        return await ask_all(place.gate.port, (post(body, lines=lines) for body in bodies), at_once=1)

    return act


def nested(depth: int, *, field: bytes = b'"extra"', filler: int = 0) -> bytes:
    """A body with arrays in arrays."""
    return OPEN + field + b":" + b"[" * depth + b"]" * depth + b',"pad":"' + b"a" * filler + b'"}'


def logit_bias() -> bytes:
    """100,000 entries."""
    bias = ",".join(f'"{token}":1' for token in range(100_000))
    return OPEN + b'"logit_bias":{' + bias.encode() + b"}}"


def tools(size: int) -> bytes:
    """Tools with schemas, as many as fit."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "enum": ["b", "c"]}}}
    tool = json.dumps({"type": "function", "function": {"name": "f", "parameters": parameters}}).encode()
    return repeated(OPEN + b'"tools":[', tool, b"]}", size)


def image(size: int) -> bytes:
    """A picture as base64."""
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}' % (b"QUFB" * (size // 4))
    return b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":[%b]}]}' % part


_MESSAGES = b'{"model":"sim","max_tokens":1,"messages":['
_PARTS = b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":['
_PROMPT = b'{"model":"sim","max_tokens":1,"prompt":'
_JUST_LOOP = MIB - 64
"""As large as a body may be that is parsed on the loop."""
_ODD = (
    b'{"model":"\\ud800","messages":[]}',
    b'{"model":"a\\u0000b","messages":[]}',
    b'{"model":"sim","messages":[{"role":"user","content":"\\udfff"}],"max_tokens":1}',
    b'{"model":"sim","messages":null}',
    b'{"model":"sim","messages":"a","stream":true}',
    b'{"model":"sim","messages":[null,1,[],{}],"stream":true}',
    b'{"model":"sim","messages":[{"role":{},"content":{"a":[]}}],"stream":true,"stop":{"a":1}}',
    b'{"model":"sim","prompt":[[[[]]]],"stream":true}',
    b'{"model":"sim","priority":1e400}',
    b'{"model":"sim","priority":99999999999999999999999999,"messages":[{"role":"user","content":"a"}]}',
    b'{"model":"sim","user":[1],"previous_response_id":{"a":1},"messages":[{"role":"user","content":"a"}]}',
    b"\xff\xfe{\x00}\x00",
    b"",
    b"null",
)

BODIES = [
    *(
        Abuse(f"deep-{depth}", f"arrays {depth} deep in an unknown field", sends(nested(depth)))
        for depth in (120, 255, 1000, 100_000)
    ),
    Abuse("deep-tools", "arrays 500 deep in tools", sends(nested(500, field=b'"tools"'))),
    Abuse("deep-large", "the same over 1 MiB", sends(nested(500, filler=MIB)), megabytes=2),
    Abuse("messages-empty", "1 MiB of empty messages", sends(repeated(_MESSAGES, b"{}", b"]}", _JUST_LOOP))),
    Abuse(
        "messages-small",
        "1 MiB of messages of one key",
        sends(repeated(_MESSAGES, b'{"a":1}', b"]}", _JUST_LOOP)),
    ),
    Abuse(
        "messages-users",
        "1 MiB of messages of one letter",
        sends(repeated(_MESSAGES, b'{"role":"user","content":"a"}', b"]}", _JUST_LOOP)),
    ),
    Abuse("parts-empty", "1 MiB of empty parts", sends(repeated(_PARTS, b"{}", b"]}]}", _JUST_LOOP))),
    Abuse(
        "parts-texts",
        "1 MiB of parts of one letter",
        sends(repeated(_PARTS, b'{"type":"text","text":"a"}', b"]}]}", _JUST_LOOP)),
    ),
    Abuse(
        "prompt-tokens", "1 MiB of token numbers", sends(repeated(_PROMPT + b"[", b"1", b"]}", _JUST_LOOP))
    ),
    Abuse(
        "prompt-strings",
        "1 MiB of prompts of one letter",
        sends(repeated(_PROMPT + b"[", b'"a"', b"]}", _JUST_LOOP)),
    ),
    Abuse(
        "prompt-arrays",
        "1 MiB of prompts of one token",
        sends(repeated(_PROMPT + b"[", b"[1]", b"]}", _JUST_LOOP)),
    ),
    Abuse("duplicate-keys", "1 MiB of the same key", sends(repeated(OPEN, b'"a":[]', b"}", _JUST_LOOP))),
    Abuse("many-keys", "100,000 keys", sends(OPEN + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}")),
    Abuse(
        "long-numbers",
        "1 MiB of digits",
        sends(OPEN + b'"a":' + b"9" * MIB + b"}", OPEN + b'"seed":1' + b"0" * 5000 + b"}"),
    ),
    Abuse("long-key", "a key of 1 MiB", sends(OPEN + b'"' + b"a" * _JUST_LOOP + b'":1}')),
    Abuse(
        "escapes",
        "1 MiB of escaped letters",
        sends(_MESSAGES + b'{"role":"user","content":"' + b"\\u0041" * (MIB // 6 - 20) + b'"}]}'),
    ),
    Abuse("odd-shapes", "fields of other types than the API has", sends(*_ODD)),
    Abuse("spaces", "20 MB of spaces", sends(b" " * (20 * MIB) + b"{}"), megabytes=20),
    Abuse(
        "arrays-24",
        "24 MB of empty arrays",
        sends(repeated(OPEN + b'"a":[', b"[]", b"]}", 24 * MIB)),
        megabytes=24,
    ),
    Abuse(
        "arrays-63",
        "63 MB of empty arrays",
        sends(repeated(OPEN + b'"a":[', b"[]", b"]}", 63 * MIB)),
        megabytes=63,
    ),
    Abuse(
        "objects-20",
        "20 MB of small objects",
        sends(repeated(OPEN + b'"a":[', b'{"a":{}}', b"]}", 20 * MIB)),
        megabytes=20,
    ),
    Abuse("image", "a picture of 20 MB", sends(image(20 * MIB)), megabytes=20),
    Abuse("logit-bias", "100,000 entries of logit_bias", sends(logit_bias()), megabytes=2),
    Abuse("tools", "1 MB of tools", sends(tools(_JUST_LOOP))),
    Abuse(
        "absurd-numbers",
        "n of 128, a billion tokens",
        sends(OPEN + b'"n":128,"max_tokens":1000000000}', OPEN + b'"max_tokens":-1}'),
    ),
    Abuse(
        "gzip-bomb",
        "20 MB of zeros in 20 kB",
        sends(gzip.compress(bytes(20 * MIB)), lines="content-encoding: gzip\r\n"),
    ),
]
