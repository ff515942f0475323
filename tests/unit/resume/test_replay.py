"""What a relay keeps is what its client was shown; large events on their way; token ids."""

from __future__ import annotations

from itertools import cycle

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure, FailureKind, error_event
from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.request.answer_shape import are_idle
from cellgate.proxy.request.response import TokensWithCounts, TokensWithIds
from cellgate.proxy.resume.blocks import BlockTranscript
from cellgate.proxy.resume.chat import StreamJoiner
from cellgate.proxy.resume.eligible import COUNTS, OPEN
from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.replay import (
    BEGIN_BYTES,
    END_CHUNKS,
    FOLD_BYTES,
    TAIL_BYTES,
    EventFilter,
    ReplayBuffer,
    plain,
)
from cellgate.proxy.resume.streams import STREAMS
from cellgate.proxy.resume.transcript import (
    CountLog,
    TokenLog,
    Transcript,
    asked_to_tell,
    asking,
    can_tell,
    digest_of,
    gives_ids,
)
from tests.cost.bench import counted
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk

DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "x"}}\n\n'
COMMENT = b": working\n\n"


def event(text: str, *, unit: str = "a", role: str | None = None, finish: str | None = None) -> bytes:
    delta = ({"role": role} if role else {}) | {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": unit, "created": 1, "choices": [choice]}) + b"\n\n"


WORDS = [" one", " two", " three", ' "four"', " \u20ac"]
TOKENS = [event(word) for word in WORDS]
EVENTS = b"".join(TOKENS)
WHOLE = [*TOKENS, event("", finish="stop"), DONE]

OPENED = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","content":[]}}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":'
    b'{"type":"text","text":""}}\n\n',
]
"""What a stream of `/v1/messages` begins with."""
GROWS = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
    b'{"type":"text_delta","text":" %b"}}\n\n'
)

FORMS = {
    "event for event": b"".join(map(chunk, WHOLE)),
    "all in a chunk": chunk(b"".join(WHOLE)),
    "chunks across events": b"".join(
        chunk(b"".join(WHOLE)[at : at + 50]) for at in range(0, 900, 50) if b"".join(WHOLE)[at : at + 50]
    ),
    "comments in between": b"".join(chunk(each) + chunk(COMMENT) for each in WHOLE),
    "CR": b"".join(chunk(each.replace(b"\n", b"\r")) for each in WHOLE),
    "a byte order mark": b"".join(map(chunk, [b"\xef\xbb\xbf" + WHOLE[0], *WHOLE[1:]])),
    "no empty line at the end": b"".join(map(chunk, [*WHOLE[:-1], DONE[:-1]])),
}


class Keeping(Rig):
    """Begins to keep when there is something to show; `joiner` goes on for another unit."""

    stitch: StreamJoiner | None = None
    keep: ReplayBuffer | None = None
    ways = OPEN

    def committed(self, first: bytes, at: float) -> None:
        super().committed(first, at)
        if self.keep is None:
            self.response.read_answer(is_typed=False)
            self.response.record_replay(self.ways, Transcript)
        else:
            assert self.stitch is not None
            self.attempt.resume_with(self.keep, self.stitch)


def text_of(body: bytes) -> str:
    transcript = Transcript()
    for each in split(body)[0]:
        if (data := payload(each)) and data != b"[DONE]" and b"error" not in data:
            transcript.take(orjson.loads(data))
    return transcript.text


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_kept_is_what_was_shown_wherever_the_reply_breaks_off(form: bytes) -> None:
    sent = SSE_HEAD + form
    for at in range(len(SSE_HEAD), len(sent), 3):
        rig = Keeping(http10=at % 2 == 0).feed([sent[:at]], close=True)
        assert not rig.bugs
        if rig.response.replay is None:
            assert rig.ends == ["failed"]
            continue
        assert rig.ends == ["committed", "failed"]
        transcript = plain(rig.response.replay)
        assert (transcript.closed, transcript.unsupported) == (True, "")
        assert transcript.text == text_of(rig.body())
        assert "".join(WORDS).startswith(transcript.text)


