"""Token ids in a stream of chat or completions: asked for by the gate, kept beside the text, not shown to the
client. Pure.

Wire format: vLLM from 0.10.2 on. `return_token_ids` in the request; then `prompt_token_ids` in the first
event, of completions in its choice, and `token_ids` in the choice of each further one. Without it both are
null, or not there. SGLang 0.5.23 does the same for completions; a chat that streams and asks gets a 400. Its
chats tell in each event with a text how many tokens there are (`stream_options.continuous_usage_stats`).

In this order: `TokenLog`, `CountLog`, `Transcript`, `kind_of`.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64_hexdigest

from cellgate.probes.engines import object_of
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.sse import extra_field, payload, split
from cellgate.proxy.observe.counters import ResumeKind
from cellgate.proxy.resume.eligible import AGAIN, COUNTS, OPEN, PENALTIES, SAMPLED, TOKENS, is_harmless
from cellgate.proxy.resume.shown import GrowingText, SentText, unsupported_in

_TRANSCRIPT_ASKED = b'{"return_token_ids":true,'
# In a text the quotes would be escaped, so these are found as fields only.
_TRANSCRIPT_PROMPT = re.compile(rb'"prompt_token_ids":\s*\[([\d,\s]*)\]')
_TRANSCRIPT_TOKENS = re.compile(rb'"token_ids":\s*\[([\d,\s]*)\]')
# Behind a choice: the last event has none.
_TRANSCRIPT_COUNTS = re.compile(rb'(?<=\}\]),\s*"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
IDS, NO_IDS = b'"token_ids":[', b'"token_ids":null'
_TRANSCRIPT_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
_SINCE = {("vllm", "chat"): (0, 11), ("vllm", "completions"): (0, 11), ("sglang", "completions"): (0, 5, 23)}


@lru_cache(maxsize=64)
def gives_ids(engine: str, version: str, route: str) -> bool:
    """Whether an engine gives token ids in its streams of a route, and continues them."""
    since, found = _SINCE.get((engine, route)), _TRANSCRIPT_VERSION.match(version)
    return (
        since is not None and found is not None and tuple(int(each or 0) for each in found.groups()) >= since
    )


@lru_cache(maxsize=64)
def can_tell(engine: str, version: str, route: str) -> int:
    """What an engine tells of the tokens in its streams of a route, if it is asked: TOKENS, COUNTS, or 0."""
    if gives_ids(engine, version, route):
        return TOKENS
    return COUNTS if (engine, route) == ("sglang", "chat") else 0


def asking(body: bytes) -> bytes:
    """The request, a JSON object with fields, that asks for token ids."""
    return _TRANSCRIPT_ASKED + body[body.index(b"{") + 1 :]


_OPTIONS, _COUNTING = b'"stream_options"', b'"continuous_usage_stats"'


def asking_counts(body: bytes) -> bytes:
    """The request that asks for a usage in each event; the same if its client has, or asks for it oddly."""
    if _COUNTING in body or body.count(_OPTIONS) > 1:
        return body
    if _OPTIONS not in body:
        return b'{"stream_options":{%b:true},%b' % (_COUNTING, body[body.index(b"{") + 1 :])
    options = orjson.loads(body).get("stream_options")
    if not isinstance(options, dict):
        return body
    at = body.index(b"{", body.index(_OPTIONS)) + 1
    return b"%b%b:true%b%b" % (body[:at], _COUNTING, b"," if options else b"", body[at:])


class TellingBody(NamedTuple):
    """A request, and what its stream will tell of its tokens: TOKENS, COUNTS, or 0."""

    body: bytes
    tells: int


def asked_to_tell(body: bytes, can_tell: int) -> TellingBody:
    """The request that asks an engine for what it `can_tell`."""
    if can_tell == TOKENS:
        return TellingBody(asking(body), TOKENS)
    counting = asking_counts(body)
    return TellingBody(counting, 0 if counting is body else COUNTS)


def digest_of(ids: Sequence[int]) -> str:
    """What tells one prompt from another."""
    return _digest(b",".join(b"%d" % each for each in ids))


def _digest(ids: bytes) -> str:
    return xxh3_64_hexdigest(b"".join(ids.split()))


class TokenLog:
    """The token ids of one answer, and the digest of its prompt's, which may be very many."""

    __slots__ = ("ids", "prompt")

    def __init__(self) -> None:
        self.prompt = ""
        self.ids: array[int] | deque[int] = array("Q")

    def strip(self, events: bytes) -> bytes:
        """Whole events as they would be if nobody had asked; their ids are taken."""
        if b'token_ids":' not in events:
            return events
        if b'"prompt_token_ids":' in events:
            events = _TRANSCRIPT_PROMPT.sub(self._strip_prompt, events)
        return _TRANSCRIPT_TOKENS.sub(self._strip_ids, events)

    def _strip_prompt(self, found: re.Match[bytes]) -> bytes:
        self.prompt = self.prompt or _digest(found[1])
        return b'"prompt_token_ids":null'

    def _strip_ids(self, found: re.Match[bytes]) -> bytes:
        self.ids.extend(int(each) for each in found[1].split(b",") if each.strip())
        return NO_IDS

    def take(self, document: dict[str, Any]) -> None:
        """Take them out of the object of an event. Ids that are none are left, and found strange."""
        choices = document.get("choices")
        for each in (document, *(choices if isinstance(choices, list) else ())):
            if not isinstance(each, dict):
                continue
            prompt = each.pop("prompt_token_ids", None)
            if isinstance(prompt, list) and not self.prompt:
                self.prompt = digest_of(prompt)
            if _are_ids(each.get("token_ids")):
                self.ids.extend(each.pop("token_ids"))

    def drop(self) -> None:
        """Keep none any more."""
        self.ids = deque(maxlen=0)

    def restart(self, ids: Iterable[int]) -> None:
        """The answer goes on behind these."""
        self.ids = array("Q", ids)


