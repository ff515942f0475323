"""Makes an Ask from a request. The body is parsed once, here and nowhere else."""

from __future__ import annotations

import codecs
import json
import re
from array import array
from math import inf
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64_intdigest

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.resume.streams import WAYS
from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.nouns import Ask

BYTES_PER_TOKEN = 4
ANSWERS_MAX = 1 << 16
"""More answers of one request are not reckoned with."""
SPLIT_ROUTES = ("chat", "completions")
"""Paths of which engines take a prompt that another one has computed."""
_LOOKED_AT_BYTES = 1 << 20
_MARKS = b",[{"
"""One of these precedes each value except the first: parsing takes time and memory in proportion to them."""
_FEW_STRINGS = 32
_NAME_CHARS = LIMITS.name_chars
_NOBODY: tuple[str | None, str, int] = (None, "", 0)
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NO_NUMBERS = (b"NaN", b"Infinity")
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")
_NOT_READ = object()
_BACKSLASH = ord("\\")
_NO_MARKS = bytes(set(range(256)) - set(_MARKS + b'"'))
_new = tuple.__new__
"""What the constructor of a named tuple calls, in a third of the time."""


def is_large(body: bytes) -> bool:
    """Whether it must be parsed in another process, because parsing would block all streams."""
    if len(body) <= LIMITS.json_nodes_on_loop:
        return False
    return len(body) > LIMITS.json_bytes_on_loop or has_more_nodes(body, LIMITS.json_nodes_on_loop)


def has_more_nodes(body: bytes, limit: int) -> bool:
    """Whether JSON has more than `limit` values, known without parsing it."""
    if _is_text(body, limit) or _marks(body) <= limit:
        return False
    # Marks inside strings do not count, so strings are removed first.
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_MARKS)
    # A value has at most one key, so there are at most two strings for each value.
    if bare.count(b'"') > 4 * (limit + 1):
        return True
    return sum(map(len, bare.split(b'"')[::2])) > limit


def read_large_ask(body: bytes, route: str = "") -> Ask | Failure:
    """`read_ask` for a body of any size, off the loop. A body with too many values is refused unparsed."""
    if has_more_nodes(body, LIMITS.json_nodes):
        reached("json_nodes")
        return Failure(FailureKind.BAD_JSON, f"the body has more than {LIMITS.json_nodes} values")
    return read_ask(body, route)


def read_ask(body: bytes, route: str = "", payer: str = "") -> Ask | Failure:
    """What a JSON body asks for, or what is wrong with it (the position is named where there is one).

    Only streams of a known `route` can be resumed. `payer` is who pays for it, if that is known.
    """
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        data = _as_python(body)
        if data is _NOT_READ:
            return _unreadable(error)
    if not isinstance(data, dict):
        return Failure(FailureKind.BAD_JSON, f"the body must be a JSON object, not {_kind_of(data)}")
    model = data.get("model")
    if (type(model) is not str or len(model) > _NAME_CHARS) and model is not None:
        return _no_model(model)
    names = tuple(data)
    shape = _shapes.get(names) or _new_shape(names)
    return ask_of(model, data, shape, prompt_in(data, shape, body), route, payer)


def ask_of(
    model: str | None,
    data: dict[str, Any],
    shape: BodyShape,
    prompt: tuple[tuple[int, ...], int, int],
    route: str,
    payer: str,
) -> Ask:
    """What a parsed body asks for, whose prompt is known."""
    blocks, size, fingerprint = prompt
    follows, user, priority = _personal(data) if shape.is_personal else _NOBODY
    limit: Any = 0
    for name in shape.limits:
        if limit := data[name]:
            break
    answers = 1
    if shape.multiplies:
        limit, answers = _several(data, limit)
    stream = data.get("stream") is True
    ask = (
        model,
        stream,
        size // BYTES_PER_TOKEN,
        None,
        follows,
        size,
        blocks,
        user,
        "",
        priority,
        inf,
        WAYS[route](data) if stream and route in WAYS else 0,
        fingerprint,
        limit if type(limit) is int and limit > 0 else 0,
        None,
        route in SPLIT_ROUTES,
        answers,
        route,
        payer,
    )
    return _new(Ask, ask)