def test_an_error_at_any_place_is_found_before_it_is_shown() -> None:
    for at in range(1, len(WHOLE) - 1):
        in_chunks = [*map(chunk, WHOLE[:at]), chunk(ERROR)]
        for sent in (in_chunks, [chunk(WHOLE[0]), chunk(b"".join(WHOLE[1:at]) + ERROR)]):
            rig = Keeping().feed([SSE_HEAD, *sent, chunk(DONE) + LAST_CHUNK])
            assert [failure.kind for failure in rig.failures] == [FailureKind.STREAM_ERROR]
            assert rig.body() == b"".join(WHOLE[:at])
            assert rig.response.replay is not None
            assert plain(rig.response.replay).text == "".join(WORDS[:at])
    rig = Keeping().feed([SSE_HEAD, chunk(b"".join(TOKENS) + ERROR)])
    assert (rig.shown, rig.failures[0].kind) == (b"", FailureKind.FIRST_EVENT_ERROR)


LONG = {
    "a chunk for each": list(map(chunk, TOKENS * 400)),
    "many, with spaces": [chunk(EVENTS.replace(b'":', b'": ') * 40)] * 10,
    "many, and a comment": [chunk(EVENTS * 20 + COMMENT + EVENTS * 20)] * 10,
    "CRLF": [chunk(each.replace(b"\n", b"\r\n")) for each in TOKENS * 400],
    "in pieces": [piece for each in TOKENS * 400 for piece in (chunk(each[:60]), chunk(each[60:]))],
    "a second role": [*map(chunk, [*TOKENS * 200, event("", role="assistant"), *TOKENS * 200])],
}


@pytest.mark.parametrize("sent", LONG.values(), ids=LONG)
def test_long_streams_are_folded_and_say_the_same(sent: list[bytes]) -> None:
    for http10 in (False, True):
        rig = Keeping(http10=http10).feed([SSE_HEAD, *sent])
        assert rig.response.replay is not None
        assert sum(map(len, rig.response.replay.chunks)) < FOLD_BYTES + 1024
        transcript = plain(rig.response.replay)
        assert (transcript.text, transcript.closed, transcript.why_not) == ("".join(WORDS * 400), True, "")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    "sent", [TOKENS, [each.replace(b'":', b'": ') for each in TOKENS]], ids=["dense", "spaced"]
)
def test_events_are_read_at_once_however_many_are_in_a_chunk(sent: list[bytes], size: int) -> None:
    transcript = Transcript(framed=True)
    transcript.read([*map(chunk, sent)])
    chunks = grouped(sent * 200, [size])
    with counted() as counts:
        transcript.read(chunks)
    assert transcript.text == "".join(WORDS * 201)
    assert counts.total() < 75 * 200 * len(WORDS)


def grouped(events: list[bytes], sizes: list[int]) -> list[bytes]:
    """Chunks of so many events, in turn."""
    chunks, left, size = list[bytes](), events, cycle(sizes)
    while left:
        many = next(size)
        chunks.append(chunk(b"".join(left[:many])))
        left = left[many:]
    return chunks


REASONING = event("").replace(b'"content":""', b'"reasoning":"hm"')
KINDS = [*TOKENS, TOKENS[0], COMMENT, REASONING, event("", role="assistant"), event("", finish="stop"), DONE]


@given(
    st.lists(st.sampled_from(KINDS), max_size=60), st.lists(st.integers(1, 9), min_size=1), st.integers(0, 60)
)
def test_the_same_is_read_of_events_that_come_several_in_a_chunk(
    events: list[bytes], sizes: list[int], folded_at: int
) -> None:
    # Without chunks each event is read as JSON.
    alone, several = Transcript(), Transcript(framed=True)
    alone.read(events)
    for part in (events[:folded_at], events[folded_at:]):
        several.read(grouped(part, sizes))
    for name in ("text", "size", "events", "finish", "unsupported", "closed", "has_role", "is_done"):
        assert getattr(several, name) == getattr(alone, name)
    assert str(several.shown.reasoning) == str(alone.shown.reasoning)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_events_of_blocks_are_compared_with_the_last_however_many_are_in_a_chunk(size: int) -> None:
    words = [b"word %d" % number for number in range(400)]
    transcript = STREAMS["messages"].shape(framed=True, ways=OPEN)
    assert isinstance(transcript, BlockTranscript)
    transcript.read(map(chunk, [*OPENED, GROWS % words[0]]))
    chunks = grouped([GROWS % word for word in words[1:]], [size])
    with counted() as counts:
        transcript.read(chunks)
    assert (transcript.why_not, transcript.text) == ("", b"".join(b" " + word for word in words).decode())
    assert counts.total() < 200 * len(words)


