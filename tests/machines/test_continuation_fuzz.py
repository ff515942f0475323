"""Streams cut anywhere and continued: what the client reads is one answer, whatever was cut where."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.resume.chat import StreamJoiner, ending
from cellgate.proxy.resume.eligible import BoundaryStops, token_start
from cellgate.proxy.resume.proof import Tokens, extended, remaining
from cellgate.proxy.resume.replay import ReplayBuffer, plain
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.transcript import Transcript

WORDS = st.lists(
    st.sampled_from(
        [" a", "b", "é", "\u2028", "😀", '"', '","', "\\", "\n\n", "\r\n\r\n", "data: ", "[DONE]", "{", ""]
    ),
    min_size=1,
    max_size=12,
)


class Form(NamedTuple):
    """How an engine writes its events."""

    chat: bool
    separator: bytes
    ascii_only: bool
    role_apart: bool
    nulls: bool


FORMS = st.builds(
    Form, st.booleans(), st.sampled_from([b"\n\n", b"\r\n\r\n"]), st.booleans(), st.booleans(), st.booleans()
)


def dumps(document: dict[str, Any], form: Form) -> bytes:
    if form.ascii_only:
        return json.dumps(document).encode()
    return orjson.dumps(document)


def event(form: Form, unit: str, text: str | None, *, role: bool = False, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0}
    if form.chat:
        choice["delta"] = ({"role": "assistant"} if role else {}) | (
            {} if text is None else {"content": text}
        )
        if form.nulls:
            choice["delta"]["reasoning_content"] = None
    else:
        choice["text"] = text or ""
    choice["finish_reason"] = finish
    document = {"id": f"id-{unit}", "created": ord(unit), "model": "m", "choices": [choice]}
    return b"data: " + dumps(document, form) + form.separator


def usage(form: Form, unit: str, prompt: int, said: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    document = {"id": f"id-{unit}", "created": ord(unit), "model": "m", "choices": [], "usage": counts}
    return b"data: " + dumps(document, form) + form.separator


def answer(form: Form, unit: str, words: list[str], prompt: int) -> list[bytes]:
    """All events of an answer that says `words`, one token each."""
    events = []
    if form.chat and form.role_apart:
        events.append(event(form, unit, "", role=True))
    for at, word in enumerate(words):
        events.append(event(form, unit, word, role=form.chat and not form.role_apart and at == 0))
    events.append(event(form, unit, None, finish="length"))
    return [*events, usage(form, unit, prompt, len(words)), b"data: [DONE]" + form.separator]


def request(form: Form, limit: int) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": limit, "stream_options": {"include_usage": True}}
    return body | ({"messages": [{"role": "user", "content": "x"}]} if form.chat else {"prompt": "x"})


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


@given(FORMS, WORDS, st.data())
def test_whatever_breaks_where_the_client_reads_one_answer(
    form: Form, words: list[str], data: st.DataObject
) -> None:
    prompt, body = 7, request(form, len(words))
    shown, replay = b"", ReplayBuffer(framed=False)
    said_before, stitch = 0, None
    for unit in "abcd":
        left = words[said_before:]
        events = answer(form, unit, left, prompt + said_before)
        is_last = unit == "d"
        upto = len(events) if is_last else data.draw(st.integers(1, len(events)))
        part = b"".join(events[:upto])
        if stitch is None:
            replay.chunks.extend(cut(part, data))
            shown += part
        else:
            shown += stitch.feed(part)
        transcript = plain(replay)
        assert transcript.closed
        assert not transcript.why_not
        assert transcript.text == read_text(shown)
        if transcript.is_done:
            break
        # As many tokens as events: the words are the tokens here.
        said_before = words_in(transcript.text, words)
        tokens = Tokens(prompt, said_before)
        if transcript.finish or remaining(body, said_before, chat=form.chat, engine="vllm") is None:
            shown += ending(body, transcript, tokens, chat=form.chat) or b""
            break
        stitch = StreamJoiner(body, transcript, tokens)
    text, counts, finishes, ids = read(shown)
    assert text == "".join(words)
    assert counts == {
        "prompt_tokens": prompt,
        "completion_tokens": len(words),
        "total_tokens": prompt + len(words),
    }
    assert finishes == ["length"]
    assert ids == {f"id-a {ord('a')}"}


def cut(body: bytes, data: st.DataObject) -> list[bytes]:
    at = data.draw(st.integers(0, len(body)))
    return [body[:at], body[at:]]


def read_text(body: bytes) -> str:
    transcript = Transcript()
    for each in split(body)[0]:
        document = payload(each)
        if document and document != b"[DONE]":
            transcript.take(orjson.loads(document))
    return transcript.text


def words_in(text: str, words: list[str]) -> int:
    """The most words that make up `text`."""
    return max(n for n in range(len(words) + 1) if "".join(words[:n]) == text)


@given(FORMS, WORDS, st.lists(st.integers(1, 400), max_size=12))
def test_what_was_kept_says_the_same_however_it_was_cut_and_folded(
    form: Form, words: list[str], sizes: list[int]
) -> None:
    body = b"".join(answer(form, "a", words * 3, 7))
    for framed in (False, True):
        replay, at = ReplayBuffer(framed=framed), 0
        for size in [*sizes, len(body)]:
            piece = body[at : at + size]
            at += size
            if piece:
                replay.chunks.append(b"%x\r\n%b\r\n" % (len(piece), piece) if framed else piece)
            plain(replay)
        transcript = plain(replay)
        assert (transcript.text, transcript.finish, transcript.is_done, transcript.has_usage) == (
            "".join(words * 3),
            "length",
            True,
            True,
        )


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


def held_back(words: list[str], stops: list[str], done: bool) -> list[str]:
    """What an engine shows of `words` after each of them: nothing that may become a stop string."""
    hold, shown, out = max(map(len, stops)) - 1, 0, []
    for upto in range(1, len(words) + 1):
        text = "".join(words[:upto])
        ends = [text.index(stop) for stop in stops if stop in text]
        end = (
            min(ends) if ends else len(text) if done and upto == len(words) else max(len(text) - hold, shown)
        )
        out.append(text[shown:end])
        shown = end
        if ends:
            break
    return out


@given(
    st.lists(st.text("abc", min_size=1, max_size=4).map(" {}".format), min_size=1, max_size=12),
    st.lists(st.text("abc ", min_size=2, max_size=5), min_size=1, max_size=2),
    st.data(),
)
def test_text_held_back_for_stop_strings_is_said_by_the_next_unit(
    words: list[str], stops: list[str], data: st.DataObject
) -> None:
    form = Form(chat=True, separator=b"\n\n", ascii_only=False, role_apart=False, nulls=False)
    body = request(form, 100) | {"stop": stops}
    unbroken = held_back(words, stops, done=True)
    replay = ReplayBuffer(framed=False)
    upto = data.draw(st.integers(0, len(unbroken) - 1))
    replay.chunks.extend(event(form, "a", text) for text in unbroken[:upto])
    transcript = plain(replay)
    start = token_start(transcript.text, stops)
    before = words_in(transcript.text[:start], words)
    stitch = StreamJoiner(body, transcript, Tokens(7, before), start)
    pieces = held_back(words[before:], stops, done=True)
    for at, text in enumerate(pieces):
        stitch.feed(event(form, "b", text, finish="stop" if at == len(pieces) - 1 else None))
        if stitch.is_over:
            break
    assert transcript.text == "".join(unbroken)


@pytest.mark.parametrize("other", [[" bet"], [" be", "t"], [" b"]])
def test_a_unit_that_says_another_text_than_was_shown_is_found_out(other: list[str]) -> None:
    form = Form(chat=True, separator=b"\n\n", ascii_only=False, role_apart=False, nulls=False)
    replay = ReplayBuffer(framed=False)
    replay.chunks.append(event(form, "a", " one bev"))
    stitch = StreamJoiner({"stop": "xyz"}, plain(replay), Tokens(7, 1), 4)
    *first, last = other
    stitch.feed(b"".join(event(form, "b", text) for text in first))
    with pytest.raises(MismatchError):
        stitch.feed(event(form, "b", last, finish="length"))
