"""llama.cpp: where its streams count their tokens, and builds that repeat the text they were given."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from cellgate.proxy.resume.chat import RepeatGuard, StreamJoiner
from cellgate.proxy.resume.proof import Tokens, remaining
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.transcript import Transcript

FRAME = {"created": 1795382098, "model": "tiny", "system_fingerprint": "b11549"}


def events(*choices: dict[str, Any], **more: Any) -> bytes:
    """Events of one choice each; the last one carries `more`."""
    documents: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "finish_reason": None} | choice], "id": "second", **FRAME}
        for choice in choices
    ]
    documents[-1] |= more
    return b"".join(b"data: %b\n\n" % orjson.dumps(document) for document in documents)


def stitch(shown: dict[str, Any], text: str, *, guard: bool, **body: Any) -> StreamJoiner:
    """A stream of which this choice was shown, which had two tokens behind a prompt of seven."""
    transcript = Transcript()
    transcript.take({"choices": [{"index": 0, **shown}], "id": "first", **FRAME})
    return StreamJoiner(body, transcript, Tokens(7, 2), guard=RepeatGuard(text) if guard else None)


def test_the_usage_in_the_last_event_of_a_completion_is_that_of_both_parts() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    for stream_options in (None, {"include_usage": True}):
        going_on = stitch({"text": "ab"}, "ab", guard=False, stream_options=stream_options)
        shown = going_on.feed(events({"text": "c"}, {"text": "", "finish_reason": "length"}, usage=usage))
        last = orjson.loads(shown.split(b"\n\n")[1].removeprefix(b"data: "))
        assert (last["id"], last["choices"][0]["finish_reason"]) == ("first", "length")
        assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def said(stream: bytes) -> str:
    """The text of a chat."""
    return "".join(orjson.loads(b'"%b"' % text) for text in re.findall(rb'"content":"([^"]*)"', stream))


@pytest.mark.parametrize("pieces", [["c", "d"], ["a", "c"], ["a"], ["a", "a", "b"]])
def test_new_text_of_a_chat_is_shown_whole(pieces: list[str]) -> None:
    """Even where it begins as the text shown did."""
    going_on = stitch({"delta": {"role": "assistant", "content": "ab"}}, "ab", guard=True)
    first = {"delta": {"role": "assistant", "content": None}}
    deltas = [{"delta": {"content": piece}} for piece in pieces]
    shown = going_on.feed(events(first, *deltas, {"delta": {}, "finish_reason": "length"}))
    assert said(shown) == "".join(pieces)
    assert going_on.transcript.text == "ab" + "".join(pieces)
    assert going_on.transcript.finish == "length"


@pytest.mark.parametrize("pieces", [["abcd"], ["a", "b", "cd"], ["ab"]])
def test_a_chat_that_is_repeated_is_not_continued(pieces: list[str]) -> None:
    going_on = stitch({"delta": {"role": "assistant", "content": "ab"}}, "ab", guard=True)
    with pytest.raises(MismatchError, match="the text that had been shown") as error:
        going_on.feed(events(*({"delta": {"content": piece}} for piece in pieces)))
    assert error.value.shown == b""


def test_a_completion_without_a_limit_has_none() -> None:
    assert remaining({}, 20, chat=False, engine="llamacpp") == {}
    assert remaining({}, 20, chat=False, engine="vllm") is None
    assert remaining({"max_tokens": 30}, 20, chat=False, engine="llamacpp") == {"max_tokens": 10}
