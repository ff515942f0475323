"""Signatures of what gates say in Redis: who may write there is not whom a gate believes.

A document of a gate ends with `"sig":"AT:MAC"`: when it was written, in us since 1970, and an HMAC of that,
of the key that it stands at and of the rest of it, by the secret of the fleet. Rules:
1. Where `must`, what has no such signature is not believed.
2. A replay is bounded: what is older than what was read at the same place counts as unsigned, and so does
   at first sight what is older than CLOCK_S, or that much newer. Written again unchanged it gets no younger.

In this order: `Signer`, `Sight`, `signer_of`.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import NamedTuple

from cellgate.proxy.config.settings import Settings, secret_of

CLOCK_S = 60.0
"""Clocks of gates may differ by so much."""
PLACES_MAX = 65_536
_MARK = b',"sig":"'
_MAC_BYTES = 32
_TAIL_MAX = 64


class Signer:
    """Of one gate. Without a `secret` nothing is signed; then, where `must`, nothing is believed either."""

    def __init__(
        self,
        secret: bytes,
        *,
        must: bool,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._secret = secret
        self.must = must
        self._now = now
        self._wall = wall
        self._last = 0
        self._sights: dict[str, Sight] = {}
        self.refused = 0
        """What was not believed."""

    @property
    def signs(self) -> bool:
        """Whether it has a secret."""
        return self._secret != b""

    def sign(self, place: str, document: bytes) -> bytes:
        """The document, an object in JSON, as it is to be written at a place."""
        if not self._secret:
            return document
        # Each is later than the one before, whatever the clock does, and whoever wrote that.
        known = self._sights.get(place)
        before = max(self._last, known.at if known is not None else 0)
        self._last = at = max(before + 1, int(1e6 * self._wall()))
        body = document[:-1]
        return b'%b,"sig":"%d:%b"}' % (body, at, self._mac(place, at, body))

    def believes(self, place: str, document: bytes, *, once: bool = False, age_s: float = CLOCK_S) -> bool:
        """Whether a gate of the fleet has written this at that place. `once`: it is read no second time
        there, as what a channel brings; `age_s`: as old it may be at first sight.
        """
        if not self.must:
            return True
        at = self._signed_at(place, document)
        known = self._sights.get(place)
        if (
            at is None
            or not self._is_of_now(at, known, age_s)
            or (once and known is not None and at <= known.at)
        ):
            self.refused += 1
            return False
        if known is None or at > known.at:
            if len(self._sights) >= PLACES_MAX:
                self._sights.clear()
            self._sights[place] = Sight(at, 0.0)
        return True

    @staticmethod
    def bare(document: bytes) -> bytes:
        """The document as it was before it was signed."""
        body, mark, tail = document.rpartition(_MARK)
        return body + b"}" if mark and len(tail) <= _TAIL_MAX + _MAC_BYTES else document

    def age_s(self, document: bytes) -> float:
        """How long ago a document that is believed was written, by its writer's clock."""
        at = document.rpartition(_MARK)[2].partition(b":")[0]
        return max(0.0, self._wall() - int(at) / 1e6) if at.isdigit() else 0.0

    def left_ms(self, place: str, pttl_ms: int) -> int:
        """How long what was just read at a place lives: written again unchanged, no longer than before."""
        if not self.must or (known := self._sights.get(place)) is None:
            return pttl_ms
        ends_at = self._now() + pttl_ms / 1000.0
        if not known.ends_at:
            self._sights[place] = Sight(known.at, ends_at)
            return pttl_ms
        return round(1000.0 * (min(known.ends_at, ends_at) - self._now()))

    def _is_of_now(self, at: int, known: Sight | None, age_s: float) -> bool:
        if known is not None and at <= known.at:
            return at == known.at
        age = self._wall() - at / 1e6
        return -CLOCK_S <= age <= age_s

    def _signed_at(self, place: str, document: bytes) -> int | None:
        """When it was written, if its signature is right."""
        body, mark, tail = document.rpartition(_MARK)
        if not mark or len(tail) > _TAIL_MAX + _MAC_BYTES or not self._secret:
            return None
        at, _, mac = tail.partition(b":")
        if not at.isdigit() or not mac.endswith(b'"}'):
            return None
        number = int(at)
        return number if hmac.compare_digest(mac[:-2], self._mac(place, number, body)) else None

    def _mac(self, place: str, at: int, body: bytes) -> bytes:
        text = b"%b\n%d\n%b" % (place.encode(), at, body)
        return hmac.digest(self._secret, text, "sha256")[:_MAC_BYTES].hex().encode()


class Sight(NamedTuple):
    """What was read last at one place: when it was written, as it says (us), and when it ends (`now`)."""

    at: int
    ends_at: float


UNSIGNED = Signer(b"", must=False)


def signer_of(settings: Settings, *, routes: bool) -> Signer:
    """That of a gate. A router believes nothing that is not signed: it sends requests where a document says.
    Other gates do so once there is a secret of the fleet.
    """
    return Signer(secret_of(settings), must=routes or settings.fleet_secret is not None)
