"""What is known of a stream while its bytes pass: whether its answer has ended, and what its engine tells of
its tokens. Pure.

1. Each event is read by the type that its object has at the top; no text within it counts.
2. An event may be cut anywhere and be of any size: above `EVENT_BYTES` it is skimmed and not kept.
3. Events that are like one that was read, but for a text, are not read: nearly all of a stream. A chunk with
   one event that ends in one of `ends.chunks` need not even come here, and a reader is made only when
   something else comes.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from cellgate.probes.engines import object_of
from cellgate.proxy.http.sse import BOM, JsonSkim, payload, repeats_request
from cellgate.proxy.resume.transcript import DONE
from cellgate.router.unit_state import NO_ENDS, EventEnds

EVENT_BYTES = 16 * 1024
"""So much is kept of an event that has not ended."""
PARSED_BYTES = 64 * 1024
"""A larger object is skimmed: an object of Python for each of its values would take longer."""
_READER_ENDS = frozenset(
    (
        "message_stop",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
        "error",
    )
)
"""Types of the event that ends an answer of `/v1/messages` or `/v1/responses`."""
_DELTAS = tuple(
    b"event: %b\n" % name
    for name in (
        b"content_block_delta",
        b"response.output_text.delta",
        b"response.reasoning_text.delta",
        b"response.function_call_arguments.delta",
    )
)
"""How events of these APIs begin that only add to a text."""
_UNFINISHED = re.compile(rb'"finish_reason":\s?null[^{]*\Z')
_USAGE_IN_EVENT = re.compile(rb'"usage"\s*:\s*\{')
_READER_DATA = re.compile(rb"^data(?::|$)", re.MULTILINE)
_TEXTS = ("content", "text", "thinking", "partial_json", "reasoning_content", "reasoning")
"""Names of fields with a piece of an answer."""
_HOLDERS = ("response", "message")
_PART = "num_output_tokens"
"""Of Triton's streams each event tells how many tokens are in it."""
_REPORTING = frozenset((*_HOLDERS, "meta_info", "details", _PART))
USUAL_ENDS = 3
"""So many are kept, and the latest."""


