"""Damaged, split and coalesced HTTP on both sides of the gate.

Whatever comes, the client gets replies that are whole, or a cut that it can tell; never an exception, never a
hang, never a byte of another request; and nothing is left behind. FUZZ_EXAMPLES=N tries N random examples of
each, and shrinks what fails, instead of the same few every time.
"""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cellgate.proxy.config.settings import Limits, Timeouts
from cellgate.proxy.http.sse import before_error, is_error, without_comments
from cellgate.proxy.observe.access_log import Finished
from cellgate.router.nouns import Outcome
from cellgate.router.opinions import Kind, Opinions
from tests.sim import world
from tests.wire.client import Client, chat, get, post
from tests.wire.noise import CUTS, DAMAGES, WORDS, Cuts, Damage, damaged
from tests.wire.replies import Reply, replies
from tests.wire.rig import Rig
from tests.wire.stage import Stage, stage
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, Received, chunk, whole

_ASKED = os.environ.get("FUZZ_EXAMPLES")


def fuzz(examples: int) -> settings:
    """So many examples, the same in every run; or as many as were asked for, new in every run."""
    return settings(
        max_examples=int(_ASKED or examples),
        derandomize=_ASKED is None,
        database=None,
        deadline=None,
        phases=[Phase.generate] if _ASKED is None else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


# One relay: any stream, any chunks, any reads

EVENTS = st.sampled_from(
    [
        b"data: a\n\n",
        b"data: a\ndata: b\n\n",
        b"event: x\ndata: c\n\n",
        b": ping\n\n",
        b"event: alone\n\n",
        b"data: a\r\n\r\n",
        b"\r\ndata: a\n\n",
        b"data: a\r\r",
        b"data\n\n",
        b"data: a\n\r\n",
        b": ping\r\n\r\n",
        b'data: {"error": {"message": "x"}}\n\n',
        b"data: " + b"x" * 17_000 + b"\n\n",
        b"data: [DONE]\n\n",
    ]
)
FRAMINGS = st.sampled_from(["chunks", "trailers", "length", "close"])


class Stream(NamedTuple):
    """An event stream, how it is framed and cut, and what the client must be shown of it."""

    sent: bytes
    shown: bytes
    close: bool


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    events = draw(st.lists(EVENTS, max_size=8))
    body = b"".join(events) + draw(st.sampled_from([b"", b"", b"data: unfin"]))
    while events and b"data" not in events[0]:
        events.pop(0)
    framing = draw(FRAMINGS)
    head = SSE_HEAD.removesuffix(b"Transfer-Encoding: chunked\r\n\r\n")
    if framing == "length":
        sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif framing == "close":
        sent = head + b"\r\n" + body
    else:
        end = LAST_CHUNK if framing == "chunks" else b"0\r\nX-A: 1\r\nX-Total-Time: 0\r\n\r\n"
        sent = SSE_HEAD + b"".join(map(chunk, draw(CUTS).pieces(body))) + end
    unfinished = b"data: unfin" if body.endswith(b"unfin") else b""
    shown = (b"".join(events) + unfinished).lstrip(b"\r\n") if events else b""
    return Stream(sent, shown, framing == "close")


@fuzz(400)
@given(streams(), CUTS, st.booleans())
def test_any_stream_in_any_chunks_and_reads_is_shown_byte_for_byte(
    stream: Stream, cuts: Cuts, http10: bool
) -> None:
    rig = Rig(http10=http10)
    rig.feed(cuts.pieces(stream.sent), close=stream.close)
    assert not rig.bugs
    if "failed" in rig.ends:
        # There must be a reason, an error or no event at all, and nothing may have been shown but what came
        # before.
        if rig.ends == ["failed"]:
            assert rig.shown == b""
            assert not stream.shown or is_error(stream.shown)
        else:
            assert rig.ends == ["committed", "failed"]
            # The empty line behind an event that was shown in part may be missing.
            body, good = rig.body(), before_error(stream.shown)
            assert good != stream.shown
            assert body.rstrip(b"\r\n") == good.rstrip(b"\r\n")
            assert good.startswith(body)
        return
    reply = rig.reply()
    assert (reply.body, reply.whole, rig.ends) == (stream.shown, True, ["committed", "done"])
    framed = not http10 and stream.sent.endswith(b"X-Total-Time: 0\r\n\r\n")
    # The other one is not on the list of what clients get.
    assert reply.trailers == ([("x-total-time", "0")] if framed else [])


REPLIES = [
    whole(b'{"a": 1}'),
    SSE_HEAD + chunk(b"data: a\n\n") + chunk(b"data: b\n\n") + LAST_CHUNK,
    SSE_HEAD + b"".join(chunk(b'data: {"id":%d}\n\n' % n) for n in range(4)) + LAST_CHUNK,
    SSE_HEAD + chunk(b": ping\n\ndata: a\n\ndat") + chunk(b"a: b\n\n") + b"0\r\nX-A: b\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"{}") * 3 + LAST_CHUNK,
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: a\n\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"{}"),
]


