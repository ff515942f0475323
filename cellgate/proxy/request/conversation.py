"""A body of messages, read part by part, so that a part that is known need not be read again. Pure.

A body is a *frame* (all that is not messages) around messages, and these are cut into *runs*. Each run is
parsed as a list by itself, and the frame with a mark in the place of the messages. Where to cut is a guess;
that all of them parse proves it: then the body is the frame with all these lists in it. What is found is what
`body.read_ask` finds. A body that is unusual in any way is left to that, and so is any that is invalid.

In this order: `Frame`, `begin_of`, `begun`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from cellgate.probes.engines import object_of, parsed
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.body import BYTES_PER_TOKEN, ask_of, is_large
from cellgate.proxy.request.body_shape import NAMES, USUAL, shape_of_body
from cellgate.proxy.request.one_meaning import weighty_in, why_twofold
from cellgate.proxy.request.prompt import (
    MAX_BLOCKS,
    block_hashes,
    more_of,
    pieces_of,
    seed_of,
    write_messages,
)
from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.nouns import Ask

RUN_BYTES = 65_536
"""A run ends with the first message after so many bytes, or with the last one."""
HISTORY_BODY_BYTES = MAX_BLOCKS * BLOCK_BYTES
"""Larger bodies are read as a whole."""
FRAME_BYTES = 1 << 18
"""So are those with a larger frame."""
_HISTORY_PIECES = 8 * LIMITS.prompt_pieces
"""So many pieces of a prompt are read one by one, but for one turn: of it no more than of any other body."""
_GUESSES = 4
"""So many guesses of one body may be wrong, of each kind."""
SEARCHED_BYTES = 1 << 16
"""So much of one body is looked at to find where it may be cut; the rest is one run. A byte takes up to
40 ns."""

_MESSAGES = {"chat": "messages", "messages": "messages", "responses": "input"}
"""By route: where its messages are."""
_BLANK = b" \t\r\n"
_GAP = rb"[ \t\r\n]{0,64}"
_HISTORY_OPEN = {
    name: re.compile(rb'"%b"%b:%b\[' % (name.encode(), _GAP, _GAP)) for name in _MESSAGES.values()
}
_HISTORY_FIRST = (
    rb"role|content|call_id|arguments|id|output|summary|encrypted_content"
    rb'|type"%b:%b"(?:message|reasoning|item_reference|[a-z_]*_call(?:_output)?)' % (_GAP, _GAP)
)
"""Fields that messages begin with, and their parts do not."""
_HISTORY_CUT = re.compile(rb'\},%b\{%b"(?:%b)"' % (_GAP, _GAP, _HISTORY_FIRST))
"""What looks like the end of a message that another one follows."""
_HISTORY_FIELDS = "|".join(sorted(NAMES | USUAL | {"model", "tool_choice", "response_format"})).encode()
_END = re.compile(rb'\],%b"(?:%b)"%b:' % (_GAP, _HISTORY_FIELDS, _GAP))
"""What looks like the end of all messages, behind which other fields follow."""
_HISTORY_LAST = re.compile(rb"\]%b\}%b\Z" % (_GAP, _GAP))
_LAST_BYTES = 256
_COMMA = re.compile(rb"[ \t\r\n]*,")
_HISTORY_MARK = secrets.token_hex(16)
_MARKED = f'"{_HISTORY_MARK}"'.encode()


class PromptSoFar(NamedTuple):
    """How far a prompt has been written: `pieces` of it, `size` bytes. `seed` is the hash of its last full
    block, `rest` what follows that.
    """

    seed: int
    rest: bytes
    size: int
    pieces: int


class FrameAsk(NamedTuple):
    """What follows from a frame whatever its messages are: `ask`, without a prompt; what the prompt ends with
    (the `pieces` of `suffix`); and `more`, which counts for its fingerprint only.
    """

    ask: Ask
    suffix: bytes
    pieces: int
    more: bytes


class Frame(NamedTuple):
    """A body without its messages, which stand from `begin` to `end`. Its prompt begins with the `pieces` of
    `preamble`, seeded with `seed`.
    """

    begin: int
    end: int
    seed: int
    preamble: bytes
    pieces: int
    asking: FrameAsk


class RunRead(NamedTuple):
    """A run that was read: where it ends, its new blocks, and how far the prompt is written then."""

    end: int
    blocks: tuple[int, ...]
    written: PromptSoFar


class Conversation(NamedTuple):
    """All of a body, read."""

    ask: Ask
    frame: Frame
    steps: list[RunRead]


class UnusualError(Exception):
    """This body is to be read as a whole."""


def read_conversation(body: bytes, route: str) -> Conversation | None:
    """Read a body of which nothing is known. None: it is to be read as a whole."""
    try:
        begin = begin_of(body, route)
        cuts = cuts_in(body, begin, len(body))
        frame = find_frame(body, begin, cuts[-1] if cuts else begin, route)
        blocks, written = begun(frame)
        steps = read_runs(body, begin, begin, cuts, frame.end, written, _HISTORY_PIECES)
        all_blocks = [blocks, *(step.blocks for step in steps)]
        return Conversation(asked(frame.asking, all_blocks, steps[-1].written), frame, steps)
    except UnusualError:
        return None


# -- where to cut ----------------------------------------------------------------------------------------


def begin_of(body: bytes, route: str) -> int:
    """Where the messages begin. Raises UnusualError."""
    name = _MESSAGES.get(route)
    if name is None or len(body) > HISTORY_BODY_BYTES:
        raise UnusualError
    found = _HISTORY_OPEN[name].search(body, 0, FRAME_BYTES)
    if found is None:
        raise UnusualError
    return found.end()


def cuts_in(body: bytes, at: int, end: int) -> list[int]:
    """Where runs may end, if the first of them begins at `at`."""
    cuts, left = [], SEARCHED_BYTES
    while (cut := next_cut(body, at, min(end, at + RUN_BYTES + left))) > 0:
        left -= cut - at - RUN_BYTES
        at = cut
        cuts.append(cut)
    return cuts


def next_cut(body: bytes, at: int, end: int) -> int:
    """Where a run that begins at `at` may end, before `end`; 0: nowhere."""
    found = _HISTORY_CUT.search(body, at + RUN_BYTES, end)
    return 0 if found is None else found.start() + 1


def find_frame(body: bytes, begin: int, at: int, route: str) -> Frame:
    """The frame of a body whose messages end behind `at`. Raises UnusualError."""
    at = max(at, len(body) - FRAME_BYTES)
    last = _HISTORY_LAST.search(body, max(at, len(body) - _LAST_BYTES))
    for found in (*islice(_END.finditer(body, at), _GUESSES), *((last,) if last else ())):
        end = found.start()
        while end > at and body[end - 1] in _BLANK:
            end -= 1
        try:
            return _read_frame(body, begin, end, route)
        except UnusualError:
            continue
    raise UnusualError


# -- reading ---------------------------------------------------------------------------------------------


def _read_frame(body: bytes, begin: int, end: int, route: str) -> Frame:
    """Parse all but the messages. Raises UnusualError."""
    name = _MESSAGES[route]
    text = b"".join((body[:begin], _MARKED, body[end:]))
    if len(text) > FRAME_BYTES or is_large(text):
        raise UnusualError
    data = object_of(text)
    # Nobody knows the mark: where it is found, the messages are, and no other field of this name follows.
    if data is None or data.get(name) != [_HISTORY_MARK]:
        raise UnusualError
    model = data.get("model")
    if (type(model) is not str or len(model) > LIMITS.name_chars) and model is not None:
        raise UnusualError
    shape = shape_of_body(data)
    if len(weighty_in(text)) > shape.weighty and why_twofold(tuple(data), text) is not None:
        raise UnusualError
    if shape.prompts[0] != name or name in shape.more or data.get("continue_final_message"):
        raise UnusualError
    # Nothing else of an ask depends on what messages say.
    data[name] = [{}]
    try:
        before = pieces_of(data, shape.preamble, ())
        behind = pieces_of(data, (), shape.prompts[1:])
        seed = seed_of(data, shape.rendering)
        more = more_of(data, shape.more) if shape.more else b""
    except TypeError:
        raise UnusualError from None
    ask = ask_of(model, data, shape, ((), 0, 0), route, "")
    asking = FrameAsk(ask, b"".join(behind), len(behind), more)
    return Frame(begin, end, seed, b"".join(before), len(before), asking)


def begun(frame: Frame) -> tuple[tuple[int, ...], PromptSoFar]:
    """The blocks of what comes before the messages. Raises UnusualError."""
    return _write_on(PromptSoFar(frame.seed, b"", 0, 0), frame.preamble, frame.pieces)


def read_runs(
    body: bytes,
    begin: int,
    at: int,
    cuts: Sequence[int],
    end: int,
    written: PromptSoFar,
    pieces: int = LIMITS.prompt_pieces,
) -> list[RunRead]:
    """Parse the messages from `at` on; all of them stand from `begin` to `end`. Raises UnusualError, also for
    more than so many `pieces` of a prompt.
    """
    steps: list[RunRead] = []
    wrong, most = 0, written.pieces + pieces
    for cut in (*cuts, end):
        if cut == at != begin or cut > end:
            continue
        messages = _messages_in(body, at, cut, is_first=at == begin)
        if messages is None:
            # It may be cut within a message; with the next run it is whole then.
            wrong += 1
            if cut == end or wrong > _GUESSES:
                raise UnusualError
            continue
        out: list[bytes] = []
        try:
            write_messages(messages, out)
        except TypeError:
            raise UnusualError from None
        blocks, written = _write_on(written, b"".join(out), len(out))
        if written.pieces > most:
            raise UnusualError
        steps.append(RunRead(cut, blocks, written))
        at = cut
    return steps


def _messages_in(body: bytes, at: int, cut: int, *, is_first: bool) -> list[dict[str, Any]] | None:
    """The messages between two cuts; None: there are none, or they are not whole. Raises UnusualError."""
    if not is_first:
        comma = _COMMA.match(body, at, cut)
        if comma is None:
            raise UnusualError
        at = comma.end()
    # As deep as they are in the body.
    lists = parsed(b"".join((b"[[", memoryview(body)[at:cut], b"]]")))
    if lists is None or len(lists) != 1 or not lists[0]:
        return None
    messages: list[dict[str, Any]] = lists[0]
    if not all(type(message) is dict for message in messages):
        raise UnusualError
    return messages


def _write_on(written: PromptSoFar, text: bytes, pieces: int) -> tuple[tuple[int, ...], PromptSoFar]:
    """The blocks that are full with more of a prompt. Raises UnusualError for one that is so long, or has so
    many pieces, that not all of it would be hashed in this way.
    """
    size, pieces = written.size + len(text), written.pieces + pieces
    if size > HISTORY_BODY_BYTES or pieces > _HISTORY_PIECES:
        raise UnusualError
    text = written.rest + text
    blocks = block_hashes(text, written.seed)
    seed = blocks[-1] if blocks else written.seed
    return blocks, PromptSoFar(seed, text[len(blocks) * BLOCK_BYTES :], size, pieces)


def asked(asking: FrameAsk, blocks: Iterable[tuple[int, ...]], written: PromptSoFar, payer: str = "") -> Ask:
    """What a body asks for whose messages are all written. Raises UnusualError."""
    last, written = _write_on(written, asking.suffix, asking.pieces)
    fingerprint = xxh3_64_intdigest(written.rest, written.seed)
    if asking.more:
        fingerprint = xxh3_64_intdigest(asking.more, fingerprint)
    return asking.ask._replace(
        prompt_tokens=written.size // BYTES_PER_TOKEN,
        prompt_bytes=written.size,
        blocks=tuple(chain(*blocks, last)),
        fingerprint=fingerprint,
        payer=payer,
    )