STRANGE = [
    event("?").replace(b'"content":"?"', other) for other in (b'"tool_calls":[{"index":0}]', b'"content":7')
]
STRANGE += [b'data: {"choices":[7]}\n\n', b'data: {"choices":{}}\n\n']
STRANGE += [b'data: {"choices":[{"delta":"x"}]}\n\n', b"data: 7\n\n", b"data: {\n\n"]


@pytest.mark.parametrize("other", STRANGE)
def test_what_is_no_text_is_noticed_wherever_it_stands(other: bytes) -> None:
    rig = Keeping().feed([SSE_HEAD, *map(chunk, [*TOKENS, other, *TOKENS * 400])])
    assert rig.response.replay is not None
    assert plain(rig.response.replay).why_not or other == b'data: {"choices":{}}\n\n'
    assert not rig.bugs


def test_a_stream_that_shows_more_than_text_is_kept_no_longer() -> None:
    strange = event("").replace(b'"content":""', b'"reasoning_content":"hm"')
    rig = Keeping().feed([SSE_HEAD, chunk(strange), *map(chunk, TOKENS * 400)])
    assert rig.response.replay is not None
    assert len(rig.response.replay.chunks) == END_CHUNKS
    assert plain(rig.response.replay).why_not.startswith("its stream has carried reasoning_content, ")


@pytest.mark.parametrize("last", [b"", event("", finish="stop"), DONE], ids=["nothing", "finish", "done"])
def test_of_a_stream_that_nobody_could_go_on_with_the_end_is_kept_and_looked_at(last: bytes) -> None:
    calls = event("").replace(b'"content":""', b'"tool_calls":[{"index":0}]')
    sent = [event("", role="assistant"), *[calls] * 9, *([last] if last else [])]
    rig = Keeping()
    rig.ways = 0
    rig.feed([SSE_HEAD, *map(chunk, sent)])
    assert rig.response.replay is not None
    assert list(rig.response.replay.chunks) == list(map(chunk, sent[-END_CHUNKS:]))
    rig.feed([LAST_CHUNK])
    assert rig.ends == ["committed", "done" if last else "failed"]
    assert [failure.kind for failure in rig.failures] == ([] if last else [FailureKind.TRUNCATED])


def test_half_an_event_that_had_to_be_shown_is_known_to_be_half() -> None:
    rig = Keeping().feed([SSE_HEAD, chunk(TOKENS[0]), chunk(event("x" * 2 * TAIL_BYTES)[:-10])], close=True)
    assert rig.response.replay is not None
    assert not plain(rig.response.replay).closed
    failure = Failure(FailureKind.CUT, "x")
    rig.response.break_off(failure)
    assert rig.body().endswith(b'"finish_reason"\n\n' + error_event(failure))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_second_unit_is_stitched_on_wherever_its_reply_is_cut_in_two(form: bytes) -> None:
    sent = SSE_HEAD + form.replace(b'"a"', b'"b"') + LAST_CHUNK
    for at in range(0, len(sent), 3):
        replay = ReplayBuffer(framed=False)
        replay.chunks.append(event("zero", role="assistant"))
        rig = Keeping()
        rig.keep, rig.stitch = replay, StreamJoiner({}, plain(replay), Tokens(1, 1))
        rig.response.begun = True
        rig.feed([sent[:at], sent[at:]])
        assert (rig.ends, rig.bugs) == (["committed", "done"], [])
        body = rig.body()
        assert body.replace(COMMENT, b"") == b"".join(WHOLE)
        assert plain(replay).text == "zero" + "".join(WORDS)


