"""A unit that starts again must say what was shown before anything new, and only what is new is shown."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.resume.chat import StreamJoiner
from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.transcript import Transcript

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
    "other reasoning": [{"reasoning": "Ha"}],
    "less reasoning": [{"reasoning": "H"}, {"content": "So it"}],
    "more reasoning": [{"reasoning": "Hmm"}],
    "other text": [{"reasoning": "Hm"}, {"content": "No"}],
    "no call": [{"reasoning": "Hm"}, {"content": "So it is"}],
    "another call": [{"reasoning": "Hm"}, {"content": "So"}, call(0, "", name="open")],
    "other arguments": [{"reasoning": "Hm"}, {"content": "So"}, call(0, '{"p', name="find")],
    "a second call too early": [*SHOWN[:3], call(1, "", name="open")],
    "another field": [{"audio": {"id": "x"}}],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_whatever_differs_is_found_out_before_it_is_shown(other: list[dict[str, Any]]) -> None:
    transcript = Transcript()
    transcript.read([b"".join(map(event, SHOWN))])
    stitch = StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)
    with pytest.raises(MismatchError) as found:
        stitch.feed(b"".join(event(delta, "b") for delta in other))
    assert found.value.shown == b""


def test_an_end_before_all_has_come_again_is_found_out() -> None:
    transcript = Transcript()
    transcript.read([b"".join(map(event, SHOWN))])
    stitch = StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)
    with pytest.raises(MismatchError):
        stitch.feed(b"".join(event(delta, "b") for delta in SHOWN[:3]) + event({}, "b", finish_reason="stop"))


def test_log_probabilities_go_on_with_the_first_token_that_is_new() -> None:
    def entry(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}

    def told_with(text: str, *tokens: str, unit: str = "a") -> bytes:
        return event({"content": text}, unit, logprobs={"content": [entry(token) for token in tokens]})

    transcript = Transcript()
    transcript.read([told_with("one", "o", "ne")])
    assert transcript.shown.logprobs == 2
    stitch = StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)
    out = stitch.feed(
        told_with("one two", "o", "ne", " two", unit="b") + told_with(" three", " three", unit="b")
    )
    choices = [orjson.loads(payload(each) or b"")["choices"][0] for each in split(out)[0]]
    assert [choice["delta"]["content"] for choice in choices] == [" two", " three"]
    tokens = [each["token"] for choice in choices for each in choice["logprobs"]["content"]]
    assert tokens == [" two", " three"]


def test_what_is_repeated_for_long_is_filled_with_comments() -> None:
    transcript = Transcript()
    transcript.read([b"".join(event({"content": " word"}) for _ in range(200))])
    stitch = StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)
    out = b"".join(stitch.feed(event({"content": " word"}, "b")) for _ in range(200))
    assert out.count(b": the unit is still working\n\n") == 3
    assert b"data" not in out


def test_an_end_that_was_shown_is_checked_and_its_usage_added() -> None:
    whole = event({"content": "one"}) + event({}, finish_reason="stop")
    for finish, is_same in (("stop", True), ("length", False)):
        transcript = Transcript()
        transcript.read([whole])
        stitch = StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)
        events = event({"content": "one"}, "b") + event({}, "b", finish_reason=finish)
        if is_same:
            assert stitch.feed(events) == b""
            assert b'"prompt_tokens":3' in stitch.feed(usage("b"))
        else:
            with pytest.raises(MismatchError):
                stitch.feed(events)


def test_reasoning_behind_an_open_message_is_no_continuation_of_it() -> None:
    transcript = Transcript()
    transcript.read([event({"content": "one"})])
    with pytest.raises(MismatchError):
        StreamJoiner(BODY, transcript, Tokens(3, 1)).feed(event({"reasoning": " two"}, "b"))


@pytest.mark.parametrize(("shown", "repeated"), [("\nHm", "<think>\nHm"), ("<think>\nHm", "\nHm")])
def test_the_marker_of_reasoning_may_be_shown_by_one_unit_and_not_by_the_other(
    shown: str, repeated: str
) -> None:
    transcript = Transcript()
    transcript.read([event({"reasoning": shown})])
    stitch = StreamJoiner(BODY, transcript, Tokens(None, 0), 0, again=True)
    out = stitch.feed(event({"reasoning": repeated}, "b") + event({"reasoning": " so"}, "b"))
    assert told(out)["reasoning"] == " so"
