"""Whole answers, broken anywhere and continued by others: as one unit alone would have answered.

The units are models: they say the words of one text, one token each, from where they are asked to go on; they
know limits, stop strings and usage, and write their events as engines do, and as none does yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.http.sse import BOM, payload, split
from cellgate.proxy.resume.chat import StreamJoiner, ending
from cellgate.proxy.resume.eligible import BoundaryStops, stops_of, token_start
from cellgate.proxy.resume.proof import Tokens, extended, remaining
from cellgate.proxy.resume.replay import TAIL_BYTES, EventFilter, ReplayBuffer, plain
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.transcript import Transcript
from tests.machines.test_wire_fuzz import fuzz

PROMPT = 7
LETTERS = st.text("abE", min_size=1, max_size=2)
WORDS = st.lists(
    st.one_of(
        LETTERS,
        LETTERS.map("{}é😀\u2028".format),
        st.sampled_from(["x" * 3 * TAIL_BYTES, "a[DONE]", "data: [DONE]\n\n", "b\r\ndata", 'E"},{"']),
    ).map(" {}".format),
    min_size=1,
    max_size=10,
)
STOPS = st.one_of(st.none(), st.just("a"), st.text("abE ", min_size=1, max_size=6), st.just("never" * 100))
NOISE = [b": ping\n\n", b"retry: 5\r\r", b"event: message\n", b"data\r\n\r\n", b"\n", b": a\r: b\n", b""]


class Manner(NamedTuple):
    """How a unit writes its events. `holds`: it shows nothing that may become a stop string.

    `counts`: it can tell with each event what has been used.
    """

    chat: bool = True
    separator: bytes = b"\n\n"
    ascii_only: bool = False
    role_apart: bool = True
    nulls: bool = False
    bom: bool = False
    holds: bool = True
    counts: bool = False
    noise: bytes = b""


SEPARATORS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"])
MANNERS = st.builds(Manner, st.booleans(), SEPARATORS, *[st.booleans()] * 6, st.sampled_from(NOISE))


def dumps(document: dict[str, Any], manner: Manner) -> bytes:
    if manner.ascii_only:
        return json.dumps(document).encode()
    return orjson.dumps(document)


def event(
    manner: Manner, unit: str, text: str | None, *, role: bool = False, finish: str | None = None
) -> bytes:
    choice: dict[str, Any] = {"index": 0}
    if manner.chat:
        choice["delta"] = ({"role": "assistant"} if role else {}) | (
            {} if text is None else {"content": text}
        )
        if manner.nulls:
            choice["delta"]["reasoning_content"] = None
    else:
        choice["text"] = text or ""
    choice["finish_reason"] = finish
    document = {"id": f"id-{unit}", "created": ord(unit), "model": "m", "choices": [choice]}
    return b"data: " + dumps(document, manner) + manner.separator


def usage(manner: Manner, unit: str, prompt: int, said: int) -> bytes:
    document = {"id": f"id-{unit}", "created": ord(unit), "model": "m", "choices": []}
    document["usage"] = counts(prompt, said)
    return b"data: " + dumps(document, manner) + manner.separator


class Model(NamedTuple):
    """What would be said, and how this unit says it."""

    words: list[str]
    manner: Manner
    unit: str

    def answer(self, body: dict[str, Any], said: str) -> list[bytes]:
        """All events of its answer to `body`, which has `said` as the beginning of the text."""
        manner, before = self.manner, words_in(said, self.words)
        options = body.get("stream_options") or {}
        so_far = self.manner.counts and bool(options.get("continuous_usage_stats"))
        events = [event(manner, self.unit, "", role=True)] if manner.chat and manner.role_apart else []
        prompt = PROMPT + before
        parts, finish, stop = self._parts(body, self.words[before:])
        for at, part in enumerate(parts):
            role = manner.chat and not manner.role_apart and at == 0
            is_last = at == len(parts) - 1
            one = orjson.loads(event(manner, self.unit, part, role=role).partition(b" ")[2])
            one["choices"][0] |= {"finish_reason": finish, "stop_reason": stop} if is_last else {}
            one |= {"usage": counts(prompt, at + 1)} if so_far else {}
            events.append(b"data: " + dumps(one, manner) + manner.separator)
        if options.get("include_usage"):
            events.append(usage(manner, self.unit, prompt, len(parts)))
        events.append(b"data: [DONE]" + manner.separator)
        events = [self.manner.noise + each if at else each for at, each in enumerate(events)]
        if self.manner.bom:
            events[0] = BOM + events[0]
        return events

    def _parts(self, body: dict[str, Any], words: list[str]) -> tuple[list[str], str, str | None]:
        """What is shown with each token, how it ends, and the stop string that it ends by."""
        stops, limit = stops_of(body), body["max_tokens"]
        spells = bool(body.get("include_stop_str_in_output"))
        hold = max(map(len, stops), default=1) - 1 if self.manner.holds and not spells else 0
        parts, shown, text = [], 0, ""
        # The last token has no text, and ends the answer.
        tokens = [*words, ""][:limit]
        for at, word in enumerate(tokens):
            text += word
            found = [stop for stop in stops if stop in text]
            is_last = bool(found) or at + 1 == len(tokens)
            end = len(text) if is_last else len(text) - hold
            if found:
                end = text.index(found[0]) + spells * len(found[0])
            parts.append(text[shown : max(end, shown)])
            shown = max(end, shown)
            if found:
                return parts, "stop", found[0]
        return parts, "stop" if len(tokens) > len(words) else "length", None


def counts(prompt: int, said: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def covering(text: str, words: list[str]) -> int:
    """How many words it takes to say that text."""
    return next(n for n in range(len(words) + 1) if "".join(words[:n]).startswith(text))


def read(body: bytes) -> tuple[str, dict[str, int], list[str], set[str]]:
    """Text, usage, finish reasons and ids, read by somebody else; checks what may come once only."""
    text, roles, dones = "", 0, 0
    counts: dict[str, int] = {}
    finishes: list[str] = []
    ids: set[str] = set()
    for each in split(body)[0]:
        data = payload(each)
        if data == b"[DONE]":
            dones += 1
            continue
        if not data:
            # A comment, or an event that says nothing.
            continue
        assert dones == 0
        document = orjson.loads(data)
        ids.add(f"{document['id']} {document['created']}")
        counts = document.get("usage") or counts
        for choice in document["choices"]:
            roles += "role" in choice.get("delta", {})
            text += choice.get("delta", choice).get("content") or choice.get("text") or ""
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert dones == 1
    assert roles <= 1
    return text, counts, finishes, ids


def words_in(text: str, words: list[str]) -> int:
    """The most words that make up `text`."""
    return max(n for n in range(len(words) + 1) if "".join(words[:n]) == text)


class Gate:
    """What a relay and a resumption do, without connections."""

    def __init__(self, body: dict[str, Any], *, chat: bool, holds: bool) -> None:
        self.body, self.chat, self.holds = body, chat, holds
        self.is_honest_end = False
        self.keep = ReplayBuffer(framed=False)
        self.shown = b""
        self.joiner: StreamJoiner | None = None
        self.said = ""

    def carry(self, events: list[bytes], data: st.DataObject, *, ended: bool) -> None:
        """Relay these, in reads of any size."""
        body = b"".join(events)
        cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=4), label="reads")
        self.relay(body, sorted(cuts), ended=ended)

    def relay(self, body: bytes, cuts: Sequence[int] = (), *, ended: bool = False) -> None:
        """Relay this, in reads that end at `cuts`."""
        passage, has_begun = EventFilter(), False
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
            piece, is_last = body[start:end], ended and end == len(body)
            if not has_begun:
                begun = passage.begin(piece, ended=is_last)
                if not isinstance(begun, bytes):
                    assert begun is None
                    continue
                has_begun, piece, passage.joiner = True, begun, self.joiner
            shown, failure = passage.feed(piece, ended=is_last)
            self.shown += shown
            if failure is not None:
                assert "no token counts" in failure.message
                self.is_honest_end = True
                return
            if shown and self.joiner is None:
                self.keep.chunks.append(shown)
            if passage.is_over:
                return

    def next_request(self, words: list[str]) -> dict[str, Any] | None:
        """What the next unit is asked; None: there is nothing to ask for."""
        transcript = plain(self.keep)
        assert (transcript.closed, transcript.why_not) == (True, "")
        if transcript.is_done:
            return None
        start = (
            len(transcript.text) if transcript.finish else token_start(transcript.text, stops_of(self.body))
        )
        self.said = transcript.text[:start]
        is_cut = transcript.finish and self.holds and not self.body.get("include_stop_str_in_output")
        cut_by = transcript.stop if is_cut else ""
        # Of SGLang, which holds nothing back, it is not known how many tokens the prompt has.
        tokens = Tokens(PROMPT if self.holds else None, covering(self.said + cut_by, words))
        left = (
            None if transcript.finish else remaining(self.body, tokens.shown, chat=self.chat, engine="vllm")
        )
        if left is None:
            events = ending(self.body, transcript, tokens, chat=self.chat)
            self.is_honest_end = events is None
            self.shown += events or b""
            return None
        self.joiner = StreamJoiner(self.body, transcript, tokens, start)
        return extended(self.body, self.said, chat=self.chat) | left | self.joiner.ask_usage()


@fuzz(400)
@given(WORDS, MANNERS, STOPS, st.integers(1, 12), st.booleans(), st.booleans(), st.data())
def test_a_continued_answer_is_the_answer_of_one_unit(
    words: list[str],
    manner: Manner,
    stop: str | None,
    limit: int,
    spells: bool,
    so_far: bool,
    data: st.DataObject,
) -> None:
    body: dict[str, Any] = {"max_tokens": limit, "stream_options": {"include_usage": True}}
    if so_far:
        body["stream_options"]["continuous_usage_stats"] = True
    if stop is not None:
        body["stop"] = stop
        body["include_stop_str_in_output"] = spells and manner.holds
    check(words, manner, body, data)


@fuzz(300)
@given(st.lists(LETTERS.map(" {}".format), min_size=3, max_size=6), MANNERS, st.booleans(), st.data())
def test_a_stop_string_that_one_unit_begins_and_another_ends(
    words: list[str], manner: Manner, spells: bool, data: st.DataObject
) -> None:
    """It is more than two tokens long: a unit goes on from the last word that was begun."""
    first = data.draw(st.integers(0, len(words) - 3), label="begins in")
    begin, end = (len("".join(words[: first + n])) for n in (1, 3))
    stop = "".join(words)[begin - 1 : end]
    body = {"max_tokens": 9, "stream_options": {"include_usage": True}, "stop": stop}
    check(words, manner, body | {"include_stop_str_in_output": spells and manner.holds}, data)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("shown", [1, 30])
def test_where_a_stop_string_spans_the_seam_each_token_is_counted_once(counts: bool, shown: int) -> None:
    words = [" a"] * shown + [" b", " c", " d"]
    manner = Manner(counts=counts)
    body: dict[str, Any] = {
        "stop": "a b c",
        "include_stop_str_in_output": True,
        "max_tokens": 90,
        "messages": [],
    }
    body["stream_options"] = {"include_usage": True}
    gate = Gate(body, chat=True, holds=True)
    gate.relay(b"".join(Model(words, manner, "a").answer(body, "")[: 2 + shown]))
    asked = gate.next_request(words)
    assert asked is not None
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    gate.relay(b"".join(Model(words, manner, "b").answer(asked, gate.said)))
    text, used, finishes, _ = read(gate.shown)
    assert (text, used["completion_tokens"], finishes) == ("".join(words[:-1]), shown + 2, ["stop"])


def check(words: list[str], manner: Manner, body: dict[str, Any], data: st.DataObject) -> None:
    """One unit answers alone, and up to four one after the other."""
    chat = manner.chat
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    whole = Gate(body, chat=chat, holds=manner.holds)
    whole.carry(Model(words, manner, "a").answer(body, ""), data, ended=True)
    gate, asked = Gate(body, chat=chat, holds=manner.holds), body
    for unit in "abcd":
        events = Model(words, manner, unit).answer(asked, gate.said)
        upto = len(events) if unit == "d" else data.draw(st.integers(1, len(events)), label="shown")
        gate.carry(events[:upto], data, ended=upto == len(events))
        following = None if gate.is_honest_end else gate.next_request(words)
        if following is None:
            break
        asked = following
    if gate.is_honest_end:
        assert not manner.holds
        return
    compare(read(gate.shown), read(whole.shown), None if manner.holds else body.get("stop"))


Read = tuple[str, dict[str, int], list[str], set[str]]


def compare(continued: Read, unbroken: Read, stop: str | None) -> None:
    """An engine that holds nothing back shows the beginning of a stop string, or not, as its tokens fall."""
    assert continued[1:] == unbroken[1:]
    if stop is None or continued[2] != ["stop"]:
        assert continued[0] == unbroken[0]
        return
    both = sorted([continued[0], unbroken[0]], key=len)
    assert both[1].startswith(both[0])
    assert len(both[1]) - len(both[0]) < len(stop)


@given(
    st.text("abE", max_size=8),
    st.lists(st.text("abE", min_size=1, max_size=3), min_size=1, max_size=8),
    st.lists(st.text("abE", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_stop_string_across_the_seam_ends_the_text_where_it_would_have_ended(
    shown: str, pieces: list[str], stops: list[str]
) -> None:
    """Only those that begin before the seam: the unit itself sees the others."""
    seam, out, ended = BoundaryStops(shown, stops), "", False
    for piece in pieces:
        text, stop = seam.feed(piece)
        out += text
        if stop is not None:
            ended = True
            break
    else:
        out += seam.flush()
    behind = "".join(pieces)
    ends = [
        at + len(stop) - len(shown)
        for stop in stops
        for at in range(max(0, len(shown) - len(stop) + 1), len(shown))
        if (shown + behind)[at : at + len(stop)] == stop and at + len(stop) > len(shown)
    ]
    assert ended == bool(ends)
    assert out == ("" if ended else behind)


@given(st.text(max_size=20), st.integers(0, 30), st.booleans())
def test_limits_are_those_of_the_whole_answer(text: str, shown: int, chat: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 20, "max_completion_tokens": 25, "min_tokens": 10}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    left = remaining(body, shown, chat=chat, engine="vllm")
    if shown >= 20:
        assert left is None
        return
    assert left == {
        "max_tokens": 20 - shown,
        "max_completion_tokens": 25 - shown,
        "min_tokens": max(0, 10 - shown),
    }
    longer = extended(body, text, chat=chat)
    assert (longer["messages"][-1]["content"] if chat else longer["prompt"][1:]) == text
    assert body.keys() == {
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "messages" if chat else "prompt",
    }


@pytest.mark.parametrize("other", [[" bet"], [" be", "t"], [" b"]])
def test_a_unit_that_says_another_text_than_was_shown_is_found_out(other: list[str]) -> None:
    manner = Manner(role_apart=False)
    replay = ReplayBuffer(framed=False)
    replay.chunks.append(event(manner, "a", " one bev"))
    stitch = StreamJoiner({"stop": "xyz"}, plain(replay), Tokens(7, 1), 4)
    *first, last = other
    stitch.feed(b"".join(event(manner, "b", text) for text in first))
    with pytest.raises(MismatchError):
        stitch.feed(event(manner, "b", last, finish="length"))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 99), st.text("ab", max_size=2))
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(
                ["delta", "content", "text", "role", "index", "finish_reason", "completion_tokens"]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)
DOCUMENTS = st.fixed_dictionaries(
    {"id": ANYTHING}, optional={"choices": ANYTHING, "usage": ANYTHING, "model": ANYTHING}
)
CHOICES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"index": SCALARS, "delta": ANYTHING, "text": ANYTHING, "finish_reason": SCALARS}
    ),
    max_size=2,
)


@fuzz(400)
@given(
    st.lists(
        st.one_of(DOCUMENTS, st.builds(lambda c, u: {"choices": c, "usage": u}, CHOICES, ANYTHING)),
        max_size=4,
    )
)
def test_events_of_any_form_are_read_or_are_a_reason_and_never_a_fault(
    documents: list[dict[str, Any]],
) -> None:
    events = b"".join(b"data: %b\n\n" % orjson.dumps(each) for each in documents)
    replay = ReplayBuffer(framed=False)
    replay.chunks.append(events)
    plain(replay)
    transcript = Transcript()
    transcript.take({"id": "a", "choices": [{"delta": {"role": "assistant", "content": "b a"}}]})
    stitch = StreamJoiner(
        {"stop": "ab a", "stream_options": {"include_usage": True}}, transcript, Tokens(1, 1), 1
    )
    try:
        shown = stitch.feed(events)
    except MismatchError as error:
        shown = error.shown
    # What it is known to have said is what was shown of it.
    told = ReplayBuffer(framed=False)
    told.chunks.append(shown)
    assert transcript.text == "b a" + plain(told).text
    assert transcript.why_not == ""
