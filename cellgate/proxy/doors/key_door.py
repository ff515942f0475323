"""The door: finds the key of each request, and watches over those in flight.

Keys are looked up by their SHA-256. That takes as long for a wrong key as for a right one as far as anybody
can use it: how far a comparison of digests gets says nothing about the key, because nobody can choose a key
by its digest.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.config.keys import Key, KeyRing
from cellgate.proxy.doors.admission import KeyAdmission
from cellgate.proxy.doors.bill import Accounts
from cellgate.proxy.doors.credentials import shown_credentials, take_credentials
from cellgate.proxy.doors.habits import Habits
from cellgate.proxy.doors.meters import Period
from cellgate.proxy.request.door import OPEN_ROUTES, Visitor
from cellgate.proxy.request.routes import find_route
from cellgate.proxy.wire.failure import Failure, FailureKind

if TYPE_CHECKING:
    from cellgate.proxy.wire.request import Request

SHUT_S = 1.0
"""So long a key is refused at once when a limit of it had nothing left: some may be given back."""
_OPEN: tuple[float, Failure | None] = (0.0, None)
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
        self._shut: dict[tuple[str, str], tuple[float, Failure]] = {}
        """By key and tenant: until when nothing is left of a limit, and what its clients get."""
        self._habits: dict[tuple[str, str], Habits] = {}

    def take(self, ring: KeyRing) -> None:
        """These keys hold from now on."""
        self._ring = ring
        self._shut.clear()
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
        if self._shut and (refusal := self.refusal(key)) is not None:
            self.accounts.refused(key.tenant.name, refusal.used_up)
            return refusal
        return KeyAdmission(self, digest, key, visitor, self._habits[key.name, key.tenant.name], at)

    def shut(self, key: Key, refusal: Failure) -> None:
        """A limit of this key has nothing left: before the next request is read, it is refused."""
        at = self._wall()
        # What is used up of a minute is there again when the next one begins.
        until = min(at + SHUT_S, Period.MINUTE.window(at)[1])
        self._shut[key.name, key.tenant.name] = until, refusal

    def refusal(self, key: Key) -> Failure | None:
        """Why a request of this key is refused at once."""
        until, refusal = self._shut.get((key.name, key.tenant.name), _OPEN)
        return refusal if self._wall() < until else None

    def turns_away(self, request: Request) -> Failure | None:
        """Why a request whose body is still to come is refused. What needs a look elsewhere is not."""
        if not self._shut or find_route(request.path).name in OPEN_ROUTES:
            return None
        key = self._ring.keys.get(sha256(shown_credentials(request)).digest())
        refusal = None if key is None else self.refusal(key)
        if key is not None and refusal is not None:
            self.accounts.refused(key.tenant.name, refusal.used_up)
        return refusal

    def tick(self, _now: float) -> None:
        """A few times a second: account for the answers that come, and end those whose key counts no more."""
        at = self._wall()
        for who in [who for who, (until, _) in self._shut.items() if at >= until]:
            del self._shut[who]
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
