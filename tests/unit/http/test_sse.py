"""Server-sent events as bytes, held against a slow reference: the algorithm of the specification.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cellgate.proxy.http.sse import (
    BOM,
    before_error,
    carries_data,
    end_of_events,
    extra_field,
    first_end,
    is_aborted,
    is_error,
    message_of,
    payload,
    split,
    without_comments,
)
from cellgate.proxy.resume.replay import EventFilter

# Whatever matters to the parser, in any order, with and without sense.
STREAMS = st.lists(
    st.sampled_from(
        [
            b"\n",
            b"\r\n",
            b"\r",
            b"data:",
            b"data: {}",
            b": ping",
            b"event: x",
            b"data",
            b"id: 1",
            b" ",
            b"x",
            b"\0",
        ]
    ),
    max_size=24,
).map(b"".join)
CUTS = st.lists(st.integers(0, 60), max_size=8)


class Event(NamedTuple):
    """What a client is given."""

    name: bytes
    data: bytes


def read(stream: bytes) -> list[Event]:
    """The events of a stream, as the specification has them read."""
    stream = stream.removeprefix(BOM)
    events, name, data = [], b"", b""
    # What follows the last line end is no line.
    for line in re.split(rb"\r\n|\n|\r", stream)[:-1]:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                events.append(Event(name or b"message", data.removesuffix(b"\n")))
            name, data = b"", b""
        elif field == b"data":
            data += value + b"\n"
        elif field == b"event":
            name = value
    return events


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` in pieces that end at `cuts`."""
    ends = sorted(min(cut, len(data)) for cut in cuts)
    return [data[one:two] for one, two in zip([0, *ends], [*ends, len(data)], strict=True)]


def is_boundary(data: bytes) -> bool:
    """Whether `data` ends with an empty line, or is none."""
    lines = re.split(rb"\r\n|\n|\r", data)
    return not data or (not lines[-1] and not lines[-2])


@given(STREAMS)
@example(b"data: x\r\n\r")
@example(b"data: x\r\r\n")
@example(b"data: x\n\r")
def test_the_end_of_events_is_the_last_empty_line(data: bytes) -> None:
    ends = [end for end in range(len(data) + 1) if is_boundary(data[:end])]
    # A CR at the end of what is looked at may yet be half a line end.
    within = [end for end in ends if data[end - 1 : end + 1] != b"\r\n"]
    assert end_of_events(data) == max(within)


@given(STREAMS, STREAMS)
def test_what_came_before_decides_whether_a_line_end_is_an_empty_line(one: bytes, two: bytes) -> None:
    start = end_of_events(one)
    before = one[-1:] if one[start:] else b"\n"
    whole = one[start:] + two
    assert max(0, end_of_events(whole) - len(one[start:])) == end_of_events(two, before)


@given(STREAMS, CUTS)
def test_however_a_stream_is_cut_its_events_are_the_same(data: bytes, cuts: list[int]) -> None:
    found, tail = [], b""
    for piece in pieces_of(data, cuts):
        events, tail = split(tail + piece)
        found += events
    assert b"".join(found) + tail == data
    assert [each for event in found if (each := payload(event)) is not None] == [e.data for e in read(data)]


@given(STREAMS)
def test_a_piece_that_is_split_off_holds_one_event_at_most(data: bytes) -> None:
    events, tail = split(data)
    assert b"".join(events) + tail == data
    assert all(is_boundary(event) and len(read(event)) <= 1 for event in events)
    assert not read(tail)
    if read(data) and data[:1] not in b"\r\n":
        assert len(events[0]) == first_end(data, b"\n")


ODD = st.text("\r\n\ndat:x", max_size=12).map(str.encode)
"""Bytes in which line ends and the name of the field come close together."""


@given(ODD, st.sampled_from([b"\n", b"\r", b"x"]))
@example(b"\n\r\n", b"\r")
@example(b"x\r\n\r\nx", b"x")
@example(b"\n", b"\n")
def test_the_first_end_is_behind_the_first_empty_line(data: bytes, before: bytes) -> None:
    match = re.search(rb"(?:\n|\r\n?+)(?:\n|\r\n?+)+", before + data)
    assert first_end(data, before) == (match.end() - 1 if match else 0)


@given(ODD)
def test_data_is_carried_by_a_line_of_that_name(data: bytes) -> None:
    lines = re.split(rb"\r\n|\n|\r", data)
    named = [line.startswith(b"data:") for line in lines] + [line == b"data" for line in lines[:-1]]
    assert carries_data(data) == any(named)


@given(STREAMS)
def test_only_whole_events_without_data_are_dropped(data: bytes) -> None:
    rest = without_comments(data)
    assert data.endswith(rest)
    assert read(rest) == read(data)
    events, _ = split(rest)
    assert not events or carries_data(events[0])