@fuzz(450)
@given(st.sampled_from(REPLIES), DAMAGES, st.sampled_from([b"", *WORDS, *REPLIES]), CUTS, st.booleans())
def test_a_damaged_reply_is_shown_for_what_it_is_or_not_at_all(
    reply: bytes, damages: list[Damage], more: bytes, cuts: Cuts, http10: bool
) -> None:
    rig = Rig(http10=http10)
    sent = damaged(reply, damages) + more
    rig.feed(cuts.pieces(sent), close=True)
    assert not rig.bugs
    assert rig.ends in (["failed"], ["committed", "failed"], ["committed", "done"])
    if "committed" not in rig.ends:
        assert rig.shown == b""
        return
    shown = rig.reply()
    if rig.ends[-1] == "done":
        assert shown.whole
        assert (shown.status, shown.body) == taken_strictly(sent)


def taken_strictly(sent: bytes) -> tuple[int, bytes]:
    """Status and body of a unit's reply as a strict client reads it, without what the gate drops."""
    (reply,) = replies(sent, ["POST"], of_unit=True)
    assert reply.whole
    is_stream = (reply.all("content-type") or [""])[-1].startswith("text/event-stream")
    return reply.status, without_comments(reply.body) if is_stream and reply.status == 200 else reply.body


# The whole gate, in virtual time

QUICK = Limits(head_timeout_s=5.0, body_timeout_s=5.0, idle_timeout_s=5.0, head_bytes=4096, body_bytes=65536)
HASTE = Timeouts(connect_s=5.0, head_hold_s=2.0, answer_s=10.0)
LONG_S = 200.0
"""By then every timeout of a request has struck more than once."""
IDLE_S = 30.0
"""By then every connection that carries nothing is closed."""

REQUESTS = [
    chat(),
    chat(stream=False),
    chat(pad="x" * 20_000),
    chat(head="Expect: 100-continue\r\n"),
    chat(head="Connection: close\r\n"),
    chat().replace(b"HTTP/1.1", b"HTTP/1.0"),
    post(b'{"input": "x"}', path="/v1/embeddings"),
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b'{"prompt": ')
    + chunk(b'"x"}')
    + LAST_CHUNK,
    get("/v1/models"),
    get("/version"),
    get("/version", method="HEAD"),
    get("/custom?x=1"),
    get("/pause"),
]
FIELD = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


class Manner(NamedTuple):
    """How a unit answers one request: which reply, what is done to it, how it is written, what comes then.

    Of the reply a `share` is written.
    """

    template: str
    damages: list[Damage]
    share: float
    cuts: Cuts
    pause_s: float
    then: str


MANNERS = st.builds(
    Manner,
    template=st.sampled_from(
        [
            "stream",
            "stream",
            "odd",
            "plain",
            "chunked",
            "until close",
            "busy",
            "error",
            "first error",
            "interim",
        ]
    ),
    damages=st.one_of(st.just([]), DAMAGES),
    share=st.just(1.0) | st.floats(0.0, 1.0),
    cuts=CUTS,
    pause_s=st.sampled_from([0.0, 0.01, 3.0]),
    then=st.sampled_from(["stay", "stay", "stay", "close", "silence"]),
)