class CountLog:
    """How many tokens the prompt and the answer had at its last event with a text; 0: nobody has told."""

    __slots__ = ("_reported",)

    def __init__(self) -> None:
        self._reported = b"{}"

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self._count("prompt_tokens")

    @property
    def shown(self) -> int:
        """Tokens of the answer."""
        return self._count("completion_tokens")

    def strip(self, events: bytes) -> bytes:
        """Whole events as they would be if nobody had asked; what they count is taken."""
        if b'"usage":' not in events:
            return events
        return _TRANSCRIPT_COUNTS.sub(self._strip_usage, events)

    def take(self, usage: dict[str, Any]) -> None:
        """What an event with a part of the answer tells."""
        self._reported = orjson.dumps(usage)

    def drop(self) -> None:
        """It is small."""

    def _strip_usage(self, found: re.Match[bytes]) -> bytes:
        self._reported = found[1]
        return b""

    def _count(self, name: str) -> int:
        reported = (object_of(self._reported) or {}).get(name)
        return reported if type(reported) is int else 0


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)


# The transcript of a stream of chat or completions: what was shown so far, read from its events. Pure.
#
# One choice is accepted, with what shown.py knows. Anything else in an event means that no other unit can
# resume the stream.


TEXT_CHARS = 1 << 20
"""Longer texts are not resumed: they would have to be kept, and then sent as a prompt."""
DONE = b"[DONE]"

STOPPED_BY = ("stop_reason", "matched_stop")
"""What vLLM and SGLang call the stop string, or the token, that ended a text."""

_FRAME = ("id", "created", "model", "system_fingerprint")
_NO_TEMPLATE = (b"", b"")
_TEXT_KEYS = (b'"content":', b'"text":', b'"reasoning":', b'"reasoning_content":', b'"arguments":')
_TRANSCRIPT_FEW = 4
"""No more events than this are read one by one."""


