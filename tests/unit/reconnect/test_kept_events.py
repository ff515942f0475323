"""Events of a stream whose client may come back: numbered, kept, and given again from any of them on."""

from __future__ import annotations

from random import Random

import pytest

from cellgate.proxy.extras.reconnect import EventId, KeptEvents, read_id
from cellgate.proxy.http.reply import CHUNKED, LAST_CHUNK, unframed
from cellgate.proxy.http.sse import payload, split

STEM = b"0.AAAAAAAAAAAAAAAAAAAAAA."
LINE_ENDS = (b"\n", b"\r\n", b"\r")


def _stream(rng: Random) -> tuple[bytes, list[bytes]]:
    """A stream with comments, names, ids of its own and any line ends; and the data of its events."""
    stream, data = b"", []
    for number in range(rng.randrange(1, 30)):
        end = rng.choice(LINE_ENDS)
        if rng.random() < 0.2:
            stream += b": a comment" + 2 * end
            continue
        data.append(b'{"n": %d, "text": "%b"}' % (number, rng.choice((b"", b"x", b"id: 3", b"data:"))))
        named = b"event: message_start" + end if rng.random() < 0.3 else b""
        owned = b"id: 77" + end if rng.random() < 0.2 else b""
        stream += named + owned + b"data: " + data[-1] + 2 * end
    return stream, data


@pytest.mark.parametrize("seed", range(200))
def test_cut_anywhere_each_event_comes_once_with_its_number_last(seed: int) -> None:
    rng = Random(seed)
    stream, data = _stream(rng)
    kept, out, at = KeptEvents(STEM, 1 << 20), b"", 0
    while at < len(stream):
        size = rng.choice((1, 2, 7, 60))
        out += kept.add(stream[at : at + size])
        at += size
    out += kept.flush()
    events = [event for event in split(out)[0] if payload(event) is not None]
    assert [payload(event) for event in events] == data
    ids = [[line for line in event.splitlines() if line.startswith(b"id:")][-1] for event in events]
    assert ids == [b"id: %b%d" % (STEM, number) for number in range(1, len(data) + 1)]
    number = rng.randrange(len(data) + 1)
    again = kept.after(number)
    assert again is not None
    assert [payload(event) for event in split(again)[0]] == data[number:]


def test_the_oldest_are_dropped_and_who_needs_them_gets_none() -> None:
    kept = KeptEvents(STEM, 200)
    for number in range(20):
        kept.add(b"data: %d\n\n" % number)
    assert kept.size <= 200
    assert kept.after(0) is None
    assert kept.after(21) is None
    assert kept.after(20) == b""
    assert kept.after(19) == b"data: 19\nid: %b20\n\n" % STEM


@pytest.mark.parametrize(
    ("value", "known"),
    [
        (STEM + b"12", EventId(0, STEM[2:-1], 12)),
        (b"12", None),
        (STEM, None),
        (STEM + b"-1", None),
        (b"0.short.1", None),
        (STEM + b"1\r\nx: y", None),
        (b"", None),
    ],
)
def test_an_id_is_read_or_is_none(value: bytes, known: EventId | None) -> None:
    assert read_id(value) == known


def test_chunks_are_undone() -> None:
    assert unframed(CHUNKED.frame(b"one") + CHUNKED.frame(b"two")) == (b"onetwo", False)
    assert unframed(CHUNKED.frame(b"a\r\n") + LAST_CHUNK) == (b"a\r\n", True)
    assert unframed(b"3;ext=1\r\none\r\n") == (b"one", False)
