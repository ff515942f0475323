"""The accounting: every request ends under exactly one name, and only a right text is whole."""

import random

import orjson
import pytest

from loadtests.drill.answers import Answer, End
from loadtests.drill.mixes import MIXES, Request
from loadtests.simunit.text import WORDS

REQUEST = Request("short-chat", " Why?", 2, 12)
EXPECTED = REQUEST.expected()
assert EXPECTED is not None
TOKENS = [f" {word}" for word in EXPECTED.split()]


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + orjson.dumps({"choices": [choice]})


def usage(tokens: int) -> bytes:
    return b"data: " + orjson.dumps({"choices": [], "usage": {"completion_tokens": tokens}})


def stream(*lines: bytes, request: Request = REQUEST, status: int = 200) -> Answer:
    answer = Answer(request, sent_at=0.0, status=status)
    for second, line in enumerate(lines, start=1):
        answer.take_line(line, float(second))
    return answer


def said(tokens: list[str]) -> list[bytes]:
    """Events of these tokens; the last one says that it is the last."""
    return [*map(event, tokens[:-1]), event(tokens[-1], "length")]


ERROR = b'data: {"error": {"message": "it broke"}}'
DONE = b"data: [DONE]"


def test_a_right_text_with_its_usage_and_its_end_is_whole() -> None:
    answer = stream(b": keep-alive", b"", *said(TOKENS), usage(12), DONE)
    assert answer.end() == (End.WHOLE, "")
    assert answer.tokens == 12
    assert answer.first_at == 3.0
    assert answer.gaps_s == [1.0] * 11


def test_a_stream_stitched_at_the_right_place_is_whole() -> None:
    pieces = [*TOKENS[:5], "".join(TOKENS[5:9]), *TOKENS[9:]]
    assert stream(*said(pieces), usage(12), DONE).end()[0] is End.WHOLE


@pytest.mark.parametrize("finished", [DONE, b": the connection was cut"])
def test_an_error_event_after_a_token_is_one(finished: bytes) -> None:
    answer = stream(*map(event, TOKENS[:4]), ERROR, finished)
    assert answer.end()[0] is End.ERROR_EVENT


def test_a_stream_that_is_cut_without_a_word_is_lost() -> None:
    answer = stream(*map(event, TOKENS[:4]))
    answer.cut = "IncompleteRead"
    assert answer.end()[0] is End.LOST


@pytest.mark.parametrize(("status", "end"), [(503, End.LOST), (500, End.LOST), (429, End.REFUSED)])
def test_without_a_token_only_429_is_a_refusal(status: int, end: End) -> None:
    answer = Answer(REQUEST, sent_at=0.0, status=status)
    answer.take_whole(b'{"error": {"message": "no"}}', 1.0)
    assert answer.end()[0] is end


def test_an_error_event_before_any_token_is_a_loss() -> None:
    assert stream(ERROR, DONE).end()[0] is End.LOST


def test_no_byte_for_too_long_is_a_hang() -> None:
    answer = stream(*map(event, TOKENS[:4]))
    answer.hung = True
    assert answer.end()[0] is End.HUNG


@pytest.mark.parametrize("again_from", [0, 1, 5])
def test_a_stream_that_goes_back_repeats(again_from: int) -> None:
    answer = stream(*said([*TOKENS[:8], *TOKENS[again_from:]]), DONE)
    assert answer.end()[0] is End.REPEATED


def test_an_answer_said_twice_repeats() -> None:
    assert stream(*said(TOKENS * 2), DONE).end()[0] is End.REPEATED


def test_a_gap_is_wrong() -> None:
    assert stream(*said([*TOKENS[:5], *TOKENS[6:]]), DONE).end()[0] is End.WRONG


def test_another_text_is_wrong() -> None:
    other = next(word for word in WORDS if word != TOKENS[3])
    assert stream(*said([*TOKENS[:3], other, *TOKENS[4:]]), DONE).end()[0] is End.WRONG


def test_an_end_as_if_whole_before_the_text_is_is_wrong() -> None:
    assert stream(*said(TOKENS[:7]), DONE).end()[0] is End.WRONG


def test_usage_that_miscounts_is_wrong() -> None:
    assert stream(*said(TOKENS), usage(19), DONE).end()[0] is End.WRONG


def test_an_end_without_a_reason_is_wrong() -> None:
    assert stream(*map(event, TOKENS), usage(12), DONE).end()[0] is End.WRONG


def test_of_a_text_that_nobody_knows_the_usage_must_be_right() -> None:
    request = Request("stream-48", " Why?", 2, 48, known=False)
    assert stream(*said(["x"] * 40), usage(48), DONE, request=request).end()[0] is End.WHOLE
    assert stream(*said(["x"] * 40), usage(40), DONE, request=request).end()[0] is End.WRONG
    assert stream(*said(["x"] * 40), DONE, request=request).end()[0] is End.WRONG


@pytest.mark.parametrize("mix", MIXES.keys() - {"long-prompt"})
def test_a_mix_draws_the_same_requests_from_the_same_seed(mix: str) -> None:
    first, second = (Request.draw(mix, random.Random(7)) for _ in range(2))
    assert first == second
    assert first != Request.draw(mix, random.Random(8))
    assert first.prompt_tokens == len(first.prompt.split())