@dataclass
class Play:
    """Answers requests in the drawn manners, over and over; every answer tells whose it is."""

    manners: list[Manner]
    seen: list[Received] = field(default_factory=list)

    async def __call__(self, request: Received) -> None:
        manner = self.manners[len(self.seen) % len(self.manners)]
        self.seen.append(request)
        data = damaged(answer(request, manner.template), manner.damages)
        data = data[: int(len(data) * manner.share)]
        for piece in manner.cuts.pieces(data):
            request.write(piece)
            await asyncio.sleep(manner.pause_s)
        if manner.then == "silence":
            await asyncio.sleep(60.0)
        if manner.then != "stay" or manner.template == "until close":
            request.connection.close()


def answer(request: Received, template: str) -> bytes:
    """A good reply that carries the id of its request in its head and in each event."""
    identity = request.get("x-request-id") or ""
    head = f"HTTP/1.1 200 OK\r\nX-Echo: {identity}\r\nContent-Type: ".encode()
    event = f'data: {{"id": "{identity}"}}\n\n'.encode()
    body = event[6:-2]
    if request.method == "HEAD":
        return head + b"text/plain\r\nContent-Length: 9\r\n\r\n"
    sse = head + b"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return {
        "stream": sse + chunk(event) * 4 + LAST_CHUNK,
        "odd": sse + chunk(b": ping\n\n" + event[:20]) + chunk(event[20:] + event) + b"0\r\nX-A: b\r\n\r\n",
        "plain": head + b"application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        "chunked": head
        + b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(body)
        + LAST_CHUNK,
        "until close": head + b"text/event-stream\r\n\r\n" + event * 2,
        "busy": whole(b'{"error": {}}', "503 Busy"),
        "error": whole(b'{"error": {}}', "500 Oh"),
        "first error": sse + chunk(b'data: {"error": {"message": "x"}}\n\n') + LAST_CHUNK,
        "interim": b"HTTP/1.1 103 Early Hints\r\n\r\n" + sse + chunk(event) + LAST_CHUNK,
    }[template]


class Visit(NamedTuple):
    """What one client sends, and in which pieces."""

    requests: list[bytes]
    damages: list[Damage]
    cuts: Cuts
    pause_s: float
    leaves_after_s: float


VISITS = st.builds(
    Visit,
    requests=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4),
    damages=st.one_of(st.just([]), DAMAGES),
    cuts=CUTS,
    pause_s=st.sampled_from([0.0, 0.01, 4.0]),
    leaves_after_s=st.sampled_from([LONG_S, LONG_S, LONG_S, 0.05, 1.0]),
)


async def pay(client: Client, visit: Visit) -> tuple[bytes, bool]:
    """All that the client got, and whether it was the gate that closed."""
    data = damaged(b"".join(visit.requests), visit.damages)
    got = bytearray()

    async def read() -> None:
        with suppress(ConnectionError):
            while piece := await client.reader.read(65536):
                got.extend(piece)

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        for piece in visit.cuts.pieces(data):
            if not client.writer.is_closing():
                client.send(piece)
                await asyncio.sleep(visit.pause_s)
        await asyncio.wait([reading], timeout=visit.leaves_after_s)
        closed = reading.done()
        client.abort()
    return bytes(got), closed


@fuzz(180)
@given(
    st.lists(VISITS, min_size=1, max_size=3), st.lists(MANNERS, min_size=1, max_size=4), st.integers(0, 2**16)
)
def test_whatever_comes_from_both_sides_ends_well(
    visits: list[Visit], manners: list[Manner], seed: int
) -> None:
    world.run(world.World(seed), scenario(visits, manners))


