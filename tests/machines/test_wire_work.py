"""Shapes of heads and chunks that nobody named: a turn of the loop is bounded, and the work is linear.

FUZZ_EXAMPLES=N tries N random examples instead of the same few every time.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.cost.bench import counted
from tests.machines.test_wire_fuzz import fuzz
from tests.unit.http.test_bounds import TURN
from tests.wire.door import Door
from tests.wire.noise import CUTS, Cuts
from tests.wire.rig import Rig

A_BYTE = 40
"""Bytecodes: what the shortest requests take. Reads of single bytes take more, and count by themselves."""
A_READ = 6000
MOST = 100_000

NAMES = st.sampled_from(
    [b"a", b"x" * 300, b"connection", b"upgrade", b"host", b"x-forwarded-for", b"te", b"!#$%&'*+-.^_`|~"]
)
VALUES = st.sampled_from([b"", b"a", b"a," * 50, b"," * 400, b"upgrade", b"x" * 3000, b"close, te ,,"])
LINES = st.builds(lambda name, value: name + b": " + value + b"\r\n", NAMES, VALUES)
HEADS = st.builds(
    lambda lines, times: (b"".join(lines) * times)[:70_000].rpartition(b"\n")[0] + b"\n",
    st.lists(LINES, min_size=1, max_size=4),
    st.sampled_from([0, 1, 30, 400]),
)
CHUNKS = st.builds(
    lambda size, extension, zeros, times: (
        (zeros + b"%x" % size + extension + b"\r\n" + b"y" * size + b"\r\n") * times
    ),
    st.sampled_from([1, 2, 15, 400]),
    st.sampled_from([b"", b"", b";a", b";" + b"e" * 200]),
    st.sampled_from([b"", b"", b"0" * 8]),
    st.sampled_from([1, 50, 3000]),
)
BODIES = st.builds(
    lambda chunks, trailers: b"".join(chunks) + b"0\r\n" + trailers + b"\r\n",
    st.lists(CHUNKS, max_size=3),
    HEADS,
)
REQUESTS = st.one_of(
    st.builds(lambda head: b"GET /x HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n", HEADS),
    st.builds(
        lambda head, body: (
            b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n" + head + b"\r\n" + body
        ),
        st.just(b"") | HEADS,
        BODIES,
    ),
)
STREAMS = st.builds(
    lambda requests, times: b"".join(requests)[: MOST // times] * times,
    st.lists(REQUESTS, min_size=1, max_size=3),
    st.sampled_from([1, 1, 2, 500]),
)


@fuzz(120)
@given(STREAMS, CUTS | st.none())
def test_what_a_client_sends_costs_so_much_a_byte_and_no_turn_much(sent: bytes, cuts: Cuts | None) -> None:
    reads = [sent] if cuts is None else cuts.pieces(sent[:8000])
    door = Door()
    door.feed(reads)
    assert max(door.turns) <= TURN
    assert sum(door.turns) <= A_BYTE * sum(map(len, reads)) + A_READ * len(reads)
    assert door.client.is_idle() or door.failures or door.client.deadline < float("inf")


REPLIES = st.builds(
    lambda interim, times, kind, head, body: (
        (b"HTTP/1.1 103 Early Hints\r\n" + interim[: MOST // times] + b"\r\n") * times
        + b"HTTP/1.1 200 OK\r\nContent-Type: "
        + kind
        + b"\r\nTransfer-Encoding: chunked\r\n"
        + head
        + b"\r\n"
        + body
    ),
    HEADS,
    st.sampled_from([1, 1, 2, 5000]),
    st.sampled_from([b"application/json", b"text/event-stream"]),
    st.just(b"") | HEADS,
    BODIES,
).map(lambda data: data[:MOST])


@fuzz(120)
@given(REPLIES, CUTS)
def test_what_a_unit_sends_costs_so_much_a_byte(sent: bytes, cuts: Cuts) -> None:
    rig = Rig()
    reads = cuts.pieces(sent)
    with counted() as counts:
        rig.feed(reads, close=True)
    assert counts.total() <= A_BYTE * len(sent) + A_READ * len(reads)
    assert not rig.bugs
    assert rig.ends in (["failed"], ["committed", "failed"], ["committed", "done"])
