"""What a client was shown of a stream of blocks: `/v1/messages`, `/v1/responses`. Pure.

Both APIs send an answer as blocks, one after the other: a text, reasoning, the call of a tool. Each begins,
grows and ends by events of its own. A dialect (messages.py, responses.py) says what an event
does; here is what became of the blocks.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, Protocol

import orjson

from cellgate.probes.engines import object_of
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.sse import WORKING, payload, split
from cellgate.proxy.resume.eligible import OPEN, SAMPLED
from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.shown import GrowingText, MismatchError, stitched
from cellgate.proxy.resume.transcript import TEXT_CHARS

TEXT, CALL, THINKING = "text", "call", "reasoning"
"""Kinds of blocks."""
BLOCK_MAX_BLOCKS = 256

_BLOCK_TEXTS = ("delta", "text", "partial_json", "thinking")
"""Names of fields with a piece of a block."""
_ANY_TEXT = rb'(?P<text>"[^"\\]*+(?:\\.[^"\\]*+)*+")'
_BLOCK_NUMBER = re.compile(rb'"sequence_number":\d+')
_ANY_NUMBER = rb'"sequence_number":(?P<number>\\d+)'


class BlockTranscript:
    """What one client was sent of one answer; `framed`: it is read in whole HTTP chunks.

    `frame` is what the answer began with, `sequence` the number of its last event, `finish` how it ends, if
    that was told, `size` its characters, `closed` whether its last event was complete.
    """

    __slots__ = (
        "_is_framed",
        "_is_text_only",
        "_reader",
        "_tail",
        "_template",
        "blocks",
        "closed",
        "finish",
        "frame",
        "is_done",
        "pieces",
        "sequence",
        "size",
        "unsupported",
    )

    def __init__(self, reader: Reader, *, framed: bool, ways: int = 0) -> None:
        self._reader = reader
        self._is_framed = framed
        self._is_text_only = ways == OPEN
        self._tail = b""
        self._template: tuple[re.Pattern[bytes], int] | None = None
        self.blocks: list[Block] = []
        self.frame: dict[str, Any] = {}
        self.finish = self.unsupported = ""
        self.sequence = -1
        self.size = 0
        self.pieces = array("I")
        self.closed, self.is_done = True, False

    @property
    def why_not(self) -> str:
        """Why it cannot be continued, as far as the stream tells; empty when it can."""
        if self.unsupported:
            return f"its stream has carried {self.unsupported}"
        if self.size > TEXT_CHARS:
            return f"it is longer than {TEXT_CHARS} characters"
        if self._is_text_only and self.text is None:
            return f"its stream has carried {self.beyond_text}, {SAMPLED}"
        return ""

    @property
    def next_number(self) -> int:
        """The number of the next event, in APIs that number them."""
        return self.sequence + 1

    @property
    def text(self) -> str | None:
        """Its text, if that is all that it has; None: it has other blocks."""
        if not self.blocks:
            return ""
        return str(self.blocks[0].text) if [block.kind for block in self.blocks] == [TEXT] else None

    @property
    def beyond_text(self) -> str:
        """What it has besides one text; empty: nothing."""
        kinds = {block.kind for block in self.blocks} - {TEXT}
        return " and ".join(sorted(kinds)) or ("several texts" if len(self.blocks) > 1 else "")

    def read(self, pieces: Iterable[bytes]) -> None:
        """Add what was sent; an incomplete event waits for the next piece."""
        for piece in pieces:
            data = piece[piece.index(b"\n") + 1 : -len(b"\r\n")] if self._is_framed else piece
            if self._tail or not self._is_like_the_last(data):
                self._read_events(data)
        for block in self.blocks:
            block.text.settle()

    def skip(self) -> None:
        """The next piece does not follow the last one."""
        self._tail, self.closed = b"", True

    def take(self, document: dict[str, Any]) -> None:
        """Add the object of one event."""
        try:
            act = self._reader.act_of(document)
            self._take(act, document)
        except UnexpectedEventError as error:
            self.unsupported = self.unsupported or str(error)
        number = document.get("sequence_number")
        if type(number) is int:
            self.sequence = number

    def _take(self, act: BlockEvent, document: dict[str, Any]) -> None:
        match act.what:
            case What.BEGIN:
                self.frame = self._reader.head_of(document)
            case What.OPEN:
                if act.block != len(self.blocks) or act.block >= BLOCK_MAX_BLOCKS:
                    raise UnexpectedEventError("blocks that do not follow each other")
                self.blocks.append(Block(act, self._reader.head_of(document)))
            case What.FINISH:
                self.finish = act.finish
            case What.END:
                self.finish, self.is_done = act.finish or self.finish, True
            case What.NOTHING:
                pass
            case _:
                self._take_part(act, document)

    def _take_part(self, act: BlockEvent, document: dict[str, Any]) -> None:
        block = self._block(act.block)
        if act.what is What.GROW:
            self._grow(block, act.text)
        elif act.what is What.MARK:
            block.marks.append(act.kind)
        else:
            block.item, block.closed = self._reader.head_of(document), True

    def _block(self, number: int) -> Block:
        if number != len(self.blocks) - 1 or self.blocks[number].closed:
            raise UnexpectedEventError("events of a block that is not open")
        return self.blocks[number]

    def _grow(self, block: Block, text: str) -> None:
        self.size += len(text)
        if text:
            self.pieces.append(len(text))
        if self.size <= TEXT_CHARS:
            block.text.add(text)

    # -- bytes ---------------------------------------------------------------------------------------------

    def _read_events(self, data: bytes) -> None:
        events, self._tail = split(self._tail + data)
        self.closed = not self._tail
        if len(self._tail) > LIMITS.event_bytes:
            reached("event_bytes")
            self.unsupported = self.unsupported or f"an event larger than {LIMITS.event_bytes} bytes"
            self._tail = b""
        for event in events:
            if not self._is_like_the_last(event) and (body := payload(event)):
                self._read_object(body, event)

    def _read_object(self, body: bytes, event: bytes) -> None:
        document = object_of(body)
        if document is None:
            self.unsupported = self.unsupported or "an event that is not a JSON object"
            return
        before = self.size
        self.take(document)
        if self.size > before and not self.unsupported:
            self._learn(event, document)

    def _learn(self, event: bytes, document: dict[str, Any]) -> None:
        """Nearly all events of a stream differ only in their text and their number: a pattern finds both."""
        delta = document.get("delta")
        fields = delta if isinstance(delta, dict) else document
        name = next(name for name in _BLOCK_TEXTS if isinstance(fields.get(name), str))
        before, found, behind = event.partition(b'"%b":%b' % (name.encode(), orjson.dumps(fields[name])))
        if found:
            sides = (_BLOCK_NUMBER.sub(_ANY_NUMBER, re.escape(side)) for side in (before, behind))
            pattern = (rb'"%b":' % name.encode() + _ANY_TEXT).join(sides)
            self._template = re.compile(pattern), len(self.blocks) - 1

    def _is_like_the_last(self, data: bytes) -> bool:
        """Whether it was one event that only adds to the text of the open block; then it is read.

        This runs for each token of long streams.
        """
        if self._template is None or not (match := self._template[0].fullmatch(data)):
            return False
        if self._template[1] != len(self.blocks) - 1 or self.blocks[-1].is_complete:
            return False
        try:
            self._grow(self.blocks[-1], orjson.loads(match["text"]))
        except orjson.JSONDecodeError:
            return False
        if match.re.groups > 1:
            self.sequence = int(match["number"])
        return True


class What(Enum):
    """What an event does."""

    BEGIN = auto()
    OPEN = auto()
    MARK = auto()
    """Says something of a block that is known without it, such as its whole text at the end."""
    GROW = auto()
    CLOSE = auto()
    FINISH = auto()
    """Tells how the answer ends."""
    END = auto()
    NOTHING = auto()


class BlockEvent(NamedTuple):
    """What an event does; `block` is the number of the block it is about, `text` how much that grows by.

    `kind` of an OPEN is that of its block, of a MARK which one it is. `name` is of a tool that is called.
    """

    what: What
    block: int = 0
    kind: str = ""
    name: str = ""
    text: str = ""
    finish: str = ""


class UnexpectedEventError(Exception):
    """An event that no dialect knows, in words."""


class Block:
    """One block; `head` is the object that it began with, `item` the one that it ended with.

    `marks` are the events that said something of it.
    """

    __slots__ = ("closed", "head", "item", "kind", "marks", "name", "text")

    def __init__(self, act: BlockEvent, head: dict[str, Any]) -> None:
        self.kind, self.name, self.head = act.kind, act.name, head
        self.text = GrowingText()
        self.marks: list[str] = []
        self.item: dict[str, Any] = head
        self.closed = False

    @property
    def is_complete(self) -> bool:
        """Whether the client knows that it does not grow any more."""
        return self.closed or any(mark.endswith(".done") for mark in self.marks)


class Reader(Protocol):
    """The part of a dialect that reads events."""

    def act_of(self, document: dict[str, Any]) -> BlockEvent:
        """What the event with this object does. Raises UnexpectedEventError."""

    def head_of(self, document: dict[str, Any]) -> dict[str, Any]:
        """The object that a BEGIN, OPEN or CLOSE carries."""


def field(document: dict[str, Any], name: str) -> dict[str, Any]:
    """An object within another one. Raises UnexpectedEventError."""
    value = document.get(name)
    if not isinstance(value, dict):
        raise UnexpectedEventError(f"an event without {name}")
    return value


def piece(document: dict[str, Any], name: str) -> str:
    """A text within an object. Raises UnexpectedEventError."""
    value = document.get(name)
    if not isinstance(value, str):
        raise UnexpectedEventError(f"an event without {name}")
    return value


def number(document: dict[str, Any], name: str) -> int:
    """The number of a block. Raises UnexpectedEventError."""
    value = document.get(name)
    if type(value) is not int or not 0 <= value < BLOCK_MAX_BLOCKS:
        raise UnexpectedEventError(f"an event without {name}")
    return value


# Joins two streams of blocks: events of the second unit are rewritten as if the first had sent them. Pure.
#
# The second unit continues the text shown, or starts again from the beginning. Either way it must repeat what
# was shown and it was not given; that does not go to the client again.


_WORKING_EVENTS = 64
"""The client gets a comment for so many events that repeat what it knows."""


class Dialect(Reader, Protocol):
    """An API that streams blocks: messages.py, responses.py. `limit` is the field of a request
    that limits the tokens of its answer; with those of `unstored` no part of an answer is stored.
    """

    name: str
    limit: str
    unstored: ClassVar[dict[str, Any]]

    def prompt_tokens(self, frame: dict[str, Any]) -> int | None:
        """How many tokens the prompt has, as far as the beginning of an answer tells."""

    def placed(self, document: dict[str, Any], block: int, shown: BlockTranscript) -> dict[str, Any]:
        """An event of this block of the answer."""

    def with_text(self, document: dict[str, Any], text: str) -> dict[str, Any]:
        """A GROW that adds only this."""

    def closing(self, block: int, shown: BlockTranscript) -> list[dict[str, Any]]:
        """The events that end an open block of text."""

    def finished(
        self, document: dict[str, Any], shown: BlockTranscript, tokens: Tokens | None
    ) -> dict[str, Any]:
        """The event that tells how the answer ends, for the whole answer."""

    def end(self, shown: BlockTranscript, tokens: Tokens | None) -> list[dict[str, Any]]:
        """The events after the last block, of an answer that has told how it ends, or reached its limit."""


class BlockJoiner:
    """Rewrites the events of one unit. `transcript` is what the client was sent, and grows with them.

    `given` are the tokens of the prompt, and of the text that the unit got to continue; None: it starts from
    the beginning. `is_over`: the answer is complete, further events are ignored.
    """

    def __init__(
        self, dialect: Dialect, transcript: BlockTranscript, given: Tokens | None, start: int = 0
    ) -> None:
        self.transcript = transcript
        self._dialect = dialect
        self._given = given
        blocks = transcript.blocks
        # What is left to be repeated of the block that the unit is in.
        self._left = str(blocks[0].text)[start:] if given is not None and blocks else ""
        self._marks: list[str] = []
        self._base = 0
        """The number of the unit's first block in the answer."""
        self._seen = 0
        """So many blocks of the answer has the unit begun."""
        self._repeated = 0
        self.is_over = False

    def feed(self, events: bytes) -> bytes:
        """Complete events in, what the client gets out. Raises MismatchError."""
        return stitched(events, self._stitched, lambda: self.is_over)

    def _stitched(self, event: bytes) -> bytes:
        data = payload(event)
        if not data:
            return event
        document = object_of(data)
        if document is None:
            raise MismatchError("an event that is not a JSON object")
        try:
            act = self._dialect.act_of(document)
            # Each is a part of what was shown before the next is made.
            out = b"".join(write(each, self.transcript) for each in self._news(act, document))
        except UnexpectedEventError as error:
            raise MismatchError(str(error)) from error
        if out:
            return out
        self._repeated += 1
        return b"" if self._repeated % _WORKING_EVENTS else WORKING

    def _news(self, act: BlockEvent, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events for the client in return for one of the unit's."""
        match act.what:
            case What.BEGIN:
                self._check_prompt(document)
                if not self.transcript.frame:
                    yield document
            case What.NOTHING:
                return
            case What.OPEN:
                yield from self._opened(act, document)
            case What.FINISH | What.END:
                yield from self._ended(act, document)
            case _:
                yield from self._part(act, document)

    def _check_prompt(self, document: dict[str, Any]) -> None:
        """A unit that was given a text has it in its prompt."""
        counted = self._dialect.prompt_tokens(self._dialect.head_of(document))
        given = self._given
        if given is None or given.prompt is None or counted is None:
            return
        if counted != (expected := given.prompt + given.shown):
            raise MismatchError(f"an answer to a prompt of {counted} tokens instead of the {expected} given")

    def _opened(self, act: BlockEvent, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
        shown = self.transcript.blocks
        if self._seen == 0 and self._given is not None and act.kind != TEXT:
            yield from self._closed()
            self._base = self._seen = len(shown)
        block = self._base + act.block
        if block != self._seen or (block and not self._is_repeated(block - 1)):
            raise MismatchError("blocks that do not follow each other")
        self._seen += 1
        if block == len(shown):
            yield self._dialect.placed(document, block, self.transcript)
            return
        if (act.kind, act.name) != (shown[block].kind, shown[block].name):
            raise MismatchError("another block than the one that was sent before")
        self._marks = list(shown[block].marks)
        if self._given is None:
            self._left = str(shown[block].text)

    def _is_repeated(self, block: int) -> bool:
        """Whether the unit has repeated all of the block that it was in."""
        return not self._left and not self._marks and self.transcript.blocks[block].closed

    def _part(self, act: BlockEvent, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An event of the block that the unit is in."""
        number, dialect = self._base + act.block, self._dialect
        if number != self._seen - 1:
            raise MismatchError("events of a block that is not open")
        block = self.transcript.blocks[number]
        if act.what is What.GROW:
            if news := self._cut(act.text):
                if block.is_complete:
                    raise MismatchError("more text than was sent before")
                yield dialect.placed(dialect.with_text(document, news), number, self.transcript)
            return
        if self._left and (act.what is What.CLOSE or act.kind.endswith(".done")):
            raise MismatchError("less text than was sent before")
        if self._marks:
            if self._marks.pop(0) != act.kind:
                raise MismatchError("other events than were sent before")
        elif not block.closed:
            yield dialect.placed(document, number, self.transcript)

    def _cut(self, text: str) -> str:
        """The new part of a text."""
        left = self._left
        if not left.startswith(text[: len(left)]):
            raise MismatchError("a text that differs from what was sent before")
        self._left = left[len(text) :]
        return text[len(left) :]

    def _closed(self) -> Iterator[dict[str, Any]]:
        """The events that end the text, to which the unit has nothing to add."""
        blocks = self.transcript.blocks
        if self._left:
            raise MismatchError("less text than was sent before")
        if blocks and not blocks[-1].closed:
            yield from self._dialect.closing(len(blocks) - 1, self.transcript)

    def _ended(self, act: BlockEvent, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The unit tells how the answer ends, or that it has."""
        shown = self.transcript
        if self._seen == 0 and self._given is not None:
            yield from self._closed()
        elif self._left or self._seen < len(shown.blocks):
            raise MismatchError("less than was sent before")
        if act.finish and shown.finish and act.finish != shown.finish:
            raise MismatchError("an end that differs from what was sent before")
        self.is_over = act.what is What.END
        if act.what is What.END or not shown.finish:
            yield self._dialect.finished(document, shown, self._given) if act.finish else document


def write(document: dict[str, Any], shown: BlockTranscript) -> bytes:
    """One event for the client; from then on it belongs to what was shown."""
    if shown.sequence >= 0:
        document = document | {"sequence_number": shown.sequence + 1}
    shown.take(document)
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), orjson.dumps(document))


def last_of(dialect: Dialect, shown: BlockTranscript, tokens: Tokens | None) -> bytes:
    """The last events of an answer whose text is complete."""
    blocks = shown.blocks
    closing = dialect.closing(len(blocks) - 1, shown) if blocks and not blocks[-1].closed else []
    out = b"".join(write(document, shown) for document in closing)
    return out + b"".join(write(document, shown) for document in dialect.end(shown, tokens))
