"""The prompt of a request as a chain of block hashes: a common beginning is seen without keeping any text.

The prompt is written as one run of bytes in the order in which chat templates render it: tools and system
text, then the messages. What must stay true: equal beginnings give equal bytes and so equal hashes, and
nothing that a client appends changes a block that was full before. It is an estimate of what an engine
caches, never an identity: a wrong one costs time, not correctness.

So many pieces of it are looked at one by one, and what comes after them is taken as it is: what a client
can make this cost is bounded, and what it appends still changes no block before.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64_intdigest

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.request.body_shape import BodyShape, shape_of_body
from cellgate.router.cost_model import BLOCK_BYTES

MAX_BLOCKS = 8192
"""Blocks beyond (4 MiB) are counted and not hashed: no engine's context is longer."""
_MOST_BYTES = MAX_BLOCKS * BLOCK_BYTES
MEDIA_BYTES = 2048
"""An image, a sound or a video counts as this many bytes, whatever the size of its file."""
_MORE_PIECES = (b"",) * (MEDIA_BYTES // 64 - 1)
"""It counts as so many pieces more than the one it is: to hash these bytes takes as long."""
_JSON_PIECES = (b"", b"")
"""So does what is written as JSON, or as token ids: each takes as long as some texts."""
_ROOMY_BYTES = 1024
_SORTED_MOST = 16
"""Fields of a message beyond role and content that are put in order: of more, clients keep their own."""
_RECORD, _FIELD = b"\x1e", b"\x1f"
_PROMPT_MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "image", "source", "file", "file_data")
_MEDIA_NAMES = frozenset(_PROMPT_MEDIA)
_PROMPT_PLAIN = frozenset(("role", "content"))


class Prompt(NamedTuple):
    """`blocks` are the chained 60-bit hashes of all full blocks, `size` the bytes of the whole prompt.

    `fingerprint` is one hash of the model, the whole prompt, and of fields that make an engine do other work
    (a grammar, a logit bias). Sampling, the number of tokens and the user are not part of it: the same prompt
    with another seed or without a stream has the same fingerprint.
    """

    blocks: tuple[int, ...]
    size: int
    fingerprint: int


def read_prompt(data: dict[str, Any], body: bytes = b"") -> Prompt:
    """The prompt in the parsed body of any API that generates; an empty one if it has none.

    `body`, as received, is used for a prompt that is nested too deeply to be serialised.
    """
    return Prompt(*prompt_in(data, shape_of_body(data), body))


def prompt_in(data: dict[str, Any], shape: BodyShape, body: bytes) -> tuple[tuple[int, ...], int, int]:
    """The fields of the same, of a body whose shape is known."""
    model = data.get("model")
    seed = xxh3_64_intdigest(model.encode() if isinstance(model, str) else b"")
    try:
        text = b"".join(pieces_of(data, shape.preamble, shape.prompts))
        more = more_of(data, shape.more) if shape.more else b""
        if shape.rendering:
            seed = seed_of(data, shape.rendering)
    except TypeError:
        text, more = body, b""
    blocks = block_hashes(text, seed)
    fingerprint = xxh3_64_intdigest(text[len(blocks) * BLOCK_BYTES :], blocks[-1] if blocks else seed)
    if more:
        fingerprint = xxh3_64_intdigest(more, fingerprint)
    return blocks, len(text), fingerprint


def more_of(data: dict[str, Any], names: tuple[str, ...]) -> bytes:
    """These fields, which are no part of the prompt."""
    return _bytes_of(data if len(names) == len(data) else {name: data[name] for name in names})


def block_hashes(text: bytes, seed: int) -> tuple[int, ...]:
    """The hash of each full block, seeded with the one before it. 60 bits: an int of two digits, 32 bytes."""
    blocks = []
    for end in range(BLOCK_BYTES, min(len(text), _MOST_BYTES) + 1, BLOCK_BYTES):
        seed = xxh3_64_intdigest(text[end - BLOCK_BYTES : end], seed) >> 4
        blocks.append(seed)
    return tuple(blocks)


def pieces_of(data: dict[str, Any], preamble: tuple[str, ...], prompts: tuple[str, ...]) -> list[bytes]:
    """The prompt as one run of bytes, in pieces: what is in these fields."""
    out: list[bytes] = []
    for name in preamble:
        if value := data[name]:
            out += (_RECORD, name.encode(), _FIELD)
            _content(value, out)
    for name in prompts:
        if not (value := data[name]):
            continue
        if not isinstance(value, list):
            out.append(_bytes_of(value))
        elif isinstance(value[0], dict):
            write_messages(value, out)
        elif isinstance(value[0], int):
            out.append(_token_ids(value))
        else:
            _several_prompts(value, out)
    return out


