"""What a client was shown of a stream of blocks: `/v1/messages`, `/v1/responses`. Pure.

Both APIs send an answer as blocks, one after the other: a text, reasoning, the call of a tool. Each begins,
grows and ends by events of its own. A dialect (messages_stream.py, responses_stream.py) says what an event
does; here is what became of the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import orjson

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.resume.eligible import OPEN, SAMPLED
from cellgate.proxy.resume.shown import GrowingText
from cellgate.proxy.resume.transcript import TEXT_CHARS
from cellgate.proxy.wire.sse import payload, split

TEXT, CALL, THINKING = "text", "call", "reasoning"
"""Kinds of blocks."""
MAX_BLOCKS = 256

_TEXTS = ("delta", "text", "partial_json", "thinking")
"""Names of fields with a piece of a block."""
_ANY_TEXT = rb'(?P<text>"[^"\\]*+(?:\\.[^"\\]*+)*+")'
_NUMBER = re.compile(rb'"sequence_number":\d+')
_ANY_NUMBER = rb'"sequence_number":(?P<number>\\d+)'


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


class StrangeError(Exception):
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
        """What the event with this object does. Raises StrangeError."""

    def head_of(self, document: dict[str, Any]) -> dict[str, Any]:
        """The object that a BEGIN, OPEN or CLOSE carries."""


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
        except StrangeError as error:
            self.unsupported = self.unsupported or str(error)
        number = document.get("sequence_number")
        if type(number) is int:
            self.sequence = number

    def _take(self, act: BlockEvent, document: dict[str, Any]) -> None:
        match act.what:
            case What.BEGIN:
                self.frame = self._reader.head_of(document)
            case What.OPEN:
                if act.block != len(self.blocks) or act.block >= MAX_BLOCKS:
                    raise StrangeError("blocks that do not follow each other")
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
            raise StrangeError("events of a block that is not open")
        return self.blocks[number]

    def _grow(self, block: Block, text: str) -> None:
        self.size += len(text)
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
            if body := payload(event):
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
        name = next(name for name in _TEXTS if isinstance(fields.get(name), str))
        before, found, behind = event.partition(b'"%b":%b' % (name.encode(), orjson.dumps(fields[name])))
        if found:
            sides = (_NUMBER.sub(_ANY_NUMBER, re.escape(side)) for side in (before, behind))
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


def object_of(data: bytes) -> dict[str, Any] | None:
    """The JSON object in `data`; None when there is none."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def field(document: dict[str, Any], name: str) -> dict[str, Any]:
    """An object within another one. Raises StrangeError."""
    value = document.get(name)
    if not isinstance(value, dict):
        raise StrangeError(f"an event without {name}")
    return value


def piece(document: dict[str, Any], name: str) -> str:
    """A text within an object. Raises StrangeError."""
    value = document.get(name)
    if not isinstance(value, str):
        raise StrangeError(f"an event without {name}")
    return value


def number(document: dict[str, Any], name: str) -> int:
    """The number of a block. Raises StrangeError."""
    value = document.get(name)
    if type(value) is not int or not 0 <= value < MAX_BLOCKS:
        raise StrangeError(f"an event without {name}")
    return value