async def scenario(visits: list[Visit], manners: list[Manner]) -> None:
    """The visits one after the other, so that the records tell which of them each reply belongs to."""
    plays = [Play(manners), Play(manners[::-1])]
    async with stage(*plays, limits=QUICK, timeouts=HASTE, pass_unlisted=True) as here:
        not_taken = seen_to_be_dropped(here.gateway.services.opinions)
        for visit in visits:
            before = len(here.records.kept)
            not_taken.clear()
            async with here.client() as client:
                got, closed = await pay(client, visit)
            await here.until_quiet()
            assert closed or visit.leaves_after_s < LONG_S, "the gate hangs"
            records = here.records.kept[before:]
            judge(got, records, here, left=not closed, alone=bool(not_taken))
        for play in plays:
            for request in play.seen:
                judge_request(request, {record.request_id for record in here.records.kept})
        await asyncio.sleep(IDLE_S)
        for state in here.plane.board:
            assert not here.gateway.services.pool(state).connections


def seen_to_be_dropped(opinions: Opinions) -> list[str]:
    """The units whose doubtful answers were shown because no other unit took the request, as they come."""
    units: list[str] = []
    drop = opinions.dropped

    def noted(unit: str, kind: Kind, payer: str = "", *, is_spent: bool = True) -> None:
        if not is_spent:
            units.append(unit)
        drop(unit, kind, payer, is_spent=is_spent)

    opinions.dropped = noted  # type: ignore[method-assign]
    return units


def judge(got: bytes, records: list[Finished], here: Stage, *, left: bool, alone: bool) -> None:
    """What a client got must be replies, each as its record tells, with nothing of another request's.
    `alone`: a doubtful answer was shown because no other unit took the request.
    """
    if left:
        # Where its own leaving cut it off is no matter; whose the bytes are is.
        others = {other.request_id for other in here.records.kept if other not in records} - {""}
        assert not any(other.encode() in got for other in others), "bytes of another client's request"
        return
    for reply, record in zip(replies(got, [record.method for record in records]), records, strict=False):
        others = {other.request_id for other in here.records.kept} - {record.request_id, ""}
        assert not any(other.encode() in text_of(reply) for other in others), "bytes of another request"
        assert reply.get("x-request-id") in (record.request_id, None)
        assert (reply.version, reply.status) == ("1.1", record.status)
        assert is_honest(reply, record, alone=alone), record


def is_honest(reply: Reply, record: Finished, *, alone: bool) -> bool:
    """Whether a reply is whole exactly when it should be."""
    outcome = record.outcome
    if outcome is Outcome.CLIENT_LEFT:
        return True
    if outcome is Outcome.OK or (reply.status >= 400 and outcome is not Outcome.TRUNCATED):
        return reply.whole
    if reply.chunks is None and reply.get("content-length") is None:
        # Delimited by close, and the simulated network has no way to reset a connection on purpose.
        return True
    # An engine may have told of its failure by itself, and then ended its stream in good order.
    has_told = b'data: {"error":' in reply.body
    if outcome is Outcome.UNIT_ERROR and reply.whole and (has_told or record.attempts > 1 or alone):
        # No answer under 200 that a client wanted, and no other unit had a better one: it is shown as it is.
        return has_told or b"data: " not in reply.body
    return not reply.whole or (outcome in (Outcome.STREAM_ERROR, Outcome.CLIENT_ERROR) and has_told)


def text_of(reply: Reply) -> bytes:
    """Head and body of a reply."""
    return b"\n".join([value.encode("latin-1") for _, value in reply.fields] + [reply.body])


def judge_request(request: Received, known: set[str]) -> None:
    """What reached a unit must be one plain request that a client made."""
    assert request.version == "HTTP/1.1"
    assert re.fullmatch(r"[A-Z]+", request.method)
    assert re.fullmatch(r"/[!-~]*", request.target)
    assert all(FIELD.fullmatch(name) for name, _ in request.fields), request.fields
    assert all("\r" not in value and "\n" not in value and "\0" not in value for _, value in request.fields)
    assert request.get("host")
    assert request.get("transfer-encoding") is None
    # Or it is one of the gate's own: a unit is asked again what it refused.
    assert request.get("x-request-id") in known or request.get("user-agent") == "cellgate"
    _ = request.get("content-length")
