"""How an answer goes on: what the unit is asked, what it may repeat, and what is certainly new."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.observe.counters import ResumeKind
from cellgate.proxy.resume.chat import (
    BrokenStream,
    NextPart,
    RepeatGuard,
    StreamJoiner,
    by_tokens,
    open_tokens,
    ways_for,
)
from cellgate.proxy.resume.eligible import AGAIN, OPEN, TOKENS
from cellgate.proxy.resume.proof import ProofRequest, Tokens, UnprovenError, remaining
from cellgate.proxy.resume.shown import MismatchError, SentText
from cellgate.proxy.resume.transcript import Transcript, digest_of, kind_of

BODY = {"stream_options": {"include_usage": True}}


def event(delta: dict[str, Any], unit: str = "a", **choice: Any) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} | choice]
    return b"data: " + orjson.dumps({"id": unit, "created": 1, "model": "m", "choices": choices}) + b"\n\n"


def usage(unit: str) -> bytes:
    return b"data: " + orjson.dumps({"id": unit, "choices": [], "usage": {"prompt_tokens": 3}}) + b"\n\n"


def call(index: int, arguments: str, *, name: str = "", unit: str = "a") -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": arguments}
    if not name:
        return {"tool_calls": [{"index": index, "function": function}]}
    named = {"index": index, "id": f"call-{unit}-{index}", "type": "function"}
    return {"tool_calls": [named | {"function": {"name": name} | function}]}


def deltas(unit: str, pieces: list[int]) -> list[dict[str, Any]]:
    """An answer with everything; `pieces` say how it is cut."""
    sizes = iter(pieces * 100)

    def cut(text: str) -> list[str]:
        parts = []
        while text:
            size = next(sizes)
            parts.append(text[:size])
            text = text[size:]
        return parts

    out: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    out += [{"reasoning": part} for part in cut("Let me think about it.")]
    out += [{"content": part} for part in cut("I look it up. ")]
    for index, (name, arguments) in enumerate([("find", '{"q": "some {words}"}'), ("open", '{"page": 1}')]):
        out.append(call(index, "", name=name, unit=unit))
        out += [call(index, part) for part in cut(arguments)]
    return out


def told(events: bytes) -> dict[str, Any]:
    """What a client makes of a stream."""
    seen: dict[str, Any] = {
        "reasoning": "",
        "content": "",
        "calls": {},
        "finish": [],
        "ids": set(),
        "roles": 0,
    }
    for each in split(events)[0]:
        data = payload(each)
        if not data or data == b"[DONE]":
            continue
        document = orjson.loads(data)
        seen["ids"].add(document["id"])
        for choice in document["choices"]:
            delta = choice["delta"]
            seen["roles"] += "role" in delta
            seen["reasoning"] += delta.get("reasoning") or ""
            seen["content"] += delta.get("content") or ""
            seen["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for each_call in delta.get("tool_calls") or []:
                known = seen["calls"].setdefault(
                    each_call["index"], {"id": None, "name": None, "arguments": ""}
                )
                known["id"] = known["id"] or each_call.get("id")
                known["name"] = known["name"] or each_call["function"].get("name")
                known["arguments"] += each_call["function"].get("arguments") or ""
    return seen


PIECES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(PIECES, PIECES, PIECES, st.data())
def test_an_answer_of_every_kind_broken_twice_anywhere_is_read_as_one(
    one: list[int], two: list[int], three: list[int], data: st.DataObject
) -> None:
    first = [event(delta, "a") for delta in deltas("a", one)]
    upto = data.draw(st.integers(1, len(first)))
    transcript = Transcript()
    shown = b"".join(first[:upto])
    transcript.read([shown])
    assert transcript.why_not == ""
    for unit, pieces in (("b", two), ("c", three)):
        events = [event(delta, unit) for delta in deltas(unit, pieces)]
        events += [event({}, unit, finish_reason="tool_calls"), usage(unit), b"data: [DONE]\n\n"]
        stitch = StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)
        until = len(events) if unit == "c" else data.draw(st.integers(0, len(events) - 1))
        shown += b"".join(stitch.feed(each) for each in events[:until])
    seen = told(shown)
    assert (seen["reasoning"], seen["content"]) == ("Let me think about it.", "I look it up. ")
    assert [each["name"] for each in seen["calls"].values()] == ["find", "open"]
    assert [orjson.loads(each["arguments"]) for each in seen["calls"].values()] == [
        {"q": "some {words}"},
        {"page": 1},
    ]
    assert (seen["finish"], seen["ids"], seen["roles"]) == (["tool_calls"], {"a"}, 1)
    assert shown.count(b"[DONE]") == 1
    begun = told(b"".join(first[:upto]))["calls"]
    assert all(seen["calls"][index]["id"] == each["id"] for index, each in begun.items())


SHOWN = [{"reasoning": "Hm"}, {"content": "So"}, call(0, "", name="find"), call(0, '{"q": ')]
OTHERS: dict[str, list[dict[str, Any]]] = {
    "less reasoning": [{"reasoning": "H"}, {"content": "So it"}],
    "more reasoning": [{"reasoning": "Hmm"}],
    "other text": [{"reasoning": "Hm"}, {"content": "No"}],
    "no call": [{"reasoning": "Hm"}, {"content": "So it is"}],
    "another call": [{"reasoning": "Hm"}, {"content": "So"}, call(0, "", name="open")],
    "other arguments": [{"reasoning": "Hm"}, {"content": "So"}, call(0, '{"p', name="find")],
    "a second call too early": [*SHOWN[:3], call(1, "", name="open")],
    "another field": [{"audio": {"id": "x"}}],
}


def repeating(*shown: bytes) -> StreamJoiner:
    """A unit is to say again all that was shown."""
    transcript = Transcript()
    transcript.read([*shown])
    return StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_whatever_differs_is_found_out_before_it_is_shown(other: list[dict[str, Any]]) -> None:
    with pytest.raises(MismatchError) as found:
        repeating(*map(event, SHOWN)).feed(b"".join(event(delta, "b") for delta in other))
    assert found.value.shown == b""


def test_an_end_before_all_has_come_again_is_found_out() -> None:
    events = b"".join(event(delta, "b") for delta in SHOWN[:3])
    with pytest.raises(MismatchError):
        repeating(*map(event, SHOWN)).feed(events + event({}, "b", finish_reason="stop"))


def test_log_probabilities_go_on_with_the_first_token_that_is_new() -> None:
    def entry(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}

    def told_with(text: str, *tokens: str, unit: str = "a") -> bytes:
        return event({"content": text}, unit, logprobs={"content": [entry(token) for token in tokens]})

    stitch = repeating(told_with("one", "o", "ne"))
    assert stitch.transcript.shown.logprobs == 2
    out = stitch.feed(
        told_with("one two", "o", "ne", " two", unit="b") + told_with(" three", " three", unit="b")
    )
    choices = [orjson.loads(payload(each) or b"")["choices"][0] for each in split(out)[0]]
    assert [choice["delta"]["content"] for choice in choices] == [" two", " three"]
    tokens = [each["token"] for choice in choices for each in choice["logprobs"]["content"]]
    assert tokens == [" two", " three"]


def test_what_is_repeated_for_long_is_filled_with_comments() -> None:
    stitch = repeating(event({"content": " word"}) * 200)
    out = b"".join(stitch.feed(event({"content": " word"}, "b")) for _ in range(200))
    assert out.count(b": the unit is still working\n\n") == 3
    assert b"data" not in out


def test_an_end_that_was_shown_is_checked_and_its_usage_added() -> None:
    whole = event({"content": "one"}) + event({}, finish_reason="stop")
    stitch = repeating(whole)
    assert stitch.feed(whole.replace(b'"a"', b'"b"')) == b""
    assert b'"prompt_tokens":3' in stitch.feed(usage("b"))
    with pytest.raises(MismatchError):
        repeating(whole).feed(event({"content": "one"}, "b") + event({}, "b", finish_reason="length"))


def test_reasoning_behind_an_open_message_is_no_continuation_of_it() -> None:
    transcript = Transcript()
    transcript.read([event({"content": "one"})])
    with pytest.raises(MismatchError):
        StreamJoiner(BODY, transcript, Tokens(3, 1)).feed(event({"reasoning": " two"}, "b"))


def test_the_marker_of_reasoning_may_be_shown_by_one_unit_and_not_by_the_other() -> None:
    for shown, repeated in (("\nHm", "<think>\nHm"), ("<think>\nHm", "\nHm")):
        stitch = repeating(event({"reasoning": shown}))
        out = stitch.feed(event({"reasoning": repeated}, "b") + event({"reasoning": " so"}, "b"))
        assert told(out)["reasoning"] == " so"


# How an answer goes on: what the unit is asked, and what it gets, for each kind.

TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
KINDS: dict[ResumeKind, tuple[dict[str, Any], dict[str, Any]]] = {
    ResumeKind.TEXT: ({"temperature": 0}, {"content": "a"}),
    ResumeKind.TOOLS: (TOOLS, {"content": "a"}),
    ResumeKind.TOOL_CALL: (TOOLS, call(0, "", name="f")),
    ResumeKind.REASONING: (TOOLS | {"logprobs": True}, {"reasoning": "a"}),
    ResumeKind.LOGPROBS: ({"logprobs": True, "repetition_penalty": 1.1}, {"content": "a"}),
    ResumeKind.PENALTIES: ({"presence_penalty": 0.1}, {"content": "a"}),
    ResumeKind.CONSTRAINED: ({"response_format": {"type": "json_object"}}, {"content": "a"}),
}


def test_each_kind_is_told_by_what_was_asked_and_shown() -> None:
    for kind, (body, delta) in KINDS.items():
        shown = SentText()
        shown.take({"delta": delta})
        assert kind_of(body | {"model": "m", "messages": []}, shown) is kind


PROMPT, SAID, SPELT = [1, 2, 3], [4, 5], {1: "<", 2: "user", 3: ">", 4: "one", 5: " two"}
CHAT_BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}


def stream(body: dict[str, Any], *events: bytes, prompt: list[int] = PROMPT) -> BrokenStream:
    transcript = Transcript(ways=OPEN | TOKENS)
    transcript.read([*events])
    assert transcript.tokens is not None
    transcript.tokens.prompt = digest_of(prompt)
    transcript.tokens.ids.extend(SAID)
    return BrokenStream(body, orjson.dumps(body), b"/v1/chat/completions", transcript, TOKENS, True, "vllm")


def answered(way: Any) -> Any:
    """What a way comes to with a unit that tells the truth."""
    answer = None
    while True:
        try:
            question: ProofRequest = way.send(answer)
        except StopIteration as end:
            return end.value
        if question.path == "/tokenize":
            answer = {"tokens": PROMPT, "max_model_len": 100}
        else:
            answer = {"prompt": "".join(SPELT[token] for token in question.body["tokens"])}


def test_log_probabilities_go_on_behind_exactly_the_tokens_that_were_generated() -> None:
    body = CHAT_BODY | {"logprobs": True}
    part = answered(open_tokens(stream(body, event({"role": "assistant", "content": "one two"}))))
    assert isinstance(part, NextPart)
    sent = orjson.loads(part.body)
    assert sent["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 3, 4, 5]}
    assert (sent["max_tokens"], sent["return_token_ids"]) == (7, True)
    assert sent["messages"] == CHAT_BODY["messages"]
    with pytest.raises(MismatchError, match="other tokens"):
        part.joiner.feed(event({"role": "assistant", "content": ""}, "b"))
    # The unit that took the tokens goes on.
    part = answered(open_tokens(stream(body, event({"role": "assistant", "content": "one two"}))))
    first = orjson.loads(event({"role": "assistant", "content": ""}, "b")[6:])
    first["prompt_token_ids"] = [1, 2, 3, 4, 5]
    assert part.joiner.feed(b"data: " + orjson.dumps(first) + b"\n\n") == b""
    assert b'"content":" three"' in part.joiner.feed(event({"content": " three"}, "b"))


def test_other_tokens_in_the_prompt_or_for_what_was_shown_are_no_continuation() -> None:
    for way in (open_tokens, by_tokens):
        with pytest.raises(UnprovenError, match="prompt has other tokens"):
            answered(way(stream(CHAT_BODY, event({"content": "one two"}), prompt=[1, 2, 4])))
        for text in ("two one", "one two three"):
            with pytest.raises(UnprovenError):
                answered(way(stream(CHAT_BODY, event({"content": text}))))


def test_text_that_was_held_back_can_come_only_from_the_gate() -> None:
    with pytest.raises(UnprovenError):
        answered(open_tokens(stream(CHAT_BODY, event({"content": "one"}))))
    part = answered(by_tokens(stream(CHAT_BODY, event({"content": "one"}))))
    choice = {"index": 0, "text": " three", "finish_reason": None, "token_ids": [6]}
    raw = b"data: " + orjson.dumps({"id": "b", "choices": [choice]}) + b"\n\n"
    assert b'"content":" two three"' in part.joiner.feed(raw)


def test_raw_text_is_asked_of_completions_with_the_same_sampling() -> None:
    body = CHAT_BODY | {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "user": "u"}
    part = answered(by_tokens(stream(body, event({"reasoning": "one two"}))))
    sent = orjson.loads(part.body)
    assert part.target == b"/v1/completions"
    assert sent["prompt"] == [1, 2, 3, 4, 5]
    sampling = [sent[name] for name in ("temperature", "top_p", "repetition_penalty", "max_tokens")]
    assert sampling == [0.5, 0.9, 1.1, 7]
    assert "messages" not in sent
    endless = answered(by_tokens(stream({**body, "max_tokens": None}, event({"reasoning": "one two"}))))
    assert orjson.loads(endless.body)["max_tokens"] == 95


def test_ways_without_what_they_need_are_not_tried() -> None:
    shown = stream(CHAT_BODY, event({"reasoning": "one two"}))
    assert ways_for(shown) == [open_tokens, by_tokens]
    without = BrokenStream(CHAT_BODY, b"{}", b"/", Transcript(), OPEN | AGAIN, True, "vllm")
    assert [way.__name__ for way in ways_for(without)] == ["again"]


# Text that a unit may have repeated, and text that is certainly new.


def test_a_unit_that_repeats_all_is_found_out_and_new_text_comes_whole_and_as_soon_as_it_may() -> None:
    for pieces in (["a", "b", "c"], ["abcd"], ["ab", "cd"], ["", "abc"]):
        guard = RepeatGuard("abc")
        *before, last = [guard.feed(piece) for piece in pieces]
        assert (before, last) == ([""] * len(before), None)
    # Also when it ends while it might still have been a repetition.
    for pieces in (["xyz"], ["a", "bx", "abc"], ["ab", "ab"], ["aab"], ["", "x"], ["ab"]):
        guard = RepeatGuard("abc")
        assert "".join([guard.feed(piece) or "" for piece in pieces] + [guard.flush()]) == "".join(pieces)
    guard = RepeatGuard("abc")
    assert [guard.feed(piece) for piece in ("a", "x", "abc")] == ["", "ax", "abc"]


# llama.cpp: where its streams count their tokens, and builds that repeat the text they were given.

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


@pytest.mark.parametrize("pieces", [["c", "d"], ["a"], ["a", "a", "b"]])
def test_new_text_of_a_chat_is_shown_whole_and_a_repeated_one_is_not_continued(pieces: list[str]) -> None:
    """Even where it begins as the text shown did."""
    going_on = stitch({"delta": {"role": "assistant", "content": "ab"}}, "ab", guard=True)
    first = {"delta": {"role": "assistant", "content": None}}
    deltas = [{"delta": {"content": piece}} for piece in pieces]
    shown = going_on.feed(events(first, *deltas, {"delta": {}, "finish_reason": "length"}))
    assert told(shown)["content"] == "".join(pieces)
    assert going_on.transcript.text == "ab" + "".join(pieces)
    assert going_on.transcript.finish == "length"
    repeating_it = stitch({"delta": {"role": "assistant", "content": "ab"}}, "ab", guard=True)
    with pytest.raises(MismatchError, match="the text that had been shown") as error:
        repeating_it.feed(events(*({"delta": {"content": piece}} for piece in ("a", "b", *pieces))))
    assert error.value.shown == b""


def test_a_completion_without_a_limit_has_none() -> None:
    assert remaining({}, 20, chat=False, engine="llamacpp") == {}
    assert remaining({}, 20, chat=False, engine="vllm") is None
    assert remaining({"max_tokens": 30}, 20, chat=False, engine="llamacpp") == {"max_tokens": 10}
