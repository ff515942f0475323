"""The bodies of a split request, as SGLang's engines take them. Pure.

Wire format: `bootstrap_host`, `bootstrap_port` and `bootstrap_room` in any request for generation, SGLang 0.4
to 0.5.23 (its PD disaggregation). Both engines get the same request at the same time. They meet in the room,
at the prefiller's bootstrap server; the blocks and the first token go from there to the decoder, which
answers. Engines do not check whose blocks come to a room, so that a room is for one attempt of one request:
it exists only inside a Rendezvous, which is made with a new one each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from urllib.parse import urlsplit

import orjson

from cellgate.router.nouns import Unit

_ROOM_BITS = 62
"""Rooms have 63 bits. A request for several answers takes as many rooms in a row."""
_STRIPPED: Mapping[str, str | int | None] = {
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "disagg_prefill_dp_rank": None,
}
_OF_PAIRS = (b"x-override-", b"x-data-parallel-rank:")
"""Header lines with which a client could choose a room, or a rank that the room does not lead to."""


class Rendezvous:
    """Where the two engines of one attempt meet. `body` is what the prefiller gets."""

    __slots__ = ("body", "is_spent")

    def __init__(self, body: bytes, prefiller: Unit, rng: Random) -> None:
        # Room 0 is that of probes.
        place: Mapping[str, str | int | None] = {
            "bootstrap_host": urlsplit(prefiller.url).hostname,
            "bootstrap_port": prefiller.bootstrap_port,
            "bootstrap_room": 1 + rng.getrandbits(_ROOM_BITS),
        }
        self.body = with_fields(body, {**_STRIPPED, **place})
        self.is_spent = False

    def spend(self) -> bytes:
        """The decoder's body. Raises RuntimeError the second time: nobody comes to the room again."""
        if self.is_spent:
            raise RuntimeError("a room was used twice")
        self.is_spent = True
        return self.body


def stripped(body: bytes) -> bytes:
    """The JSON object without a room of its client."""
    return with_fields(body, _STRIPPED)


def own_lines(lines: list[bytes]) -> list[bytes]:
    """The header lines of a client, without those that belong to pairs."""
    return [line for line in lines if not line.startswith(_OF_PAIRS)]


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """The JSON object with these fields: of two with one name, engines take the last."""
    bare = body.rstrip()[:-1].rstrip()
    comma = b"" if bare.endswith(b"{") else b","
    return bare + comma + orjson.dumps(fields)[1:]