def test_of_an_event_without_end_no_more_is_kept_than_one_may_have() -> None:
    rig, piece = Keeping(), b"x" * 60_000
    rig.feed([SSE_HEAD, chunk(TOKENS[0]), chunk(b'data: {"id":"')])
    most = 0
    for _ in range(2 * LIMITS.event_bytes // len(piece)):
        rig.feed([chunk(piece)])
        assert rig.response.replay is not None
        transcript = rig.response.replay._transcript()
        assert isinstance(transcript, Transcript)
        most = max(most, len(transcript._tail) + sum(map(len, rig.response.replay.chunks)))
    assert rig.bugs == []
    assert most < LIMITS.event_bytes + FOLD_BYTES + (END_CHUNKS + 1) * len(piece)
    assert transcript.why_not == "its stream has carried an event larger than 1048576 bytes"
    assert len(rig.body()) > LIMITS.event_bytes, "a client gets it all the same"


def test_what_was_said_is_held_in_few_pieces_however_many_events_it_came_in() -> None:
    transcript, events, folds = Transcript(), 500, 40
    for _ in range(folds):
        transcript.read([event("word ") * events])
    assert len(transcript.shown.text._parts) <= 6
    assert transcript.text == "word " * folds * events


# Large events on their way: whole, or with an honest failure, however they arrive.

KIB = 1024
BOUNDS = [TAIL_BYTES, 64 * KIB, LIMITS.event_bytes]


def large_event(text: str, unit: str = "b") -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": unit, "choices": [choice]}) + b"\n\n"


EMPTY = len(large_event(""))


def stitching() -> EventFilter:
    """One of a unit that goes on for another."""
    passage, transcript = EventFilter(), Transcript()
    transcript.take({"id": "a", "choices": [{"delta": {"role": "assistant", "content": "zero"}}]})
    passage.joiner = StreamJoiner({}, transcript, Tokens(1, 1))
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
@pytest.mark.parametrize("step", [1000, 16 * KIB, 256 * KIB])
def test_no_text_vanishes_around_any_bound(bound: int, step: int) -> None:
    for beside in (-1, 0, 1):
        words = ["one", "x" * (bound + beside - EMPTY), "three"]
        sent = b"".join(map(large_event, words))
        pieces = [sent[at : at + step] for at in range(0, len(sent), step)]
        shown, failure = fed(stitching(), pieces)
        if failure is None:
            assert texts(shown) == words
        else:
            assert bound == LIMITS.event_bytes
            assert (texts(shown), failure.kind) == (words[:1], FailureKind.NOT_RESUMED)
            assert failure.message.endswith("it went on with an event larger than 1048576 bytes")
        assert fed(EventFilter(), pieces) == (sent, None)


@pytest.mark.parametrize("kind", [b"data: ", b": "], ids=["data", "comment"])
def test_what_is_held_before_the_first_event_is_bounded_and_then_shown(kind: bytes) -> None:
    """Whatever memory there is: a first event of 100 MB would keep all others waiting for half a second."""
    roomy = EventFilter(may_hold=lambda _: True)
    for passage, bound in ((EventFilter(), LIMITS.event_bytes), (roomy, BEGIN_BYTES)):
        held, piece = kind, b"x" * 60_000
        assert passage.begin(kind, ended=False) is None
        while (begun := passage.begin(piece, ended=False)) is None:
            held += piece
        assert begun == held + piece
        assert len(held) <= bound < len(begun)


def test_a_first_event_may_be_as_large_as_any_but_is_not_shown_in_part_if_it_must_be_rewritten() -> None:
    large = large_event("x" * (LIMITS.event_bytes - EMPTY))
    passage = EventFilter()
    assert passage.begin(large[:-1], ended=False) is None
    assert passage.begin(large[-1:], ended=False) == large
    comments = b": ping\n\n" * 10_000
    passage = EventFilter()
    assert all(passage.begin(comments, ended=False) is None for _ in range(20))
    assert passage.is_empty
    begun = EventFilter(strips=True).begin(b"data: " + b"x" * LIMITS.event_bytes, ended=False)
    assert isinstance(begun, Failure)
    assert begun.kind is FailureKind.NO_MEMORY


@pytest.mark.parametrize("strips", [False, True])
def test_a_first_event_is_held_as_long_as_there_is_memory(strips: bool) -> None:
    large, held = large_event("x" * (2 << 20)), [0]

    def may_hold(size: int) -> bool:
        held[0] += size
        return True

    passage = EventFilter(strips=strips, may_hold=may_hold)
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


@pytest.mark.parametrize(("size", "step"), [(64 * KIB, 1448), (600_000, 1 << 30), (4 << 20, 64 * KIB)])
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
    strange = large_event("x").replace(b'"content":"x"', b'"audio":{"id":"x"}')
    shown, failure = fed(passage, [large_event("one") + strange + large_event("two")])
    assert (texts(shown), failure and failure.kind) == (["one"], FailureKind.NOT_RESUMED)
    assert isinstance(passage.joiner, StreamJoiner)
    assert (passage.joiner.transcript.text, passage.joiner.transcript.why_not) == ("zeroone", "")


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
    shown, failure = EventFilter().feed(large_event("one") + aborted, ended=False)
    assert (shown, failure and failure.kind) == (large_event("one"), FailureKind.ABORTED)
    begun = EventFilter().begin(aborted, ended=False)
    assert isinstance(begun, Failure)
    assert begun.kind is FailureKind.ABORTED


def test_of_a_large_event_its_edges_tell_what_it_is() -> None:
    failed = b'data: {"error": {"message": "' + b"x" * (2 << 20) + b'"}}\n\n'
    passage = EventFilter(may_hold=lambda _: True)
    assert passage.begin(failed[:-2], ended=False) is None
    begun = passage.begin(failed[-2:], ended=False)
    assert isinstance(begun, Failure)
    assert begun.kind is FailureKind.FIRST_EVENT_ERROR


# Token ids: asked for, kept beside the text, and never shown to a client who did not ask.

FIRST = (
    b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}],"prompt_token_ids":[1,22,333],"prompt_text":null}\n\n'
)
TOKEN = (
    b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"x \\"token_ids\\":[7]"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":[44,5]}]}\n\n'
)


