"""How an answer goes on: what the unit is asked, and what it gets, for each kind."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.proxy.observe.counters import ContinuationKind
from cellgate.proxy.resume.chat import BrokenStream, NextPart, by_tokens, open_tokens, ways_for
from cellgate.proxy.resume.eligible import AGAIN, OPEN, TOKENS
from cellgate.proxy.resume.proof import ProofRequest, UnprovenError
from cellgate.proxy.resume.shown import MismatchError, SentText
from cellgate.proxy.resume.transcript import Transcript, digest_of, kind_of
from tests.unit.resume.test_repetition import call, event

TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
KINDS: dict[ContinuationKind, tuple[dict[str, Any], dict[str, Any]]] = {
    ContinuationKind.TEXT: ({"temperature": 0}, {"content": "a"}),
    ContinuationKind.TOOLS: (TOOLS, {"content": "a"}),
    ContinuationKind.TOOL_CALL: (TOOLS, call(0, "", name="f")),
    ContinuationKind.REASONING: (TOOLS | {"logprobs": True}, {"reasoning": "a"}),
    ContinuationKind.LOGPROBS: ({"logprobs": True, "repetition_penalty": 1.1}, {"content": "a"}),
    ContinuationKind.PENALTIES: ({"presence_penalty": 0.1}, {"content": "a"}),
    ContinuationKind.CONSTRAINED: ({"response_format": {"type": "json_object"}}, {"content": "a"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_told_by_what_was_asked_and_shown(kind: ContinuationKind) -> None:
    body, delta = KINDS[kind]
    shown = SentText()
    shown.take({"delta": delta})
    assert kind_of(body | {"model": "m", "messages": []}, shown) is kind


PROMPT, SAID, SPELT = [1, 2, 3], [4, 5], {1: "<", 2: "user", 3: ">", 4: "one", 5: " two"}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}


def stream(
    body: dict[str, Any], *events: bytes, prompt: list[int] = PROMPT, ids: list[int] = SAID
) -> BrokenStream:
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
    body = BODY | {"logprobs": True}
    part = answered(open_tokens(stream(body, event({"role": "assistant", "content": "one two"}))))
    assert isinstance(part, NextPart)
    sent = orjson.loads(part.body)
    assert sent["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 3, 4, 5]}
    assert (sent["max_tokens"], sent["return_token_ids"], sent["messages"]) == (7, True, BODY["messages"])
    with pytest.raises(MismatchError, match="other tokens"):
        part.stitch.feed(event({"role": "assistant", "content": ""}, "b"))


def test_the_unit_that_took_the_tokens_goes_on() -> None:
    body = BODY | {"logprobs": True}
    part = answered(open_tokens(stream(body, event({"role": "assistant", "content": "one two"}))))
    first = orjson.loads(event({"role": "assistant", "content": ""}, "b")[6:])
    first["prompt_token_ids"] = [1, 2, 3, 4, 5]
    assert part.stitch.feed(b"data: " + orjson.dumps(first) + b"\n\n") == b""
    assert b'"content":" three"' in part.stitch.feed(event({"content": " three"}, "b"))


def test_a_prompt_with_other_tokens_is_no_continuation() -> None:
    for way in (open_tokens, by_tokens):
        with pytest.raises(UnprovenError, match="prompt has other tokens"):
            answered(way(stream(BODY, event({"content": "one two"}), prompt=[1, 2, 4])))


@pytest.mark.parametrize("text", ["two one", "one two three"])
def test_tokens_that_do_not_spell_what_was_shown_are_no_continuation(text: str) -> None:
    for way in (open_tokens, by_tokens):
        with pytest.raises(UnprovenError):
            answered(way(stream(BODY, event({"content": text}))))


def test_text_that_was_held_back_can_come_only_from_the_gate() -> None:
    with pytest.raises(UnprovenError):
        answered(open_tokens(stream(BODY, event({"content": "one"}))))
    part = answered(by_tokens(stream(BODY, event({"content": "one"}))))
    choice = {"index": 0, "text": " three", "finish_reason": None, "token_ids": [6]}
    raw = b"data: " + orjson.dumps({"id": "b", "choices": [choice]}) + b"\n\n"
    assert b'"content":" two three"' in part.stitch.feed(raw)


def test_raw_text_is_asked_of_completions_with_the_same_sampling() -> None:
    body = BODY | {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "user": "u"}
    part = answered(by_tokens(stream(body, event({"reasoning": "one two"}))))
    sent = orjson.loads(part.body)
    assert part.target == b"/v1/completions"
    assert sent["prompt"] == [1, 2, 3, 4, 5]
    assert [sent[name] for name in ("temperature", "top_p", "repetition_penalty", "max_tokens")] == [
        0.5,
        0.9,
        1.1,
        7,
    ]
    assert "messages" not in sent
    endless = answered(by_tokens(stream({**body, "max_tokens": None}, event({"reasoning": "one two"}))))
    assert orjson.loads(endless.body)["max_tokens"] == 95


def test_ways_without_what_they_need_are_not_tried() -> None:
    shown = stream(BODY, event({"reasoning": "one two"}))
    assert ways_for(shown) == [open_tokens, by_tokens]
    without = BrokenStream(BODY, b"{}", b"/", Transcript(), OPEN | AGAIN, True, "vllm")
    assert [way.__name__ for way in ways_for(without)] == ["again"]
