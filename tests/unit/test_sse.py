"""Server-sent events as bytes, held against a slow reference that goes line by line."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.stream.sse import carries_data, end_of_events, is_error, message_of, without_comments

# Whatever matters to the parser, in any order, with and without sense.
STREAMS = st.lists(
    st.sampled_from(
        [b"\n", b"\r\n", b"\r", b"data:", b"data: {}", b": ping", b"event: x", b"data", b" ", b"x"]
    ),
    max_size=24,
).map(b"".join)


def lines_of(data: bytes) -> list[tuple[int, bytes]]:
    """The complete lines, without their LF or CRLF, each with the offset behind it."""
    lines, start = [], 0
    while (at := data.find(b"\n", start)) >= 0:
        lines.append((at + 1, data[start:at].removesuffix(b"\r")))
        start = at + 1
    return lines


def ends_of_events(data: bytes) -> list[int]:
    """The offsets behind all empty lines that follow another line: where events end."""
    lines = lines_of(data)
    return [end for (end, line), _ in zip(lines[1:], lines, strict=False) if not line]


@given(STREAMS)
def test_the_end_of_events_is_always_the_end_of_an_event(data: bytes) -> None:
    end = end_of_events(data)
    assert end == 0 or end in ends_of_events(data)


@given(STREAMS, st.sampled_from([b"\n", b"\r\n"]))
def test_the_last_event_is_found_where_all_lines_end_alike(data: bytes, ending: bytes) -> None:
    data = re.sub(rb"\r\n|\r|\n", ending, data)
    assert end_of_events(data) == max(ends_of_events(data), default=0)


@given(STREAMS)
def test_data_lines_are_those_that_begin_with_data(data: bytes) -> None:
    lines = data.split(b"\n")
    assert carries_data(data) is any(line.startswith(b"data:") for line in lines)


@given(STREAMS)
def test_only_whole_events_without_data_are_dropped(data: bytes) -> None:
    rest = without_comments(data)
    dropped = data.removesuffix(rest) if rest else data
    assert dropped + rest == data
    assert not dropped or len(dropped) in ends_of_events(data)
    assert not carries_data(dropped)
    first = re.search(rb"\r?\n\r?\n", rest)
    assert first is None or carries_data(rest[: first.end()])


@given(STREAMS, st.data())
def test_comments_are_dropped_alike_however_the_stream_arrives(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data)))
    assert without_comments(without_comments(data[:at]) + data[at:]) == without_comments(data)


ERRORS = [
    b'data: {"error": {"message": "x"}}\n\n',
    b'data:{"error":{"code":500}}\n\n',
    b'data: { "error" : "x"}\r\n\r\n',
    b'data: {"error": true}\n\n',
    b'event: error\ndata: {"type": "error"}\n\n',
    b"event:error\ndata: x\n\n",
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
    b"",
]


@pytest.mark.parametrize("event", ERRORS)
def test_events_that_report_an_engines_failure(event: bytes) -> None:
    assert is_error(event)
    assert carries_data(event)


@pytest.mark.parametrize("event", NO_ERRORS)
def test_events_that_report_none(event: bytes) -> None:
    assert not is_error(event)


def test_the_message_is_the_first_line_of_the_error_shortened_and_printable() -> None:
    assert message_of(b': ping\n\ndata: {"error": "x"}\n\ndata: y\n\n') == 'data: {"error": "x"}'
    assert message_of(b'event: error\ndata: {"a": 1}\n\n') == "event: error"
    assert len(message_of(b'data: {"error": "' + b"x" * 1000 + b'"}\n\n')) == 200
    assert message_of(b'data: {"error": "\xff"}\n\n') == 'data: {"error": "�"}'
