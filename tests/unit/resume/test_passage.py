"""Large events on their way: whole, or with an honest failure, however they arrive."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.request.answer_shape import are_idle
from cellgate.proxy.resume.chat import StreamJoiner
from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.replay import BEGIN_BYTES, TAIL_BYTES, EventFilter
from cellgate.proxy.resume.transcript import Transcript

KIB = 1024
BOUNDS = [TAIL_BYTES, 64 * KIB, LIMITS.event_bytes]


def event(text: str, unit: str = "b") -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": unit, "choices": [choice]}) + b"\n\n"


EMPTY = len(event(""))


def stitching() -> EventFilter:
    """One of a unit that goes on for another."""
    passage, transcript = EventFilter(), Transcript()
    transcript.take({"id": "a", "choices": [{"delta": {"role": "assistant", "content": "zero"}}]})
    passage.stitch = StreamJoiner({}, transcript, Tokens(1, 1))
    return passage


def texts(body: bytes) -> list[str]:
    said = []
    for each in split(body)[0]:
        said.append(orjson.loads(payload(each) or b"")["choices"][0]["delta"]["content"])
    return said


def fed(passage: EventFilter, pieces: list[bytes]) -> tuple[bytes, Failure | None]:
    """What comes of them, up to the first failure."""
    shown = b""
    for piece in pieces:
        events, failure = passage.feed(piece, ended=False)
        shown += events
        if failure is not None:
            return shown, failure
    return shown, None


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("beside", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("step", [1000, 4096, 16 * KIB, 256 * KIB])
def test_no_text_vanishes_around_any_bound(bound: int, beside: int, step: int) -> None:
    words = ["one", "x" * (bound + beside - EMPTY), "three"]
    sent = b"".join(map(event, words))
    pieces = [sent[at : at + step] for at in range(0, len(sent), step)]
    shown, failure = fed(stitching(), pieces)
    if failure is None:
        assert texts(shown) == words
    else:
        assert bound == LIMITS.event_bytes
        assert (texts(shown), failure.kind) == (words[:1], FailureKind.NOT_CONTINUED)
        assert failure.message.endswith("it went on with an event larger than 1048576 bytes")
    assert fed(EventFilter(), pieces) == (sent, None)


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_an_event_of_16_kib_may_be_cut_anywhere(beside: int) -> None:
    words = ["x" * (TAIL_BYTES + beside - EMPTY), "two"]
    sent = b"".join(map(event, words))
    stitched = stitching()
    assert stitched.stitch is not None
    expected = stitched.stitch.feed(sent)
    # At every byte where something begins or ends, and here and there in between.
    for at in (*range(100), *range(100, TAIL_BYTES - 100, 53), *range(TAIL_BYTES - 100, len(sent))):
        assert fed(stitching(), [sent[:at], sent[at:]]) == (expected, None)
        assert fed(EventFilter(), [sent[:at], sent[at:]]) == (sent, None)


def test_an_event_larger_than_the_gate_may_hold_is_a_failure_of_a_unit_that_goes_on() -> None:
    shown, failure = fed(stitching(), [event("one"), *[b"data: " + b"x" * 60_000] * 20])
    assert (texts(shown), failure and failure.kind) == (["one"], FailureKind.NOT_CONTINUED)


@pytest.mark.parametrize("kind", [b"data: ", b": "], ids=["data", "comment"])
def test_what_is_held_before_the_first_event_is_bounded_and_then_shown(kind: bytes) -> None:
    passage, pieces = EventFilter(), 0
    begun = passage.begin(kind, ended=False)
    while begun is None:
        pieces += 1
        begun = passage.begin(b"x" * 60_000, ended=False)
    assert begun == kind + b"x" * 60_000 * pieces
    assert pieces == LIMITS.event_bytes // 60_000 + 1


def test_a_first_event_that_must_be_rewritten_is_not_shown_in_part() -> None:
    begun = EventFilter(has_ids=True).begin(b"data: " + b"x" * LIMITS.event_bytes, ended=False)
    assert isinstance(begun, Failure)
    assert begun.kind is FailureKind.NO_MEMORY


def test_a_first_event_may_be_as_large_as_any() -> None:
    large = event("x" * (LIMITS.event_bytes - EMPTY))
    passage = EventFilter()
    assert passage.begin(large[:-1], ended=False) is None
    assert passage.begin(large[-1:], ended=False) == large
    comments = b": ping\n\n" * 10_000
    passage = EventFilter()
    assert all(passage.begin(comments, ended=False) is None for _ in range(20))
    assert passage.is_empty


@pytest.mark.parametrize("has_ids", [False, True])
def test_a_first_event_is_held_as_long_as_there_is_memory(has_ids: bool) -> None:
    large, held = event("x" * (8 << 20)), [0]

    def may_hold(size: int) -> bool:
        held[0] += size
        return True

    passage = EventFilter(has_ids=has_ids, may_hold=may_hold)
    pieces = [large[at : at + 1448] for at in range(0, len(large), 1448)]
    assert {passage.begin(piece, ended=False) for piece in pieces[:-1]} == {None}
    assert len(large) - 1448 <= held[0] + LIMITS.event_bytes < len(large)
    assert passage.begin(pieces[-1], ended=False) == large


def created(size: int) -> bytes:
    """How a stream of `/v1/responses` begins whose request had so many bytes of instructions."""
    response = {"id": "resp_1", "error": None, "instructions": "x" * size}
    names = ("response.created", "response.in_progress")
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, "response": response}))
        for name in names
    )


ADDED = b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'


@pytest.mark.parametrize("size", [64 * KIB, 600_000, 4 << 20])
@pytest.mark.parametrize("step", [1448, 256 * KIB, 1 << 30])
def test_what_repeats_the_request_is_held_until_the_first_token(size: int, step: int) -> None:
    passage = EventFilter(is_idle=are_idle, may_hold=lambda _: True)
    begin = created(size) + ADDED
    for at in range(0, len(begin), step):
        assert passage.begin(begin[at : at + step], ended=False) is None
    assert passage.idle_events == 3
    assert passage.begin(DELTA, ended=False) == begin + DELTA


def test_text_that_looks_like_an_error_in_the_middle_of_a_large_event_is_none() -> None:
    large = b"data: " + b"x" * (TAIL_BYTES - 5)
    for piece in (b"event: error", b'data: {"error": 1}'):
        assert fed(EventFilter(), [large, piece, b"\n\n"]) == (large + piece + b"\n\n", None)
    shown, failure = fed(EventFilter(), [large, b'x\n\ndata: {"error": 1}\n\n'])
    assert (shown, failure and failure.kind) == (large + b"x\n\n", FailureKind.STREAM_ERROR)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_the_end_of_a_large_event_is_found_wherever_it_was_cut(end: bytes) -> None:
    large = b"data: " + b"x" * TAIL_BYTES
    for at in range(len(end) + 1):
        passage = EventFilter()
        pieces = [large + end[:at], end[at:]]
        assert fed(passage, pieces) == (large + end, None)
        assert not passage.in_event
        assert passage.is_empty


def test_what_came_before_the_event_that_cannot_follow_is_shown_and_known_to_be() -> None:
    passage = stitching()
    strange = event("x").replace(b'"content":"x"', b'"audio":{"id":"x"}')
    shown, failure = fed(passage, [event("one") + strange + event("two")])
    assert (texts(shown), failure and failure.kind) == (["one"], FailureKind.NOT_CONTINUED)
    assert isinstance(passage.stitch, StreamJoiner)
    assert (passage.stitch.transcript.text, passage.stitch.transcript.why_not) == ("zeroone", "")


def test_a_byte_at_a_time_costs_no_more_for_a_larger_event() -> None:
    """What is held is put together once, and not with each read."""
    passage = stitching()
    passage.feed(b"data: " + b"x" * 500_000, ended=False)
    held = passage._tail[0]
    for _ in range(100):
        passage.feed(b"x", ended=False)
    assert passage._tail[0] is held


def test_an_aborted_answer_is_a_failure_before_its_event_is_shown() -> None:
    aborted = b'data: {"id":"b","choices":[{"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n'
    shown, failure = EventFilter().feed(event("one") + aborted, ended=False)
    assert (shown, failure and failure.kind) == (event("one"), FailureKind.ABORTED)
    begun = EventFilter().begin(aborted, ended=False)
    assert isinstance(begun, Failure)
    assert begun.kind is FailureKind.ABORTED


def test_no_more_of_a_beginning_is_held_than_is_looked_at_in_one_turn() -> None:
    """Whatever memory there is: a first event of 100 MB would keep all others waiting for half a second."""
    passage, piece = EventFilter(may_hold=lambda _: True), b"x" * (1 << 16)
    assert passage.begin(b"data: ", ended=False) is None
    held = 6
    while (begun := passage.begin(piece, ended=False)) is None:
        held += len(piece)
    assert isinstance(begun, bytes)
    assert held <= BEGIN_BYTES < len(begun) == held + len(piece)
