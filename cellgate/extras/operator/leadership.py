"""Gates agree through Redis on who acts: a lease with a fencing token for each scope, and documents under it.

A scope is a cell, or `:roll`. Only the leader of a scope writes documents there; all who stand for it read
them.

1. The leader renews its lease twice a second. Once it has run out, another gate that stands for the scope
   gets it.
2. A new leader waits LEADER_SETTLE_S first. Meanwhile all gates write again the documents that a Redis
   which came back empty, or a replica that has become the primary, does not know.
3. Redis has the last word: a document is written right before the action that it announces, and is refused
   when the lease has run out, however long that gate stood still.
4. Without Redis nobody leads, because no gate knows whether another does.
5. Leases, documents and orders are signed (redis_client/signing.py). With a secret of the fleet an unsigned
   one, or one that is not renewed, holds nothing: another gate leads, and an event says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from cellgate.extras.operator.leadership_scripts import (
    ERASE,
    ERASED_TEXT,
    FIRST,
    HOLD,
    KEEP_MS,
    LEASE_TEXT,
    WRITE,
)
from cellgate.extras.operator.plan import NotActingError
from cellgate.extras.redis_client.connect import Connect, in_words
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import EXCHANGE_S, Command, answered
from cellgate.extras.redis_client.signing import CLOCK_S, UNSIGNED, Signer
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.process.tasks import end_tasks

RENEW_S = 0.5
LEADER_LEASE_S = 2.5
LEADER_SETTLE_S = 1.5
"""With LEADER_LEASE_S and RENEW_S at most 4.5 s from a leader's death to the first action of the next."""
SLICE = 32
"""So many scopes are asked about in one exchange."""
DOCUMENTS_MAX = 4096
"""The most documents of one scope that are read."""
DOCUMENT_BYTES, DOCUMENTS_BYTES = 1 << 20, 1 << 23
"""Of one document, and of all that are read of a scope at once. Larger ones are removed."""
QUEUE_MAX = 64
"""The most texts that wait in a list; the oldest are dropped."""
ORDER_BYTES = 16_384
"""A longer text in a list is no order."""
_LEADER_UNREACHED = "Redis cannot be asked which gate acts: %s"
_LEADER_UNASKED = "Redis has not been asked yet which gate acts"


class Document(NamedTuple):
    """What a leader has written under a name, without its signature, and how long ago."""

    scope: str
    name: str
    text: bytes
    age_s: float


@dataclass(slots=True)
class _Scope:
    """What this gate knows of one scope. `token` is 0 while another gate leads; `ours_until` and `settled_at`
    are on this gate's clock; `written` is by name, as Redis has it, `missing` names what Redis has lost,
    `forged` what it has and no gate has written. `lease` is the signed word of another leader, as it was read
    first at `lease_at`; `usurper` is one that is not believed, with its word.
    """

    leader: str = ""
    token: int = 0
    ours_until: float = 0.0
    settled_at: float = 0.0
    written: dict[str, bytes] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    forged: dict[str, bytes] = field(default_factory=dict)
    lease: bytes = b""
    lease_at: float = 0.0
    is_signed: bool = False
    usurper: tuple[bytes, bytes] = (b"", b"")


