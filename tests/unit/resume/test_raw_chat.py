"""A chat goes on as raw text: it is split only where all that was shown comes out of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.resume.chat import StreamJoiner
from cellgate.proxy.resume.eligible import TOKENS
from cellgate.proxy.resume.proof import Tokens, UnprovenError
from cellgate.proxy.resume.raw import RawChat
from cellgate.proxy.resume.transcript import Transcript
from tests.unit.resume.test_raw_answer import ARGUMENTS, RAW
from tests.unit.resume.test_repetition import call, event, told

TOOLS = [{"type": "function", "function": {"name": "find"}}]
BODY: dict[str, Any] = {"tools": TOOLS, "stream_options": {"include_usage": True}}
PROMPT = 'Return <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


def completion(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": [5]}
    document = {"id": "cmpl-b", "object": "text_completion", "created": 2, "choices": [choice]}
    return b"data: " + orjson.dumps(document) + b"\n\n"


def shown_of(raw: str) -> bytes:
    """What an engine shows of it: as this very parser does, in events of a chat."""
    transcript = Transcript(ways=TOKENS)
    transcript.read([event({"role": "assistant", "content": ""})])
    chat = RawChat(BODY, transcript, "<think>", PROMPT)
    out = event({"role": "assistant", "content": ""})
    for char in raw.removeprefix("<think>"):
        document = orjson.loads(completion(char)[6:])
        document["choices"][0].pop("token_ids")
        out += b"data: " + orjson.dumps(chat.translated(document) | {"id": "a"}) + b"\n\n"
    return out


SHOWN = [shown_of(RAW[:at]) for at in range(len(RAW) + 1)]


@given(st.integers(len("<think>\n"), len(RAW)), st.lists(st.integers(1, 30), min_size=1))
def test_an_answer_broken_anywhere_goes_on_as_one(at: int, sizes: list[int]) -> None:
    transcript = Transcript(ways=TOKENS)
    transcript.read([SHOWN[at]])
    chat = RawChat(BODY, transcript, RAW[:at], PROMPT)
    stitch = StreamJoiner(BODY, transcript, Tokens(9, 4, is_exact=True), raw=chat)
    out, left = SHOWN[at], RAW[at:]
    for size in sizes * len(RAW):
        out += stitch.feed(completion(left[:size])) if left[:size] else b""
        left = left[size:]
    out += stitch.feed(completion("", "stop"))
    seen, whole = told(out), told(SHOWN[-1])
    assert (seen["reasoning"], seen["content"]) == (whole["reasoning"], whole["content"])
    assert [each["arguments"] for each in seen["calls"].values()] == [ARGUMENTS, "{}"]
    assert [each["name"] for each in seen["calls"].values()] == ["find", "open"]
    assert all(each["id"].startswith("chatcmpl-tool-") for each in seen["calls"].values())
    assert (seen["finish"], seen["ids"]) == (["tool_calls"], {"a"})
    assert b"token_ids" not in out.removeprefix(SHOWN[at])
    assert b"text_completion" not in out


def test_what_the_engine_has_held_back_comes_first() -> None:
    transcript = Transcript(ways=TOKENS)
    transcript.read([event({"reasoning": "Hm"})])
    chat = RawChat({}, transcript, "<think>Hm so</think>Yes", "")
    out = StreamJoiner({}, transcript, Tokens(9, 4), raw=chat).feed(completion(", it is"))
    assert (told(out)["reasoning"], told(out)["content"]) == (" so", "Yes, it is")


UNLIKE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "other text": ([{"content": "No"}], "Yes"),
    "text in two": ([{"content": "Yes"}, call(0, "{}", name="f")], "Ye"),
    "stripped reasoning": ([{"reasoning": "Hm"}], "<think>\nHm"),
    "reasoning that is shown as text": ([{"content": "<think>Hm"}], "<think>Hm"),
    "another name": ([call(0, "", name="find")], '<tool_call>{"name": "open", "arguments": {'),
    "a call of another format": ([call(0, "{}", name="find")], "<tool_call>\n<function=find></tool_call>"),
    "arguments rewritten": ([call(0, '{"a": 1', name="f")], '<tool_call>{"name":"f","arguments":{"a":1'),
    "a call that was not made": ([call(0, "", name="f")], "Yes"),
    "text behind text that is missing": ([{"content": "Yes"}], "<think>Hm</think>Yes"),
}


@pytest.mark.parametrize(("deltas", "raw"), UNLIKE.values(), ids=UNLIKE)
def test_what_does_not_come_out_as_it_was_shown_is_not_continued(
    deltas: list[dict[str, Any]], raw: str
) -> None:
    transcript = Transcript(ways=TOKENS)
    transcript.read([b"".join(map(event, deltas))])
    with pytest.raises(UnprovenError):
        RawChat(BODY, transcript, raw, PROMPT)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"stop": ["x"]},
        {"parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    ],
)
def test_what_an_engine_does_to_chats_alone_is_not_continued(fields: dict[str, Any]) -> None:
    transcript = Transcript(ways=TOKENS)
    transcript.read([event({"reasoning": "Hm"})])
    with pytest.raises(UnprovenError):
        RawChat(BODY | fields, transcript, "<think>Hm", PROMPT)


@pytest.mark.parametrize("prompt", ["", "<tool_call>\n<function=name>", PROMPT + "<function=name>"])
def test_calls_that_may_come_must_be_explained_in_the_prompt(prompt: str) -> None:
    transcript = Transcript(ways=TOKENS)
    transcript.read([event({"reasoning": "Hm"})])
    with pytest.raises(UnprovenError, match="format of its tool calls"):
        RawChat(BODY, transcript, "<think>Hm", prompt)
    RawChat({}, transcript, "<think>Hm", prompt)


def test_reasoning_that_is_shown_with_its_marker_is_found_as_well() -> None:
    transcript = Transcript(ways=TOKENS)
    transcript.read([event({"reasoning": "<think>Hm"})])
    chat = RawChat({}, transcript, "<think>Hm", "")
    out = StreamJoiner({}, transcript, Tokens(9, 4), raw=chat).feed(completion(" so</think>Yes"))
    assert (told(out)["reasoning"], told(out)["content"]) == (" so", "Yes")