def _as_python(body: bytes) -> Any:
    """JSON as Python's own parser takes it, which engines use: with a mark of its encoding, in UTF-16 or
    UTF-32, with numbers that are none. _NOT_READ: it is none of these.
    """
    if not (
        body.startswith(_BYTE_ORDER_MARKS) or b"\0" in body[:4] or any(name in body for name in _NO_NUMBERS)
    ):
        return _NOT_READ
    try:
        text = body.decode(json.detect_encoding(body))
        data = json.loads(text)
        # Half a character in an escape, which engines refuse as text, and which cannot be hashed.
        if _HALVES.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _NOT_READ
    return data


def _several(data: dict[str, Any], limit: Any) -> tuple[Any, int]:
    """The longest answer, wherever that stands, and how many there will be: `n` (or `best_of`) a prompt."""
    nested = data.get("sampling_params") or data.get("parameters")
    options = nested if isinstance(nested, dict) else data
    limit = limit or options.get("max_new_tokens") or options.get("max_tokens")
    wanted = (options.get("n"), options.get("best_of"), 1)
    each = max(count for count in wanted if type(count) is int)
    prompts = data.get("prompt") or data.get("text") or data.get("input_ids")
    if isinstance(prompts, list) and not isinstance(prompts[0], int):
        each *= len(prompts)
    return limit, min(each, ANSWERS_MAX)


def _no_model(model: object) -> Failure:
    """Why this cannot be the name of a model."""
    reason = f"`model` must be a string, not {_kind_of(model)}"
    if isinstance(model, str):
        reached("name_chars")
        reason = f"`model` is longer than {LIMITS.name_chars} characters"
    return Failure(FailureKind.BAD_JSON, reason, param="model")


def _personal(data: dict[str, Any]) -> tuple[str | None, str, int]:
    """The response that it follows, its user, and its priority."""
    follows, user, priority = data.get("previous_response_id"), data.get("user"), data.get("priority")
    return (
        follows if isinstance(follows, str) and len(follows) <= LIMITS.name_chars else None,
        user[: LIMITS.name_chars] if isinstance(user, str) else "",
        0 if priority is None else priority if isinstance(priority, int) else _engines_integer(priority),
    )


def _engines_integer(value: object) -> int:
    """What engines take this for where an integer belongs (pydantic reads "-1" and -1.0 as -1).

    0: they refuse it.
    """
    try:
        number = float(value) if isinstance(value, (str, float)) else 0.0
    except ValueError:
        return 0
    return int(number) if number.is_integer() else 0


def _is_text(body: bytes, limit: int) -> bool:
    """Whether all but `limit` bytes of a body are a few long strings, which is seen in a tenth of the time
    that counting marks takes. False if that is not sure.
    """
    at = 0
    for _ in range(_FEW_STRINGS):
        begin = body.find(b'"', at)
        if begin < 0:
            # Each value is a string, or takes a byte outside of strings.
            return limit >= _FEW_STRINGS + len(body) - at
        limit -= begin - at
        at = body.find(b'"', begin + 1) + 1
        if not at or body[at - 2] == _BACKSLASH:
            return False
    return False


def _marks(body: bytes) -> int:
    return len(body) - len(body.translate(None, _MARKS))


def _unreadable(error: orjson.JSONDecodeError) -> Failure:
    what, where = error.msg, f"line {error.lineno} column {error.colno} (char {error.pos})"
    if what.startswith("depth limit"):
        reached("json_depth")
        what = f"more than {LIMITS.json_depth} objects and arrays within each other"
    return Failure(FailureKind.BAD_JSON, f"the body is not valid JSON: {what} at {where}")


def plain_ask(target: bytes, body: bytes) -> Ask:
    """The ask of a request without JSON; only the beginning of its body is used."""
    return Ask(fingerprint=xxh3_64_intdigest(target + b"\0" + body[:_LOOKED_AT_BYTES], len(body)))


def stored_ask(path: bytes) -> Ask:
    """The ask of `/v1/responses/{id}` and the paths below it: bound to the unit that made that response."""
    return Ask(unit="", follows=path.split(b"/")[3].decode("latin-1"))


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


# What follows from the names of a body's fields alone: what its prompt is made of, in which order.
#
# A client sends the same names with each of its requests, so it is worked out once. What is kept is bounded:
# a client may send any names.


