"""Signatures in Redis: what a writer there that is no gate of the fleet can have believed."""

from __future__ import annotations

import orjson
import pytest

from cellgate.extras.redis_client.signing import CLOCK_S, PLACES_MAX, Signer

SECRET, PLACE, DOCUMENT = b"a secret of the fleet", "cellgate:unit:u:g", b'{"v":1,"unit":"u"}'


class Clock:
    """Of a gate: both of its clocks."""

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def __call__(self) -> float:
        return self.at


def signer(clock: Clock, secret: bytes = SECRET, *, must: bool = True) -> Signer:
    return Signer(secret, must=must, now=clock, wall=clock)


def test_what_a_gate_of_the_fleet_has_written_is_believed_and_still_json() -> None:
    clock = Clock()
    written = signer(clock).sign(PLACE, DOCUMENT)
    assert signer(clock).believes(PLACE, written)
    assert orjson.loads(written)["unit"] == "u"
    assert Signer(b"", must=False).sign(PLACE, DOCUMENT) == DOCUMENT


@pytest.mark.parametrize(
    "lie",
    [
        DOCUMENT,
        b"",
        DOCUMENT[:-1] + b',"sig":"1:00"}',
        DOCUMENT[:-1] + b',"sig":"' + b"9" * 10_000 + b'"}',
        signer(Clock(), b"another").sign(PLACE, DOCUMENT),
        signer(Clock(), b"").sign(PLACE, DOCUMENT),
        signer(Clock()).sign("cellgate:unit:v:g", DOCUMENT),
        signer(Clock()).sign(PLACE, DOCUMENT).replace(b'"u"', b'"w"'),
        signer(Clock()).sign(PLACE, DOCUMENT).replace(b'"sig":"1', b'"sig":"2'),
    ],
)
def test_what_was_not_signed_for_this_place_is_not_believed(lie: bytes) -> None:
    here = signer(Clock())
    assert not here.believes(PLACE, lie)
    assert here.refused == 1
    assert not Signer(b"", must=True).believes(PLACE, lie), "a router without a secret believes nobody"


def test_a_replay_brings_back_nothing_old_and_keeps_nothing_alive() -> None:
    clock = Clock()
    gate, reader = signer(clock), signer(clock)
    old, new = gate.sign(PLACE, DOCUMENT), gate.sign(PLACE, DOCUMENT)
    assert reader.believes(PLACE, new)
    assert reader.left_ms(PLACE, 750) == 750
    assert not reader.believes(PLACE, old)
    clock.at += 0.5
    # Somebody writes it again, with a new time to live.
    assert reader.believes(PLACE, new)
    assert reader.left_ms(PLACE, 750) == 250
    assert not reader.believes(PLACE, new, once=True), "a flip is told once"
    clock.at += CLOCK_S
    assert not signer(clock).believes(PLACE, new), "nor to a gate that has just started"
    ahead = Clock()
    ahead.at = clock.at + CLOCK_S + 1.0
    assert not reader.believes(PLACE, signer(ahead).sign(PLACE, DOCUMENT))


def test_what_is_kept_of_places_is_bounded() -> None:
    clock = Clock()
    gate, reader = signer(clock), signer(clock)
    for number in range(PLACES_MAX + 2):
        assert reader.believes(f"unit:{number}", gate.sign(f"unit:{number}", DOCUMENT))
    assert len(reader._sights) == 2
