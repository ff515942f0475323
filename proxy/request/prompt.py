"""The prompt of a request as a chain of block hashes: a common beginning is seen without keeping any text.

The prompt is written as one run of bytes in the order in which chat templates render it: tools and system
text, then the messages. What must stay true: equal beginnings give equal bytes and so equal hashes, and
nothing that a client appends changes a block that was full before. It is an estimate of what an engine
caches, never an identity: a wrong one costs time, not correctness.

So many pieces of it are looked at one by one, and what comes after them is taken as it is: what a client can
make this cost is bounded, and what it appends still changes no block before.
"""

from __future__ import annotations

from array import array
from collections.abc import Set
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64_intdigest

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.router.cost_model import BLOCK_BYTES

MAX_BLOCKS = 8192
"""Blocks beyond (4 MiB) are counted and not hashed: no engine's context is longer."""
TOKEN_ID_BYTES = 4
"""A token id takes as many bytes as a token of text does on average."""
MEDIA_BYTES = 2048
"""An image, a sound or a video counts as this many bytes, whatever the size of its file."""

_RECORD, _FIELD = b"\x1e", b"\x1f"
_PREAMBLE = ("tools", "functions", "documents", "instructions", "system")
_PROMPTS = ("messages", "prompt", "input", "text", "text_input", "input_ids", "token_ids")
_MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "image", "source", "file", "file_data")
_RENDERING = ("cache_salt", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")
"""Fields that change the whole prompt."""
_IN_ORDER = (*_PREAMBLE, *_PROMPTS)
NAMES = frozenset((*_IN_ORDER, *_RENDERING))
"""All fields of a body that its prompt depends on."""
_PLAIN = frozenset(("role", "content"))
_NONE: frozenset[str] = frozenset()
_new = tuple.__new__
"""What the constructor of a named tuple calls, in a third of the time."""


_VARIES = frozenset(
    (
        *("stream", "stream_options", "user", "metadata", "store", "priority", "request_id", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "seed", "temperature", "top_p", "top_k", "min_p", "stop"),
        *(
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "frequency_penalty",
            "presence_penalty",
        ),
        "repetition_penalty",
    )
)
"""Fields that clients change from one try to the next, and that do not end engines."""
_NO_PART = NAMES | _VARIES | {"model"}
"""Fields that the fingerprint has from the prompt, or leaves out."""


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
    # Mostly one of the names occurs in a body: it is searched once, and not once for each name.
    found = NAMES & data.keys()
    try:
        text, seed = canonical(data, found), _seed(data, found)
        names = data.keys() - _NO_PART
        more = _more(data, names) if names else b""
    except TypeError:
        text, seed, more = body, _seed(data, _NONE), b""
    blocks = block_hashes(text, seed)
    fingerprint = xxh3_64_intdigest(text[len(blocks) * BLOCK_BYTES :], blocks[-1] if blocks else seed)
    if more:
        fingerprint = xxh3_64_intdigest(more, fingerprint)
    return _new(Prompt, (blocks, len(text), fingerprint))


def block_hashes(text: bytes, seed: int) -> tuple[int, ...]:
    """The hash of each full block, seeded with the one before it. 60 bits: an int of two digits, 32 bytes."""
    end = min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES
    return tuple(
        [
            seed := xxh3_64_intdigest(text[at : at + BLOCK_BYTES], seed) >> 4
            for at in range(0, end, BLOCK_BYTES)
        ]
    )


def canonical(data: dict[str, Any], found: Set[str]) -> bytes:
    """The prompt as one run of bytes; `found` are the names of NAMES that are in it."""
    out: list[bytes] = []
    for name in found if len(found) == 1 else _IN_ORDER:
        if name not in found or not (value := data[name]):
            continue
        if name in _PROMPTS:
            _prompt(value, out)
        elif name in _PREAMBLE:
            out += (_RECORD, name.encode(), _FIELD)
            _content(value, out)
    return b"".join(out)


def _seed(data: dict[str, Any], found: Set[str]) -> int:
    model = data.get("model")
    first = model.encode() if isinstance(model, str) else b""
    if len(found) <= 1:
        # This one is the prompt, or there is none.
        return xxh3_64_intdigest(first)
    parts = [first, *(_bytes_of(data[name]) for name in _RENDERING if name in found and data[name])]
    return xxh3_64_intdigest(_FIELD.join(parts))


def _more(data: dict[str, Any], names: Set[str]) -> bytes:
    """The fields of these names: those beside the prompt that change the work of an engine."""
    return _bytes_of({name: data[name] for name in sorted(names)} if len(names) <= LIMITS.fields else data)


def _prompt(value: Any, out: list[bytes]) -> None:
    """Text, token ids, messages, or several texts or lists of ids, one after another."""
    if not isinstance(value, list):
        out.append(_bytes_of(value))
    elif isinstance(value[0], int):
        out.append(_token_ids(value))
    else:
        add = _message if isinstance(value[0], dict) else _one_of_several
        for number, each in enumerate(value):
            if len(out) > LIMITS.prompt_pieces:
                _rest(value, number, out)
                return
            add(each, out)


def _one_of_several(prompt: Any, out: list[bytes]) -> None:
    out += (_RECORD, _token_ids(prompt) if isinstance(prompt, list) else _bytes_of(prompt))


def _rest(value: list[Any], start: int, out: list[bytes]) -> None:
    """The pieces from `start` on are too many to be read one by one."""
    reached("prompt_pieces")
    out += (_RECORD, _bytes_of(value[start:]))


def _message(message: Any, out: list[bytes]) -> None:
    """A message of a chat, or an item of a response's input: role, content, then all the rest by name."""
    if not isinstance(message, dict):
        out += (_RECORD, _bytes_of(message))
        return
    role, content = message.get("role", ""), message.get("content")
    if type(content) is str and type(role) is str:
        out += (_RECORD, role.encode(), _FIELD, content.encode())
        if len(message) == 2:
            return
    else:
        out += (_RECORD, _bytes_of(role), _FIELD)
        _content(content, out)
    if len(message) > LIMITS.fields:
        out += (_FIELD, orjson.dumps(message, option=orjson.OPT_SORT_KEYS))
    elif not message.keys() <= _PLAIN:
        rest = {name: value for name, value in message.items() if value and name not in _PLAIN}
        if rest:
            out += (_FIELD, orjson.dumps(rest, option=orjson.OPT_SORT_KEYS))


def _content(content: Any, out: list[bytes]) -> None:
    """Text, or parts. One part of text is the same as the text itself: clients write both."""
    if not isinstance(content, list):
        if content:
            out.append(_bytes_of(content))
        return
    for number, part in enumerate(content):
        if len(out) > LIMITS.prompt_pieces and number:
            _rest(content, number, out)
            return
        if number:
            out.append(_FIELD)
        out.append(_part(part))


def _part(part: Any) -> bytes:
    if not isinstance(part, dict):
        return _bytes_of(part)
    text = part.get("text")
    if isinstance(text, str):
        return text.encode()
    for name in _MEDIA:
        if thing := part.get(name):
            return _media(thing)
    return _bytes_of(part)


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
    return value.encode() if isinstance(value, str) else orjson.dumps(value)