@given(STREAMS, CUTS)
@example(BOM + b"data: {}\n\n", [1, 2])
@example(b"data: {}\r\rdata: {}\r\r", [])
@example(
    BOM + b": hi\r\n\r\ndata: {\r\ndata:}\r\n\r\nevent: x\r\ndata: y\r\nid: 1\r\n\r\ndata\r\n\r\n\r\n",
    [7, 21],
)
def test_a_client_is_given_the_events_of_the_unit_however_these_arrive(data: bytes, cuts: list[int]) -> None:
    shown = passed(pieces_of(data, cuts))
    assert bool(shown) == carries_data(b"".join(split(data.removeprefix(BOM))[0]))
    assert not shown or read(shown) == read(data)


def passed(pieces: list[bytes]) -> bytes:
    """What goes on of these; nothing if no work was shown."""
    passage, shown, has_begun = EventFilter(), b"", False
    for at, piece in enumerate(pieces):
        ended = at == len(pieces) - 1
        if not has_begun:
            begun = passage.begin(piece, ended=ended)
            if not isinstance(begun, bytes):
                continue
            has_begun, piece = True, begun
        events, failure = passage.feed(piece, ended=ended)
        assert failure is None
        shown += events
    return shown


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (b"data: x\n\n", ""),
        (b"event: message\ndata: x\n\n", ""),
        (b"event\nretry: 5\n: id: x\ndata: event: y\n\n", ""),
        (b"data: x\revent: delta\r\r", "event"),
        (b"id\r\ndata: x\r\n\r\n", "id"),
    ],
)
def test_fields_that_make_an_event_another(event: bytes, name: str) -> None:
    assert extra_field(event) == name


ERRORS = [
    b'data: {"error": {"message": "x"}}\n\n',
    b'data:{"error":{"code":500}}\n\n',
    b'data: { "error" : "x"}\r\n\r\n',
    b'data: {"error": true}\n\n',
    b'event: error\ndata: {"type": "error"}\n\n',
    b"event:error\ndata: x\n\n",
    b'data: {\rdata: "error": 1}\r\r',
    b': ping\r\rdata: {"error": 1}\r\r',
    b'data: {"id": 1}\n\ndata: {"error": 1}\n\n',
    b': ping\n\ndata: {"error": 1}\n\n',
]
NO_ERRORS = [
    b'data: {"error": null}\n\n',
    b'data: {"error":null, "choices": []}\n\n',
    b'data: {"choices": [{"delta": {"content": "{\\"error\\": 1}"}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "data: {\\"error\\": 1}"}}]}\n\n',
    b'data: {"choices": [], "error": {}}\n\n',
    b"data: event: error\n\n",
    b": event: error\n\n",
    b"event: errors\n\n",
    b"data: [DONE]\n\n",
    b'data: x {"error": 1}\n\n',
    b"",
]


@pytest.mark.parametrize("event", ERRORS)
def test_events_that_report_an_engines_failure(event: bytes) -> None:
    assert is_error(event)
    assert carries_data(event)
    assert before_error(b"data: x\n\n" + event).startswith(b"data: x\n\n")


@pytest.mark.parametrize("event", NO_ERRORS)
def test_events_that_report_none(event: bytes) -> None:
    assert not is_error(event)


def test_the_message_is_the_first_line_of_the_error_shortened_and_printable() -> None:
    assert message_of(b': ping\n\ndata: {"error": "x"}\n\ndata: y\n\n') == 'data: {"error": "x"}'
    assert message_of(b'event: error\ndata: {"a": 1}\n\n') == "event: error"
    assert len(message_of(b'data: {"error": "' + b"x" * 1000 + b'"}\n\n')) == 200
    assert message_of(b'data: {"error": "\xff"}\n\n') == 'data: {"error": "�"}'


def test_an_answer_that_the_engine_aborted_is_told_from_text_about_it() -> None:
    aborted = b'data: {"id":"a","choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'
    quoted = b'data: {"id":"a","choices":[{"delta":{"content":"\\"finish_reason\\":\\"abort\\""}}]}\n\n'
    named = b'data: {"id":"a","choices":[{"delta":{"content":"abort"},"finish_reason":null}]}\n\n'
    assert is_aborted(aborted)
    assert is_aborted(aborted.replace(b'":', b'" : '))
    assert is_aborted(b'{"choices":[{"finish_reason":"abort","message":{}}]}')
    assert not is_aborted(quoted)
    assert not is_aborted(named)
    assert before_error(named + aborted + b"data: [DONE]\n\n") == named


@pytest.mark.parametrize("own", [b'{"finish_reason":"abort"}', b'{"stop_reason":null}'])
def test_what_an_answer_repeats_of_its_request_aborts_nothing(own: bytes) -> None:
    whole = b'{"object":"response","metadata":%b,"tools":[{"parameters":%b}]}' % (own, own)
    for event in (whole, b'event: response.created\ndata: {"response":%b}\n\n' % whole):
        assert not is_aborted(event)
        assert before_error(event) == event
