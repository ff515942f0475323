"""The door: finds the key of each request, and watches over those in flight.

Keys are looked up by their SHA-256. That takes as long for a wrong key as for a right one as far as anybody
can use it: how far a comparison of digests gets says nothing about the key, because nobody can choose a key
by its digest.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Protocol

from cellgate.proxy.config.keys import Key, KeyRing
from cellgate.proxy.doors.admission import KeyAdmission
from cellgate.proxy.doors.bill import Accounts
from cellgate.proxy.doors.credentials import take_credentials
from cellgate.proxy.doors.habits import Habits
from cellgate.proxy.request.door import Visitor
from cellgate.proxy.wire.failure import Failure, FailureKind

_CHALLENGE = b"www-authenticate: Bearer\r\n"
"""A 401 must have one (RFC 9110, 15.5.2)."""


class TokenVerifier(Protocol):
    """Who knows the bearers of JWTs."""

    def key(self, token: bytes, digest: bytes, ring: KeyRing) -> Key | None:
        """The key that a token stands for; None: it is none that counts."""

    def start(self) -> None: ...
    async def close(self) -> None: ...


class KeyDoor:
    """The door of one process. `accounts` get what requests use; `ends_streams`: a request in flight ends
    when its key is revoked or expires. `tokens` are asked about what is in no file.
    """

    def __init__(
        self,
        accounts: Accounts,
        wall: Callable[[], float],
        *,
        ends_streams: bool,
        tokens: TokenVerifier | None = None,
    ) -> None:
        self.accounts = accounts
        self.in_flight: dict[KeyAdmission, None] = {}
        """Requests that were charged."""
        self._wall = wall
        self._ends_streams = ends_streams
        self._tokens = tokens
        self._ring = KeyRing()
        self._habits: dict[tuple[str, str], Habits] = {}

    def take(self, ring: KeyRing) -> None:
        """These keys hold from now on."""
        self._ring = ring
        known = {(key.name, key.tenant.name) for key in ring.keys.values()}
        known |= {("", tenant) for tenant in ring.tenants}
        self._habits = {who: self._habits.get(who) or Habits() for who in known}

    def start(self) -> None:
        """Begin to follow what is behind tokens, until `close`."""
        if self._tokens is not None:
            self._tokens.start()

    async def close(self) -> None:
        """End."""
        if self._tokens is not None:
            await self._tokens.close()

    def identify(self, visitor: Visitor) -> KeyAdmission | Failure:
        """What the key of a request allows, or why it does not count."""
        shown = take_credentials(visitor.request)
        if not shown:
            message = "no API key: send one, as Authorization: Bearer KEY, or as x-api-key: KEY"
            return Failure(FailureKind.BAD_KEY, message, lines=_CHALLENGE)
        digest = sha256(shown).digest()
        at = self._wall()
        key = self._ring.keys.get(digest)
        if key is None and self._tokens is not None:
            key = self._tokens.key(shown, digest, self._ring)
        if key is None:
            message = "this API key is not known here; ask the operator for one"
            return Failure(FailureKind.BAD_KEY, message, lines=_CHALLENGE)
        if key.expires_at <= at:
            message = "this API key has expired; ask the operator for another one"
            return Failure(FailureKind.KEY_EXPIRED, message, lines=_CHALLENGE)
        return KeyAdmission(self, digest, key, visitor, self._habits[key.name, key.tenant.name], at)

    def tick(self, _now: float) -> None:
        """A few times a second: account for the answers that come, and end those whose key counts no more."""
        at = self._wall()
        for admission in list(self.in_flight):
            admission.spend()
            if self._ends_streams and not self._counts(admission, at):
                message = "the API key of this request was revoked, or has expired"
                admission.visitor.stop(Failure(FailureKind.KEY_REVOKED, message))

    def _counts(self, admission: KeyAdmission, at: float) -> bool:
        """Whether the key of a request in flight still counts."""
        key = admission.key
        if not key.name:
            return key.tenant.name in self._ring.tenants and key.expires_at > at
        present = self._ring.keys.get(admission.digest)
        return present is not None and present.expires_at > at