def test_engines_that_are_known_to_give_them_are_asked_in_front_of_the_clients_own_fields() -> None:
    asked = asking(b' {"model": "m", "stream": true}')
    assert orjson.loads(asked) == {"return_token_ids": True, "model": "m", "stream": True}
    assert all(gives_ids("vllm", version, "chat") for version in ("0.11.0rc2", "1.0"))
    assert not any(gives_ids("vllm", version, "completions") for version in ("0.10.2", "dev", ""))
    assert gives_ids("sglang", "0.5.23", "completions")
    # There it is a 400.
    assert not gives_ids("sglang", "0.5.23", "chat")
    assert not gives_ids("sglang", "0.5.22.post1", "completions")


COUNTING = {"continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (b"", COUNTING),
        (b',"stream_options" : { }', COUNTING),
        (
            b',"stream_options":{"include_usage":true}',
            {"include_usage": True, "continuous_usage_stats": True},
        ),
    ],
)
def test_chats_of_sglang_are_asked_how_many_tokens_there_are(options: bytes, asked: dict[str, bool]) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"\\"stream_options\\":{"}]%b}' % options
    assert can_tell("sglang", "0.4", "chat") == COUNTS
    assert not can_tell("llamacpp", "1", "chat")
    told = asked_to_tell(body, COUNTS)
    assert told.tells == COUNTS
    assert orjson.loads(told.body) == {**orjson.loads(body), "stream_options": asked}


@pytest.mark.parametrize(
    "options",
    [
        b'"stream_options":{"continuous_usage_stats":false}',
        b'"stream_options":7',
        b'"tools":[{"stream_options":{}}]',
        b'"tools":[{"stream_options":{}}],"stream_options":{}',
    ],
)
def test_a_request_that_says_it_oddly_is_left_as_it_is(options: bytes) -> None:
    body = b'{"model":"m",%b}' % options
    assert asked_to_tell(body, COUNTS) == (body, 0)