KEPT = 512
"""Shapes that are kept. If there are more, all are forgotten."""
_KEPT_CHARS = 1024
"""The names of a shape that is kept have so many characters at most, all together."""

_PREAMBLE = ("tools", "functions", "documents", "instructions", "system")
_PROMPTS = ("messages", "prompt", "input", "text", "text_input", "input_ids", "token_ids")
_RENDERING = ("cache_salt", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")
"""Fields that change the whole prompt."""
NAMES = frozenset((*_PREAMBLE, *_PROMPTS, *_RENDERING))
"""All fields of a body that its prompt depends on."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The length of the answer; the first of them that is set counts."""
_MULTIPLIES = frozenset(("n", "best_of", "prompt", "text", "input_ids", "sampling_params", "parameters"))
"""Fields that may ask for several answers, or bound them in another place."""
_PERSONAL = frozenset(("previous_response_id", "user", "priority"))
VARIES = frozenset(
    (
        *("stream", "stream_options", "user", "metadata", "store", "priority", "request_id", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "seed", "temperature", "top_p", "top_k", "min_p", "stop"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *_LIMITS,
    )
)
"""Fields that clients change from one try to the next, and that do not end engines."""
_NO_PART = NAMES | VARIES | {"model"}
"""Fields that the fingerprint has from the prompt, or leaves out."""


class BodyShape:
    """The names of one kind of body, by what they mean: the prompt is made of `preamble` and `prompts`, in
    this order; `rendering` changes all of it; `more` are other fields that change the work of an engine;
    `limits` bound the answer; `multiplies`: others may as well, or ask for several. `is_personal`: it
    tells its user, a priority, or the response that it follows.
    """

    __slots__ = ("is_personal", "limits", "more", "multiplies", "preamble", "prompts", "rendering")

    def __init__(self, names: tuple[str, ...]) -> None:
        present = frozenset(names)
        self.preamble = tuple(name for name in _PREAMBLE if name in present)
        self.prompts = tuple(name for name in _PROMPTS if name in present)
        # With only one of these names, that one is the prompt, or there is none.
        has_several = len(present & NAMES) > 1
        self.rendering = tuple(name for name in _RENDERING if name in present) if has_several else ()
        more = present - _NO_PART
        self.more = tuple(sorted(more)) if len(more) <= LIMITS.fields else names
        self.limits = tuple(name for name in _LIMITS if name in present)
        self.multiplies = not present.isdisjoint(_MULTIPLIES)
        self.is_personal = not present.isdisjoint(_PERSONAL)


_shapes: dict[tuple[str, ...], BodyShape] = {}


def shape_of_body(body: dict[str, Any]) -> BodyShape:
    """The shape of a parsed body."""
    names = tuple(body)
    return _shapes.get(names) or _new_shape(names)


def _new_shape(names: tuple[str, ...]) -> BodyShape:
    shape = BodyShape(names)
    if len(names) <= LIMITS.fields and sum(map(len, names)) <= _KEPT_CHARS:
        if len(_shapes) >= KEPT:
            _shapes.clear()
        _shapes[names] = shape
    return shape


# The prompt of a request as a chain of block hashes: a common beginning is seen without keeping any text.
#
# The prompt is written as one run of bytes in the order in which chat templates render it: tools and system
# text, then the messages. What must stay true: equal beginnings give equal bytes and so equal hashes, and
# nothing that a client appends changes a block that was full before. It is an estimate of what an engine
# caches, never an identity: a wrong one costs time, not correctness.
#
# So many pieces of it are looked at one by one, and what comes after them is taken as it is: what a client
# can make this cost is bounded, and what it appends still changes no block before.


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
_MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "image", "source", "file", "file_data")
_MEDIA_NAMES = frozenset(_MEDIA)
_PLAIN = frozenset(("role", "content"))


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
        if not message.keys() <= _PLAIN:
            _beside(message, out)


def _beside(message: dict[str, Any], out: list[bytes]) -> None:
    """All the rest of a message, by name."""
    if len(message) > LIMITS.fields:
        out += (_FIELD, _small(orjson.dumps(message)))
        return
    rest = {name: value for name, value in message.items() if value and name not in _PLAIN}
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
        for name in _MEDIA:
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
