"""What one unit's reply can make the gate do: linear in its bytes, bounded, and told for what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.reply import HEAD_BYTES
from tests.cost.bench import counted
from tests.unit.http.test_bounds import reads
from tests.wire.rig import Rig
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, chunk

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def fed(data: bytes) -> tuple[Rig, int]:
    """A relay that got this reply, and the bytecodes it took."""
    rig = Rig()
    with counted() as counts:
        rig.feed(reads(data))
    assert not rig.bugs
    return rig, counts.total()


def why(rig: Rig) -> str:
    """Why the reply was not taken, or not to its end."""
    (failure,) = rig.failures
    assert failure.kind is FailureKind.GARBAGE
    assert rig.wire.closed
    return failure.message


FLOODS: dict[str, tuple[Callable[[int], bytes], str]] = {
    "lines": (lambda n: HEAD + b"a:\r\n" * n + b"\r\n", "more than 128 lines"),
    "upgrades": (lambda n: HEAD + b"upgrade: x\r\n" * n + b"\r\n", "more than 128 lines"),
    "codings": (lambda n: HEAD + b"transfer-encoding: x\r\n" * (n // 4) + b"\r\n", "more than 128 lines"),
    "tokens": (lambda n: HEAD + b"connection: " + b"a," * n + b"\r\n\r\n", "names more than 16 headers"),
    "interim": (lambda n: b"HTTP/1.1 103 Early Hints\r\n\r\n" * n, "larger than 65536 bytes"),
    "interim lines": (lambda n: b"HTTP/1.1 103 A\r\n" + b"a:\r\n" * n + b"\r\n", "more than 128 lines"),
    "a line": (lambda n: HEAD + b"a: " + b"b" * 20 * n, "larger than 65536 bytes"),
    "trailers": (lambda n: CHUNKED + chunk(b"{}") + b"0\r\n" + b"a: bcdefg\r\n" * 4 * n, "of trailers"),
    "an extension": (lambda n: CHUNKED + chunk(b"{}") + b"1;" + b"e" * 60 * n, "chunk extensions"),
}


@pytest.mark.parametrize(("flood", "told"), FLOODS.values(), ids=FLOODS)
def test_a_flood_is_linear_and_told_for_what_it_is(flood: Callable[[int], bytes], told: str) -> None:
    (once, work), (twice, double) = fed(flood(8_000)), fed(flood(16_000))
    assert told in why(once)
    assert told in why(twice)
    assert double <= 2.2 * work + 1000


def test_a_head_of_60_kb_in_as_many_lines_as_are_allowed_passes() -> None:
    lines = b"".join(b"x-%d: %b\r\n" % (n, b"y" * 480) for n in range(LIMITS.header_lines - 3))
    rig, _ = fed(HEAD + lines + b"content-length: 2\r\n\r\n{}")
    assert len(lines) > 60_000
    assert rig.ends == ["committed", "done"]
    assert rig.reply().get("x-7") == "y" * 480


def test_one_line_more_than_allowed_is_counted_by_its_name() -> None:
    before = REACHED["header_lines"]
    for lines, ends in (
        (LIMITS.header_lines - 2, ["committed", "done"]),
        (LIMITS.header_lines - 1, ["failed"]),
    ):
        rig, _ = fed(HEAD + b"a: b\r\n" * lines + b"content-length: 2\r\n\r\n{}")
        assert rig.ends == ends
    assert REACHED["header_lines"] == before + 1


def test_a_long_stream_whose_size_lines_come_by_themselves_is_no_flood() -> None:
    rig = Rig()
    rig.feed([SSE_HEAD, b"9\r\n", b"data: a\n\n\r\n"])
    rig.send = lambda data: None  # type: ignore[method-assign]
    tokens = HEAD_BYTES // len(b"9\r\n") + 100
    for _ in range(tokens):
        rig.feed([b"9\r\n", b"data: a\n\n\r\n"])
    rig.feed([LAST_CHUNK])
    assert rig.ends == ["committed", "done"]