def seed_of(data: dict[str, Any], rendering: tuple[str, ...]) -> int:
    """What the first block is seeded with: the model, and the fields of these names."""
    model = data.get("model")
    first = model.encode() if isinstance(model, str) else b""
    if not rendering:
        return xxh3_64_intdigest(first)
    return xxh3_64_intdigest(_FIELD.join([first, *(_bytes_of(data[n]) for n in rendering if data[n])]))


def _several_prompts(prompts: list[Any], out: list[bytes]) -> None:
    """Several texts or lists of ids, one after another."""
    following = iter(prompts)
    for each in following:
        if len(out) > LIMITS.prompt_pieces:
            _rest([each, *following], out)
            return
        if isinstance(each, list):
            out += (_RECORD, _token_ids(each), *_JSON_PIECES)
        else:
            out += (_RECORD, _bytes_of(each))


def _rest(pieces: list[Any], out: list[bytes]) -> None:
    """These are too many to be read one by one."""
    reached("prompt_pieces")
    out += (_RECORD, _bytes_of(pieces))


def write_messages(messages: list[Any], out: list[bytes]) -> None:
    """Messages of a chat, or items of a response's input, one after another."""
    following = iter(messages)
    for message in following:
        if len(out) > LIMITS.prompt_pieces:
            _rest([message, *following], out)
            return
        if not isinstance(message, dict):
            out += (_RECORD, _bytes_of(message))
            continue
        role, content = message.get("role", ""), message.get("content")
        if type(content) is str and type(role) is str:
            out += (_RECORD, role.encode(), _FIELD, content.encode())
            if len(message) == 2:
                continue
        else:
            out += (_RECORD, _bytes_of(role), _FIELD)
            _content(content, out)
        if not message.keys() <= _PROMPT_PLAIN:
            _beside(message, out)


def _beside(message: dict[str, Any], out: list[bytes]) -> None:
    """All the rest of a message, by name."""
    if len(message) > LIMITS.fields:
        out += (_FIELD, _small(orjson.dumps(message)))
        return
    rest = {name: value for name, value in message.items() if value and name not in _PROMPT_PLAIN}
    if rest:
        order = orjson.OPT_SORT_KEYS if len(rest) <= _SORTED_MOST else 0
        out += (_FIELD, _small(orjson.dumps(rest, option=order)), *_JSON_PIECES)


def _content(content: Any, out: list[bytes]) -> None:
    """Text, or parts. One part of text is the same as the text itself: clients write both."""
    if not isinstance(content, list):
        if content:
            out.append(_bytes_of(content))
        return
    for number, part in enumerate(content):
        if len(out) > LIMITS.prompt_pieces and number:
            _rest(content[number:], out)
            return
        if number:
            out.append(_FIELD)
        _part(part, out)


def _part(part: Any, out: list[bytes]) -> None:
    if not isinstance(part, dict):
        out.append(_bytes_of(part))
        return
    text = part.get("text")
    if isinstance(text, str):
        out.append(text.encode())
        return
    if not _MEDIA_NAMES.isdisjoint(part):
        for name in _PROMPT_MEDIA:
            if thing := part.get(name):
                out.append(_media(thing))
                out += _MORE_PIECES
                return
    out += (_bytes_of(part), *_JSON_PIECES)


def _media(thing: Any) -> bytes:
    """Bytes that are specific to this image (by its URL or its data)."""
    if isinstance(thing, dict):
        thing = thing.get("url") or thing.get("data") or thing
    digest = b"%016x" % xxh3_64_intdigest(_bytes_of(thing))
    return digest * (MEDIA_BYTES // len(digest))


def _token_ids(ids: list[Any]) -> bytes:
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError):
        return _bytes_of(ids)


def _bytes_of(value: Any) -> bytes:
    """Text, or JSON. Raises TypeError for values nested more than 254 levels deep."""
    return value.encode() if isinstance(value, str) else _small(orjson.dumps(value))


def _small(written: bytes) -> bytes:
    """The same bytes in no more memory than they take: orjson leaves a kibibyte behind each, and thousands of
    them take twenty times as long to come by as to be written.
    """
    return bytes(memoryview(written)) if len(written) < _ROOMY_BYTES else written