COUNTED = (
    b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"}],\\"usage\\":{}"},"finish_reason":null}]'
    b',"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,"prompt_tokens_details":'
    b'{"cached_tokens":1}}}\n\n'
)
BARE = COUNTED[: COUNTED.index(b',"usage":{"')] + b"}\n\n"
LAST = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'


def test_counts_are_taken_from_events_with_a_choice_and_from_no_others() -> None:
    log = CountLog()
    assert (log.prompt, log.shown) == (0, 0)
    assert log.strip(COUNTED + LAST) == BARE + LAST
    assert (log.prompt, log.shown) == (9, 2)
    # What is no count says nothing.
    assert log.strip(COUNTED.replace(b":9,", b":-,")) == BARE
    assert (log.prompt, log.shown) == (0, 0)


def test_a_whole_chunk_comes_out_without_its_counts() -> None:
    log = CountLog()
    kept = Kept(log)
    kept.usual_ends = (b'"finish_reason":null}]}\n\n\r\n',)
    TokensWithCounts(kept, log).on_token(chunk(COUNTED))  # type: ignore[arg-type]
    assert (kept.sent, kept.read, log.shown) == (chunk(BARE), 0, 2)
    kept.sent = b""
    TokensWithCounts(kept, log).on_token(chunk(LAST))  # type: ignore[arg-type]
    assert (kept.sent, kept.read) == (chunk(LAST), 1)


def test_the_client_gets_the_bytes_that_it_would_have_got() -> None:
    shown = TokenLog().strip(FIRST + TOKEN)
    assert b'"prompt_token_ids":null,"prompt_text":null' in shown
    assert b'"finish_reason":null,"token_ids":null}]' in shown
    assert orjson.loads(shown.split(b"\n\n")[1][6:])["choices"][0]["delta"]["content"] == 'x "token_ids":[7]'
    assert TokenLog().strip(shown) == shown


class Kept:
    """In the place of a response: what the client gets of whole chunks."""

    usual_ends: tuple[bytes, ...] = (b'"finish_reason":null,"token_ids":null}]}\n\n\r\n',)

    def __init__(self, log: TokenLog | CountLog) -> None:
        self.sent = b""
        self.log = log
        self.read = 0

    def on_token(self, chunk: bytes) -> None:
        self.sent += chunk

    def count(self, events: int) -> None:
        self.read += events

    def pass_on(self, _: bytes, body: bytes) -> None:
        self.sent += chunk(self.log.strip(body))


@pytest.mark.parametrize("ids", [b"[44]", b"[44,5]", b"[]", b"null"])
def test_a_whole_chunk_comes_out_as_if_nobody_had_asked(ids: bytes) -> None:
    log = TokenLog()
    kept = Kept(log)
    sent = TOKEN.replace(b'"token_ids":[44,5]}', b'"token_ids":%b}' % ids)
    TokensWithIds(kept, log).on_token(chunk(sent))  # type: ignore[arg-type]
    assert kept.sent == chunk(TOKEN.replace(b'"token_ids":[44,5]}', b'"token_ids":null}'))
    assert list(log.ids) == (orjson.loads(ids) or [])
    assert kept.read == (ids != b"[44]")


def test_those_of_a_prompt_are_kept_as_a_digest_and_those_of_the_answer_as_numbers() -> None:
    logs = TokenLog(), TokenLog(), TokenLog()
    logs[0].strip(FIRST + TOKEN)
    logs[1].strip(FIRST.replace(b",22,", b", 22, ") + TOKEN)
    for event in (FIRST, TOKEN):
        document = orjson.loads(event.strip()[6:])
        logs[2].take(document)
        assert "prompt_token_ids" not in document
        assert "token_ids" not in document["choices"][0]
    assert [(log.prompt, list(log.ids)) for log in logs] == [(digest_of([1, 22, 333]), [44, 5])] * 3
    assert digest_of([1, 22, 333]) != digest_of([12, 2, 333])
    # What are no ids is left to be found strange.
    for ids in ("abc", [1, "2"], [-1], {"a": 1}, [1.5]):
        log, document = TokenLog(), {"choices": [{"token_ids": ids}]}
        log.take(document)
        assert (list(log.ids), document) == ([], {"choices": [{"token_ids": ids}]})