class AnswerReader:
    """One stream's. `is_typed`: its events have types; else one says that a choice is finished. `ends` are
    known of other streams of its unit, `begun` is what it began with if that only adds to a text.

    `reported` is the usage as its engine has told it.
    """

    __slots__ = (
        "_before",
        "_begin",
        "_done",
        "_end",
        "_finished",
        "_has_choice",
        "_is_typed",
        "_last",
        "_other_bytes",
        "_others",
        "_sample",
        "_skim",
        "_tail",
        "empty",
        "ends",
        "reported",
    )

    def __init__(self, *, is_typed: bool, ends: EventEnds = NO_ENDS, begun: bytes = b"") -> None:
        self._is_typed = is_typed
        self._tail = b""
        self._skim: JsonSkim | None = None
        """Of a large event that has not ended."""
        self._before = b""
        """The last byte of it."""
        self._last = b""
        """The last byte of all, if it was CR: an LF that follows belongs to it."""
        self._done = self._finished = False
        self._has_choice = begun != b""
        self.reported: dict[str, Any] | None = None
        self._others = self._other_bytes = 0
        """Events that did more than add to a text."""
        self.empty = 0
        """Of these, events that show nothing that was generated."""
        self._sample = begun
        """What ends with an event that only added to a text."""
        self._begin = self._end = b""
        """What the latest event that only added to a text has before that, and behind."""
        self.ends = ends
        """What events that finish nothing have from their finish reason on."""

    @property
    def is_done(self) -> bool:
        """Whether the last event has come."""
        return self._finished if self._is_typed else self._done

    @property
    def has_finished(self) -> bool:
        """Whether nothing more is generated."""
        return self._finished or self._done

    def is_whole(self) -> bool:
        """Whether nothing of the answer is missing, if nothing follows."""
        if self._tail:
            # Its last line may have no end, or no empty line behind it.
            tail, self._tail = self._tail, b""
            self._read(tail)
        elif self._skim is not None:
            self._end_large()
        if self._is_typed:
            return self._finished
        # Engines may leave out the very last event of a chat.
        return self._done or self._finished or not self._has_choice

    def feed(self, data: bytes) -> None:
        if b"\r" in data or self._last:
            data = self._with_lf(data)
        if self._skim is not None:
            data = self._carry_on(self._skim, data)
        *events, self._tail = (self._tail + data if self._tail else data).split(b"\n\n")
        usual = self.ends.events
        if not self._is_typed:
            for event in [each for each in events if not each.endswith(usual)]:
                self._read(event)
        elif self._sample:
            for event in [each for each in events if not each.startswith(_DELTAS)]:
                self._read(event)
        else:
            for event in events:
                self._read(event)
        if len(self._tail) > EVENT_BYTES:
            self._begin_large()

    def _with_lf(self, data: bytes) -> bytes:
        """With one kind of line ends: there are no others in JSON."""
        if self._last and data.startswith(b"\n"):
            data = data[1:]
        self._last = data[-1:] if data.endswith(b"\r") else b""
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    # -- events --------------------------------------------------------------------------------------------

    def _read(self, event: bytes) -> None:
        if not self._is_typed and self._only_adds(event):
            return
        if len(event) > PARSED_BYTES and repeats_request(event):
            # It tells nothing of the answer, and to skip 9 MB takes 0.1 s.
            self._others, self._other_bytes = self._others + 1, self._other_bytes + len(event) + 2
            return
        data = payload(event.removeprefix(BOM))
        if not data:
            return
        self._others, self._other_bytes = self._others + 1, self._other_bytes + len(event) + 2
        if data == DONE:
            self._done = True
            self.empty += 1
            return
        if len(data) > PARSED_BYTES:
            skim = JsonSkim()
            skim.feed(data)
            self._take(skim.document())
            return
        if (document := object_of(data)) is not None:
            is_more = self._take(document)
            self.empty += not _shows(document)
            if not is_more:
                self._learn(event, document)

    def _take(self, document: dict[str, Any]) -> bool:
        """Whether an event does more than add to a text: it ends a choice, or tells a usage."""
        if document.get("type") in _READER_ENDS or (
            document.get("error") is not None and "type" not in document
        ):
            self._finished = True
        choices, finishes = document.get("choices"), False
        if choices and isinstance(choices, list):
            self._has_choice = True
            finishes = _finishes(choices)
            self._finished = self._finished or finishes
        reported = reported_in(document)
        if reported is not None:
            if _PART in reported and self.reported is not None:
                parts = (each.get(_PART) for each in (self.reported, reported))
                reported = reported | {_PART: sum(part for part in parts if type(part) is int)}
            # `/v1/messages` tells of the prompt when it begins, and of the answer when it ends.
            known = self.reported if self._is_typed else None
            self.reported = (
                known | {name: reported[name] for name in reported if reported[name]} if known else reported
            )
        return finishes or reported is not None

    def _only_adds(self, event: bytes) -> bool:
        """Whether an event of chat only adds to a text, as seen without parsing it: it has a choice that is
        not finished, and nothing else. Others like it are known by their end, or by all but their text.
        """
        at = event.rfind(b'"finish_reason"')
        if at < 0:
            return False
        is_open = _UNFINISHED.match(event, at) is not None
        if is_open and event.find(b'"usage"', 0, at) < 0 and event.find(b'"finish_reason"', 0, at) < 0:
            self._has_choice, self._sample, end = True, event, event[at:]
            events, chunks = self.ends
            self.ends = EventEnds((end, *events[:USUAL_ENDS]), (end + b"\n\n\r\n", *chunks[:USUAL_ENDS]))
            return True
        return bool(self._begin) and event.startswith(self._begin) and event.endswith(self._end)

    def _learn(self, event: bytes, document: dict[str, Any]) -> None:
        """How other events look that only add to a text, if this one does."""
        text = _text_of(document)
        if not text or (self._is_typed and not event.startswith(_DELTAS)):
            return
        self._others, self._other_bytes = self._others - 1, self._other_bytes - len(event) - 2
        self._sample = event
        before, found, behind = event.partition(orjson.dumps(text))
        if found and not self._is_typed and b'"finish_reason"' in event:
            self._begin, self._end = before + b'"', b'"' + behind

    def text_bytes(self, size: int, events: int, framing: int) -> int:
        """How many of `size` bytes of so many events are text, if each has `framing` more; 0: unknown."""
        sample = self._sample.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
        document = object_of(payload(sample) or b"")
        if document is None:
            return 0
        role = _delta_of(document).get("role")
        besides = (
            len(orjson.dumps(_text_of(document)))
            - 2
            + (len(b'"role":"",%b' % role.encode()) if isinstance(role, str) else 0)
        )
        frame = len(sample) + 2 - besides + framing
        return size - self._other_bytes - self._others * framing - (events - self._others) * frame

    # -- large events --------------------------------------------------------------------------------------

    def _begin_large(self) -> None:
        begun, self._tail = self._tail, b""
        self._other_bytes += len(begun)
        found = _READER_DATA.search(begun.removeprefix(BOM))
        self._skim, self._before = JsonSkim(), b""
        if found is not None:
            self._skim.feed(begun.removeprefix(BOM)[found.end() :])
            self._before = begun[-1:]

    def _carry_on(self, skim: JsonSkim, data: bytes) -> bytes:
        """The rest of a large event; what follows it."""
        if self._before == b"\n" and data.startswith(b"\n"):
            end = 0
        elif (end := data.find(b"\n\n")) < 0:
            self._before = data[-1:] or self._before
            skim.feed(data)
            self._other_bytes += len(data)
            return b""
        skim.feed(data[:end])
        self._other_bytes += end
        self._end_large()
        return data[end:]

    def _end_large(self) -> None:
        skim, self._skim = self._skim, None
        assert skim is not None
        self._others += 1
        self._take(skim.document())