class Transcript:
    """What one client was sent of one answer; `framed`: it is read in whole HTTP chunks; `ways`: with
    anything but text it cannot be resumed.

    `shown` is what it has carried, `frame` what all its events have in common, `finish` its finish reason,
    `stop` the stop string behind that, `unsupported` what it has carried that nobody could resume, `closed`
    whether its last event was complete, `events` how many had an object.
    """

    __slots__ = (
        "_grown",
        "_is_framed",
        "_is_text_only",
        "_tail",
        "_template",
        "closed",
        "counts",
        "events",
        "finish",
        "frame",
        "has_choice",
        "has_role",
        "has_usage",
        "is_done",
        "shown",
        "stop",
        "tokens",
        "unsupported",
    )

    def __init__(self, *, framed: bool = False, ways: int = OPEN | AGAIN) -> None:
        self._is_text_only = ways & ~COUNTS == OPEN
        self.tokens: TokenLog | None = TokenLog() if ways & TOKENS else None
        """The token ids, if its unit was asked for them: its ReplayBuffer takes them from what is read."""
        self.counts: CountLog | None = CountLog() if ways & COUNTS else None
        """The same of their number."""
        self.shown = SentText()
        self._tail = b""
        self._template = _NO_TEMPLATE
        self._grown = self.shown.text
        """What grows by the events that match the template."""
        self._is_framed = framed
        self.frame: dict[str, Any] = {}
        self.events = 0
        self.finish = self.unsupported = self.stop = ""
        self.has_choice = self.has_role = self.has_usage = self.is_done = False
        self.closed = True

    @property
    def text(self) -> str:
        """All text so far, without reasoning and tool calls."""
        return str(self.shown.text)

    @property
    def size(self) -> int:
        """How many characters were generated."""
        return self.shown.size

    @property
    def next_number(self) -> int:
        """Its events have no numbers."""
        return 0

    @property
    def why_not(self) -> str:
        """Why it cannot be continued, as far as the stream tells; empty when it can."""
        if self.unsupported:
            return f"its stream has carried {self.unsupported}"
        if self.shown.size > TEXT_CHARS:
            return f"it is longer than {TEXT_CHARS} characters"
        if self._is_text_only and (what := self.shown.beyond_text):
            return f"its stream has carried {what}, {SAMPLED}"
        return ""

    def read(self, pieces: Iterable[bytes]) -> None:
        """Add what was sent; an incomplete event waits for the next piece."""
        left = iter(pieces)
        while self._template is _NO_TEMPLATE and (piece := next(left, None)) is not None:
            self._read_events(self._events([piece]))
        if not self._match_all(rest := list(left)):
            self._read_events(self._events(rest))
        self.shown.settle()

    def _read_events(self, events: list[bytes]) -> None:
        """Read events that are mostly alike: all at once, or recursively in halves."""
        if len(events) > _TRANSCRIPT_FEW:
            if not self._cast_events(events):
                middle = len(events) // 2
                self._read_events(events[:middle])
                self._read_events(events[middle:])
            return
        for event in events:
            self._read_event(event)

    def skip(self) -> None:
        """The next piece does not follow the last one."""
        self._tail, self.closed = b"", True

    def _events(self, pieces: list[bytes]) -> list[bytes]:
        if self._is_framed:
            pieces = [piece[piece.index(b"\n") + 1 : -len(b"\r\n")] for piece in pieces]
        events, self._tail = split(self._tail + b"".join(pieces))
        self.closed = not self._tail
        if len(self._tail) > LIMITS.event_bytes:
            reached("event_bytes")
            self.unsupported = self.unsupported or f"an event larger than {LIMITS.event_bytes} bytes"
            self._tail = b""
        return events

    def _read_event(self, event: bytes) -> None:
        if name := extra_field(event):
            self.unsupported = self.unsupported or f"events with {name}"
        if (data := payload(event) or b"") == DONE:
            self.is_done = True
        elif data:
            self._parse(data, event)

    def take(self, document: dict[str, Any]) -> GrowingText | None:
        """Add the object of one event; what grew, if it has brought a part of one text and nothing else."""
        self.events += 1
        if not self.frame:
            self.frame = {key: document[key] for key in _FRAME if key in document}
        strange = unsupported_in(document)
        self.unsupported = self.unsupported or strange
        choices = document.get("choices") or []
        self.has_choice = self.has_choice or bool(choices)
        # With a choice it is the usage so far, not the final one.
        self.has_usage = self.has_usage or (bool(document.get("usage")) and not choices)
        if strange or not choices:
            return None
        grown = self._take_choice(choices[0])
        return None if self.finish or document.get("usage") else grown

    def _parse(self, data: bytes, event: bytes) -> None:
        document = object_of(data)
        if document is None:
            self.unsupported = "an event that is not a JSON object"
            return
        before = self.shown.size
        grown = self.take(document)
        if grown is not None and self._is_framed:
            self._learn_template(event, grown, self.shown.size - before)

    def _learn_template(self, event: bytes, grown: GrowingText, size: int) -> None:
        """Nearly all events of a stream differ only in their text: what surrounds it is the template."""
        if not size:
            return
        text = orjson.dumps(grown.last)
        for key in _TEXT_KEYS:
            for space in (b"", b" "):
                before, found, behind = event.partition(key + space + text)
                if found and key not in behind:
                    self._template, self._grown = (before + key, behind + b"\r\n"), grown

    def _match_all(self, pieces: list[bytes]) -> bool:
        """Add chunks that all match the template, each with one event; False, and none is added, if not.

        This runs for each token of long streams: between the halves of the template is the JSON of a text,
        and many of them are parsed at once. A second event in a chunk would not be valid JSON there.
        """
        if not self.closed:
            return False
        before, behind = self._template
        skipped, cut = len(before), -len(behind)
        casts = [
            piece[start + skipped : cut]
            for piece in pieces
            if piece.startswith(before, start := piece.index(b"\n") + 1) and piece.endswith(behind)
        ]
        return len(casts) == len(pieces) and self._take_texts(casts)

    def _cast_events(self, events: list[bytes]) -> bool:
        """The same of events, however they came: a unit, or its network, may send many tokens at once."""
        if self._template is _NO_TEMPLATE:
            return False
        before, behind = self._template[0], self._template[1].removesuffix(b"\r\n")
        skipped, cut = len(before), -len(behind)
        casts = [each[skipped:cut] for each in events if each.startswith(before) and each.endswith(behind)]
        return len(casts) == len(events) and self._take_texts(casts)

    def _take_texts(self, casts: list[bytes]) -> bool:
        """Add texts that are each the JSON of a string; False, and none is added, if they are not."""
        try:
            texts = orjson.loads(b"[%b]" % b",".join(casts))
        except orjson.JSONDecodeError:
            return False
        if len(texts) != len(casts) or set(map(type, texts)) != {str}:
            return False
        self.events += len(texts)
        self.shown.pieces.extend(map(len, texts))
        self.shown.grow(self._grown, "".join(texts))
        return True

    def _take_choice(self, choice: dict[str, Any]) -> GrowingText | None:
        self.finish = choice.get("finish_reason") or self.finish
        self.stop = next(
            (stop for name in STOPPED_BY if isinstance(stop := choice.get(name), str)), self.stop
        )
        self.has_role = self.has_role or bool((choice.get("delta") or {}).get("role"))
        return self.shown.take(choice)


# The kind of a broken answer: what it has shown, and what its request asks for besides text. Pure.


_LOGPROBS = ("logprobs", "top_logprobs")


def kind_of(body: dict[str, Any], shown: SentText) -> ResumeKind:
    """The kind of an answer to `body` of which this was shown."""
    if shown.calls:
        return ResumeKind.TOOL_CALL
    if shown.reasoning:
        return ResumeKind.REASONING
    more = {name for name in body if not is_harmless(name, body)}
    if shown.logprobs or more.intersection(_LOGPROBS):
        return ResumeKind.LOGPROBS
    if more:
        return ResumeKind.PENALTIES if more <= PENALTIES else ResumeKind.CONSTRAINED
    return ResumeKind.TOOLS if body.get("tools") else ResumeKind.TEXT