class Leadership:
    """This gate's part, under the name `gate`. `on_leading` is called with a scope and a token when this gate
    begins to lead it, `on_document` with each document that another gate has written, `on_forged` with a
    scope and what is there that no gate has signed.
    """

    def __init__(
        self,
        connect: Connect,
        gate: str,
        names: Names,
        *,
        now: Callable[[], float],
        rng: random.Random,
        on_leading: Callable[[str, int], None],
        on_document: Callable[[Document], None],
        on_forged: Callable[[str, str], None] = lambda _scope, _what: None,
        signer: Signer = UNSIGNED,
    ) -> None:
        self.gate = gate
        self.signer = signer
        self._client = connect()
        self._names = names
        self._now = now
        self._rng = rng
        self._on_leading = on_leading
        self._on_document = on_document
        self.on_forged = on_forged
        self._standing: dict[str, frozenset[str]] = {}
        self._scopes: dict[str, _Scope] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._clock_ahead_ms = 1000.0 * (time.time() - now())
        self.trouble = _LEADER_UNASKED
        """Why nobody is known to lead; empty: somebody is."""

    def start(self) -> None:
        """Begin, and run until `close`."""
        self._task = asyncio.create_task(self._forever(), name="leadership")

    async def close(self) -> None:
        """Let another gate lead, at once, if Redis can be told."""
        if self._task is None:
            return
        await end_tasks(self._task)
        self._task = None
        self._standing = {}
        with suppress(RedisError, OSError, TimeoutError):
            await self._ask(sorted(self._scopes))
        with suppress(RedisError, OSError):
            await self._client.disconnect()

    def scopes(self) -> frozenset[str]:
        """What this gate stands for."""
        return frozenset().union(*self._standing.values())

    def stand_for(self, purpose: str, scopes: Collection[str]) -> None:
        """For this purpose the gate could lead these scopes now, and no others."""
        if (standing := frozenset(scopes)) != self._standing.get(purpose, frozenset()):
            self._standing[purpose] = standing
            self._wake.set()

    def leads(self, scope: str) -> bool:
        """Whether this gate's lease on the scope holds, and has held for LEADER_SETTLE_S."""
        known = self._scopes.get(scope)
        return known is not None and known.token > 0 and known.settled_at <= self._now() < known.ours_until

    def leader(self, scope: str) -> str:
        """The gate that leads the scope; empty: none is known."""
        known = self._scopes.get(scope)
        return known.leader if known is not None else ""

    def clock_ms(self) -> int:
        """Redis's clock, as of its last answer; before the first one, this machine's."""
        return round(1000.0 * self._now() + self._clock_ahead_ms)

    async def write(self, scope: str, name: str, text: bytes) -> int:
        """Write a document right before the action that it announces; the fencing token. Raises
        NotActingError.
        """
        known = self._scopes.get(scope)
        if known is None or not self.leads(scope):
            raise NotActingError(_who(known.leader if known else ""))
        asked_at, token = self._now(), known.token
        signed = self.signer.sign(self._place(scope, name), text)
        granted, answer = await self._script(WRITE, scope, self.gate, token, name, signed)
        if not granted:
            known.token = 0
            raise NotActingError(_who(_text(answer)))
        # What is older counts for nothing here either.
        self.signer.believes(self._place(scope, name), signed)
        known.written[name] = bytes(answer)
        if self._now() - asked_at > EXCHANGE_S:
            # This process stood still: by now another gate may have acted.
            await self.erase(scope, name)
            raise NotActingError("Redis answered too late")
        return token

    async def erase(self, scope: str, name: str) -> None:
        """What was announced was not begun after all. Harmless when Redis cannot be told."""
        known = self._scopes.get(scope)
        if known is None or (written := known.written.get(name)) is None:
            return
        with suppress(NotActingError):
            nothing = self.signer.sign(self._place(scope, name), ERASED_TEXT)
            erased = await self._script(ERASE, scope, name, written, nothing)
            if isinstance(erased, bytes):
                self.signer.believes(self._place(scope, name), nothing)
                known.written[name] = erased

    async def push(self, queue: str, text: bytes) -> None:
        """Append to a list from which a leader takes. Raises NotActingError when Redis cannot be asked."""
        await self._exchange("RPUSH", self._names.prefix + queue, text)
        await self._exchange("LTRIM", self._names.prefix + queue, -QUEUE_MAX, -1)

    async def first(self, queue: str) -> bytes | None:
        """The oldest of a list; None: it is empty. Raises NotActingError when Redis cannot be asked."""
        found = await self._exchange("EVAL", FIRST, 1, self._names.prefix + queue, ORDER_BYTES)
        return found if isinstance(found, bytes) else None

    async def remove(self, queue: str, text: bytes) -> None:
        """Take it off the list. Raises NotActingError when Redis cannot be asked."""
        await self._exchange("LREM", self._names.prefix + queue, 1, text)

    # -- asking --------------------------------------------------------------------------------------------

    async def _forever(self) -> None:
        while True:
            try:
                await self._ask(sorted(self.scopes() | self._scopes.keys()))
                self.trouble = ""
            except Exception as error:  # No exception may end this task, which has to reconnect.
                self.trouble = _LEADER_UNREACHED % in_words(error)
                with suppress(Exception):
                    await self._client.disconnect()
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S * self._rng.uniform(0.8, 1.0)):
                    await self._wake.wait()
            self._wake.clear()

    async def _ask(self, scopes: list[str]) -> None:
        standing = self.scopes()
        for at in range(0, len(scopes), SLICE):
            part, asked_at = scopes[at : at + SLICE], self._now()
            commands: list[Command] = []
            for scope in part:
                words = self._said(scope, stands=scope in standing)
                commands.append(("EVAL", HOLD, 1, self._names.acting(scope), *words))
            for scope, answer in zip(part, await answered(self._client, commands), strict=True):
                self._take(scope, answer, asked_at)

    def _said(self, scope: str, *, stands: bool) -> Iterable[str | bytes | int]:
        known = self._scopes.setdefault(scope, _Scope())
        lost = [part for name in known.missing if (text := known.written.get(name)) for part in (name, text)]
        forged = [part for row in known.forged.items() for part in row]
        lease = self.signer.sign(self._place(scope, self.gate), LEASE_TEXT % self.gate.encode())
        head = self.gate, round(1000 * LEADER_LEASE_S), int(stands), KEEP_MS, lease, *known.usurper
        return *head, len(known.forged), *forged, *lost

    def _place(self, scope: str, name: str) -> str:
        """What a signature there is for."""
        return f"{self._names.acting(scope)}/{name}"

    def _take(self, scope: str, answer: Any, asked_at: float) -> None:
        """What Redis has answered about a scope."""
        leader, token, left_ms, redis_ms, rows, lease = answer
        self._clock_ahead_ms = redis_ms - 1000.0 * self._now()
        known = self._scopes[scope]
        known.leader = self._leader(scope, leader, lease) if left_ms else ""
        known.ours_until = asked_at + left_ms / 1000.0
        self._take_documents(scope, rows, redis_ms)
        if known.leader != self.gate:
            known.token = 0
        elif token != known.token:
            known.token, known.settled_at = token, self._now() + LEADER_SETTLE_S
            self._on_leading(scope, token)

    def _leader(self, scope: str, leader: bytes, lease: bytes) -> str:
        """The gate that leads, if its lease is a gate's word, and renewed; empty: nobody's."""
        known, now, gate = self._scopes[scope], self._now(), one_line(_text(leader))[:128]
        known.usurper = b"", b""
        if gate == self.gate or not self.signer.must:
            return gate
        if lease != known.lease:
            known.lease, known.lease_at = lease, now
            known.is_signed = self.signer.believes(self._place(scope, gate), lease)
        if known.is_signed and now - known.lease_at <= LEADER_LEASE_S + RENEW_S:
            return gate
        known.usurper = leader, lease
        self.on_forged(scope, f"a lease of {gate[:64]!r}, which holds nothing")
        return ""

    def _take_documents(self, scope: str, rows: Any, redis_ms: int) -> None:
        known = self._scopes[scope]
        found = {_text(name): bytes(written) for name, written in zip(rows[::2], rows[1::2], strict=True)}
        known.forged = {}
        for name, written in found.items():
            if written == known.written.get(name):
                continue
            text = written.partition(b":")[2]
            # The same word under another time is no news.
            is_ours = self.signer.believes(self._place(scope, name), text, age_s=CLOCK_S + KEEP_MS / 1000)
            if not is_ours:
                if len(known.forged) < SLICE:
                    known.forged[name] = hashlib.sha1(written, usedforsecurity=False).hexdigest().encode()
            elif _written_ms(written) > _written_ms(known.written.get(name, b"")):
                is_news = known.written.get(name, b"").partition(b":")[2] != text
                known.written[name] = written
                if is_news or not self.signer.must:
                    by_redis_s = (redis_ms - _written_ms(written)) / 1000.0
                    age_s = max(0.0, by_redis_s, self._signed_s(text) - CLOCK_S)
                    self._on_document(Document(scope, name, self.signer.bare(text), age_s))
        if known.forged:
            name = one_line(next(iter(known.forged)))[:64]
            self.on_forged(scope, f"a document of {name!r}, which is removed")
        # Redis forgets what is old, and so must those who would write it again.
        old = [name for name, written in known.written.items() if _written_ms(written) + KEEP_MS < redis_ms]
        for name in old:
            del known.written[name]
        # The newest holds: a gate that has missed it may have written an older one into an empty Redis.
        lost = [name for name, written in known.written.items() if found.get(name, b"") != written]
        known.missing = tuple(lost[:SLICE])

    def _signed_s(self, text: bytes) -> float:
        return self.signer.age_s(text) if self.signer.must else 0.0

    async def _script(self, script: str, scope: str, *words: str | bytes | int) -> Any:
        return await self._exchange("EVAL", script, 1, self._names.acting(scope), *words)

    async def _exchange(self, *words: str | bytes | int) -> Any:
        """One command. Raises NotActingError when Redis does not answer it well."""
        try:
            (answer,) = await answered(self._client, [words])
        except (RedisError, OSError, TimeoutError) as error:
            raise NotActingError(_LEADER_UNREACHED % in_words(error)) from error
        return answer


def _written_ms(written: bytes) -> int:
    """When a document was written, by Redis's clock; 0 where there is none."""
    at = written.partition(b":")[0]
    return int(at) if at.isdigit() else 0


def _who(leader: str) -> str:
    return f"gate {leader} acts" if leader else "no gate acts"


def _text(found: Any) -> str:
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