def only_add(events: bytes, ends: tuple[bytes, ...]) -> bool:
    """Whether these are whole events of a chat that only add to a text, as others with these ends do."""
    if b"\r" in events or (b'"usage"' in events and _USAGE_IN_EVENT.search(events) is not None):
        return False
    *each, tail = events.split(b"\n\n")
    return not tail and not [one for one in each if not one.endswith(ends)]


def _finishes(choices: list[Any]) -> bool:
    """Whether one of the choices of an event is finished."""
    return any(isinstance(each, dict) and each.get("finish_reason") is not None for each in choices)


def _delta_of(document: dict[str, Any]) -> dict[str, Any]:
    """What an event adds, if that is one thing."""
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else document
    delta = choice.get("delta", choice) if isinstance(choice, dict) else {}
    return delta if isinstance(delta, dict) else {"text": delta}


def _text_of(document: dict[str, Any]) -> str:
    """What an event adds to a text; empty: nothing, or more than one thing."""
    delta = _delta_of(document)
    return max((text for name in _TEXTS if isinstance(text := delta.get(name), str)), key=len, default="")


_NEVER_SHOWN = frozenset(("role", "type", "id", "index", "finish_reason", "logprobs", "stop_reason", "usage"))


def _shows(document: dict[str, Any]) -> bool:
    """Whether an event has something that was generated, however little."""
    choices = document.get("choices")
    if isinstance(choices, list):
        return any(_adds(each.get("delta", each)) for each in choices if isinstance(each, dict))
    return isinstance(document.get("type"), str) is False or _adds(document.get("delta"))


def _adds(delta: Any) -> bool:
    """Whether this adds to an answer: what has a name that says nothing of it does not."""
    if not isinstance(delta, dict):
        return bool(delta)
    return any(value for name, value in delta.items() if name not in _NEVER_SHOWN)


def reported_in(document: dict[str, Any]) -> dict[str, Any] | None:
    """The usage that an object tells: an answer, or an event of one.

    SGLang tells it in `meta_info`, TGI in `details`, and Triton beside the text:
    https://huggingface.github.io/text-generation-inference/,
    https://github.com/triton-inference-server/vllm_backend/blob/main/docs/additional_outputs.md
    """
    reported = document.get("usage")
    if isinstance(reported, dict):
        return reported
    if _REPORTING.isdisjoint(document):
        # Most events tell nothing.
        return None
    for name in _HOLDERS:
        holder = document.get(name)
        if isinstance(holder, dict) and isinstance(reported := holder.get("usage"), dict):
            return reported
    reported = document.get("meta_info") or document.get("details")
    if isinstance(reported, dict):
        return reported
    if _PART not in document:
        return None
    return {name: document.get(name) for name in ("num_input_tokens", _PART)}


def reported_in_batch(answers: list[Any]) -> dict[str, Any] | None:
    """What all answers of a batch tell together."""
    sums: dict[str, Any] = {}
    for answer in answers:
        reported = reported_in(answer) if isinstance(answer, dict) else None
        for name, count in (reported or {}).items():
            if type(count) is int:
                sums[name] = sums.get(name, 0) + count
    return sums or None
