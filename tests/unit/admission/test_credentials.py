"""The key in a head."""

from __future__ import annotations

import pytest

from cellgate.proxy.admission.keys import take_credentials
from cellgate.proxy.http.heads import KEY_FIELDS, Fields
from cellgate.proxy.http.request import Request

SESSION = (b"x-session-id", b"s")


def request(*fields: tuple[bytes, bytes]) -> Request:
    """A request as it was read."""
    made = Request(0.0, [], [], [])
    made.routing = [field for field in fields if field[0] in KEY_FIELDS or field == SESSION]
    made.lines = [b"%b: %b\r\n" % field for field in fields]
    return made


@pytest.mark.parametrize(
    ("shown", "key"),
    [
        ([(b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"bearer  k ")], b"k"),
        ([(b"x-api-key", b"k")], b"k"),
        ([(b"api-key", b"k")], b"k"),
        ([(b"x-api-key", b"k"), (b"authorization", b"Bearer k")], b"k"),
        ([(b"x-api-key", b"k"), (b"authorization", b"Bearer other")], b""),
        ([(b"authorization", b"Basic k")], b""),
        ([(b"authorization", b"")], b""),
        ([], b""),
    ],
)
@pytest.mark.parametrize("more", [[], [SESSION]])
def test_it_is_taken_out_whatever_it_is(shown: Fields, more: Fields, key: bytes) -> None:
    read = request((b"accept", b"*/*"), *shown, *more)
    assert take_credentials(read) == key
    assert read.lines == request((b"accept", b"*/*"), *more).lines
    assert read.routing == more


def test_a_key_that_is_for_this_connection_alone_is_none() -> None:
    read = request((b"authorization", b"Bearer k"))
    read.lines.clear()
    assert take_credentials(read) == b""
