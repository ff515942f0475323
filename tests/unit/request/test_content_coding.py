"""Compressed bodies become what they were, in pieces of bounded size; what is damaged is told as such."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.content_coding import DamagedError, pieces

zstd: Any = pytest.importorskip("backports.zstd")


def raw(body: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(body) + coder.flush()


CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate without a frame": raw,
    "zstd": zstd.compress,
}
bodies = st.one_of(
    st.binary(max_size=100_000),
    st.tuples(st.binary(max_size=9), st.integers(0, 50_000)).map(lambda t: t[0] * t[1]),
)


@pytest.mark.parametrize("name", CODERS)
@given(bodies)
def test_what_was_compressed_is_what_it_was(name: str, body: bytes) -> None:
    found = list(pieces(name.split(" ")[0], CODERS[name](body)))
    assert b"".join(found) == body
    assert max(map(len, found), default=0) <= LIMITS.decoded_piece_bytes


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_several_members_are_one_body(name: str) -> None:
    whole = CODERS[name](b"a" * 100_000) + CODERS[name](b"") + CODERS[name](b"b")
    assert b"".join(pieces(name, whole)) == b"a" * 100_000 + b"b"


@pytest.mark.parametrize("name", CODERS)
@given(st.binary(max_size=50))
def test_what_is_damaged_or_cut_off_is_told(name: str, noise: bytes) -> None:
    whole = CODERS[name](bytes(range(256)) * 9)
    told = noise + whole if noise and name != "deflate without a frame" else whole[: len(whole) // 2]
    for damaged in (whole[:-1], told, whole + b"\xff\xff"):
        with pytest.raises(DamagedError):
            list(pieces(name.split(" ")[0], damaged))


def test_a_frame_that_needs_much_memory_is_refused() -> None:
    options = {int(zstd.CompressionParameter.window_log): 27}
    coder = zstd.ZstdCompressor(options=options)
    with pytest.raises(DamagedError):
        list(pieces("zstd", coder.compress(b"x" * 9_000_000) + coder.flush()))
