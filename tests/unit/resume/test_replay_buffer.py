"""What a relay keeps is what its client was shown, for every point at which the network may cut a reply."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure, FailureKind, error_event
from cellgate.proxy.http.sse import payload, split
from cellgate.proxy.resume.chat import StreamJoiner
from cellgate.proxy.resume.eligible import OPEN
from cellgate.proxy.resume.proof import Tokens
from cellgate.proxy.resume.replay import END_CHUNKS, FOLD_BYTES, TAIL_BYTES, ReplayBuffer, plain
from cellgate.proxy.resume.transcript import Transcript
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

FORMS = {
    "event for event": b"".join(map(chunk, WHOLE)),
    "all in a chunk": chunk(b"".join(WHOLE)),
    "chunks across events": b"".join(
        chunk(b"".join(WHOLE)[at : at + 50]) for at in range(0, 900, 50) if b"".join(WHOLE)[at : at + 50]
    ),
    "comments in between": b"".join(chunk(each) + chunk(COMMENT) for each in WHOLE),
    "CRLF": b"".join(chunk(each.replace(b"\n", b"\r\n")) for each in WHOLE),
    "CR": b"".join(chunk(each.replace(b"\n", b"\r")) for each in WHOLE),
    "a byte order mark": b"".join(map(chunk, [b"\xef\xbb\xbf" + WHOLE[0], *WHOLE[1:]])),
    "no empty line at the end": b"".join(map(chunk, [*WHOLE[:-1], DONE[:-1]])),
}


class Keeping(Rig):
    """Begins to keep when there is something to show; `stitch` goes on for another unit."""

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
            self.attempt.go_on(self.keep, self.stitch)


def text_of(body: bytes) -> str:
    transcript = Transcript()
    for each in split(body)[0]:
        if (data := payload(each)) and data != b"[DONE]" and b"error" not in data:
            transcript.take(orjson.loads(data))
    return transcript.text


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("http10", [False, True], ids=["1.1", "1.0"])
def test_what_is_kept_is_what_was_shown_wherever_the_reply_breaks_off(form: bytes, http10: bool) -> None:
    sent = SSE_HEAD + form
    for at in range(len(SSE_HEAD), len(sent), 3):
        rig = Keeping(http10=http10)
        rig.feed([sent[:at]], close=True)
        assert not rig.bugs
        if rig.response.replay is None:
            assert rig.ends == ["failed"]
            continue
        assert rig.ends == ["committed", "failed"]
        transcript = plain(rig.response.replay)
        assert (transcript.closed, transcript.unsupported) == (True, "")
        assert transcript.text == text_of(rig.body())
        assert "".join(WORDS).startswith(transcript.text)


@pytest.mark.parametrize("at", range(1, len(WHOLE) - 1))
def test_an_error_at_any_place_is_found_before_it_is_shown(at: int) -> None:
    for sent in (
        [*map(chunk, WHOLE[:at]), chunk(ERROR)],
        [chunk(WHOLE[0]), chunk(b"".join(WHOLE[1:at]) + ERROR)],
    ):
        rig = Keeping()
        rig.feed([SSE_HEAD, *sent, chunk(DONE) + LAST_CHUNK])
        assert [failure.kind for failure in rig.failures] == [FailureKind.STREAM_ERROR]
        assert rig.body() == b"".join(WHOLE[:at])
        assert rig.response.replay is not None
        assert plain(rig.response.replay).text == "".join(WORDS[:at])


def test_an_error_in_the_first_read_leaves_nothing_shown() -> None:
    rig = Keeping()
    rig.feed([SSE_HEAD, chunk(b"".join(TOKENS) + ERROR)])
    assert (rig.shown, rig.failures[0].kind) == (b"", FailureKind.FIRST_EVENT_ERROR)


def test_a_stream_that_http_ends_well_in_the_middle_of_an_answer_is_broken() -> None:
    rig = Keeping()
    rig.feed([SSE_HEAD, *map(chunk, TOKENS), LAST_CHUNK])
    assert rig.failures[0].kind is FailureKind.TRUNCATED
    assert rig.body() == EVENTS
    whole = Keeping()
    whole.feed([SSE_HEAD, *map(chunk, WHOLE), LAST_CHUNK])
    assert whole.ends == ["committed", "done"]


LONG = {
    "a chunk for each": list(map(chunk, TOKENS * 400)),
    "several in a chunk": [chunk(EVENTS)] * 400,
    "many in a chunk": [chunk(EVENTS * 40)] * 10,
    "many, with spaces": [chunk(EVENTS.replace(b'":', b'": ') * 40)] * 10,
    "many, and a comment": [chunk(EVENTS * 20 + COMMENT + EVENTS * 20)] * 10,
    "comments in between": [*map(chunk, TOKENS), chunk(COMMENT)] * 400,
    "CRLF": [chunk(each.replace(b"\n", b"\r\n")) for each in TOKENS * 400],
    "in pieces": [piece for each in TOKENS * 400 for piece in (chunk(each[:60]), chunk(each[60:]))],
    "a second role": [
        *map(chunk, TOKENS * 200),
        chunk(event("", role="assistant")),
        *map(chunk, TOKENS * 200),
    ],
}


@pytest.mark.parametrize("sent", LONG.values(), ids=LONG)
@pytest.mark.parametrize("http10", [False, True], ids=["1.1", "1.0"])
def test_long_streams_are_folded_and_say_the_same(sent: list[bytes], http10: bool) -> None:
    rig = Keeping(http10=http10)
    rig.feed([SSE_HEAD, *sent])
    assert rig.response.replay is not None
    assert sum(map(len, rig.response.replay.chunks)) < FOLD_BYTES + 1024
    transcript = plain(rig.response.replay)
    assert (transcript.text, transcript.closed, transcript.why_not) == ("".join(WORDS * 400), True, "")


@pytest.mark.parametrize("sent", [EVENTS, EVENTS.replace(b'":', b'": ')], ids=["dense", "with spaces"])
def test_many_events_in_a_chunk_are_read_at_once(sent: bytes) -> None:
    transcript = Transcript(framed=True)
    transcript.read([chunk(sent)])
    with counted() as counts:
        transcript.read([chunk(sent * 200)])
    assert transcript.text == "".join(WORDS * 201)
    assert counts.total() < 40 * 200 * len(WORDS)


STRANGE = [
    event("?").replace(b'"content":"?"', other)
    for other in (b'"tool_calls":[{"index":0}]', b'"content":["a"]', b'"content":7')
]
STRANGE += [b'data: {"choices":[7]}\n\n', b'data: {"choices":{}}\n\n', b'data: {"choices":"x"}\n\n']
STRANGE += [b'data: {"choices":[{"delta":"x"}]}\n\n', b"data: 7\n\n", b"data: {\n\n"]


@pytest.mark.parametrize("other", STRANGE)
def test_what_is_no_text_is_noticed_wherever_it_stands(other: bytes) -> None:
    rig = Keeping()
    rig.feed([SSE_HEAD, *map(chunk, [*TOKENS, other, *TOKENS * 400])])
    assert rig.response.replay is not None
    assert plain(rig.response.replay).why_not or other == b'data: {"choices":{}}\n\n'
    assert not rig.bugs


def test_a_stream_that_shows_more_than_text_is_kept_no_longer() -> None:
    strange = event("").replace(b'"content":""', b'"reasoning_content":"hm"')
    rig = Keeping()
    rig.feed([SSE_HEAD, chunk(strange), *map(chunk, TOKENS * 400)])
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
    rig = Keeping()
    rig.feed([SSE_HEAD, chunk(TOKENS[0]), chunk(event("x" * 2 * TAIL_BYTES)[:-10])], close=True)
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


@pytest.mark.parametrize("text", ["[DONE]", "data: [DONE]", "data: [DONE]\n\n"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_a_model_says_of_the_end_is_not_the_end(text: str, whole: bool) -> None:
    rig = Keeping()
    rig.ways = OPEN if whole else 0
    rig.feed([SSE_HEAD, *map(chunk, [*TOKENS, event(text)]), LAST_CHUNK])
    assert [failure.kind for failure in rig.failures] == [FailureKind.TRUNCATED]


@pytest.mark.parametrize(
    "end", [DONE, b"data:[DONE]\r\n\r\n", b"data: [DONE]\r\r", b"data: [DONE]\n", b"data: [DONE]"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_the_end_is_known_however_it_is_written_and_framed(end: bytes, whole: bool) -> None:
    for at in range(len(end)):
        rig = Keeping()
        rig.ways = OPEN if whole else 0
        rig.feed(
            [
                SSE_HEAD,
                *map(chunk, TOKENS),
                *(chunk(part) for part in (end[:at], end[at:]) if part),
                LAST_CHUNK,
            ]
        )
        assert rig.ends == ["committed", "done"]


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
    transcript, events, folds = Transcript(), 1000, 60
    for _ in range(folds):
        transcript.read([event("word ") * events])
    assert len(transcript.shown.text._parts) <= 6
    assert transcript.text == "word " * folds * events
