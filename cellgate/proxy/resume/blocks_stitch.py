"""Joins two streams of blocks: events of the second unit are rewritten as if the first had sent them. Pure.

The second unit continues the text shown, or starts again from the beginning. Either way it must repeat what
was shown and it was not given; that does not go to the client again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import orjson

from cellgate.proxy.resume.blocks import (
    TEXT,
    BlockEvent,
    BlockTranscript,
    Reader,
    StrangeError,
    What,
    object_of,
)
from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.repetition import MismatchError, stitched
from cellgate.proxy.wire.sse import WORKING, payload

_WORKING_EVENTS = 64
"""The client gets a comment for so many events that repeat what it knows."""


class Dialect(Reader, Protocol):
    """An API that streams blocks: messages_stream.py, responses_stream.py. `limit` is the field of a request
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


class BlockStitch:
    """Rewrites the events of one unit. `transcript` is what the client was sent, and grows with them.

    `given` are the tokens of the prompt, and of the text that the unit got to continue; None: it starts from
    the beginning. `is_over`: the answer is complete, further events are ignored.
    """

    __slots__ = (
        "_base",
        "_dialect",
        "_given",
        "_left",
        "_marks",
        "_repeated",
        "_seen",
        "is_over",
        "transcript",
    )

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
        except StrangeError as error:
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
