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
5. Leases, documents and orders are signed (proxy/redis/signing.py). With a secret of the fleet an unsigned
   one, or one that is not renewed, holds nothing: another gate leads, and an event says so.

In this order: `Leadership`, `ClaimSharing`, `SharedRoll`, `Agreement`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from redis.exceptions import RedisError

from cellgate.extras.operator.plan import Acting, Claim, NotActingError, Undecided
from cellgate.extras.operator.recovery import ActingMetrics
from cellgate.extras.operator.roll_plan import RollStore, UndecidedRoll, read_roll
from cellgate.proxy.observe.events import Action
from cellgate.proxy.observe.rare_events import RareEvents
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.process.tasks import end_tasks
from cellgate.proxy.redis.commands import EXCHANGE_S, Command, Connect, answered, connector, in_words
from cellgate.proxy.redis.reports import Names
from cellgate.proxy.redis.signing import CLOCK_S, UNSIGNED, Signer, signer_of

if TYPE_CHECKING:
    from cellgate.proxy.config.settings import RedisAccess
    from cellgate.proxy.control.plane import Plane


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
            nothing = self.signer.sign(self._place(scope, name), _ERASED)
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
        lease = self.signer.sign(self._place(scope, self.gate), _LEASE % self.gate.encode())
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


# What Redis does for gates that agree on who leads: three scripts, each on one key.
#
# The key is a hash: `gate` leads until `until` (Redis's own clock, milliseconds) with the fencing token
# `token`; `of:NAME` is a document of the leader, `MILLISECONDS:TEXT`. A script is one step for all gates, so
# that of two who write at the same time one is refused. docs/redis.md describes it.


KEEP_MS = 24 * 3600 * 1000
"""How long a document is remembered."""
AHEAD_MS = 3600 * 1000
"""Clocks of a Redis and of its successor may differ by so much; what is later is nobody's."""
_LEASE = b'{"gate":"%b"}'
_ERASED = b'{"v":1}'

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local size = redis.pcall('HLEN', KEYS[1])
if type(size) == 'table' then
  if not string.find(size.err, 'WRONGTYPE') then return size end
  size = math.huge
end
if size > 4096 + 64 then redis.call('DEL', KEYS[1]) end
local had = redis.call('HMGET', KEYS[1], 'gate', 'token', 'until', 'lease')
local gate, token, ends = string.sub(had[1] or '', 1, 256), tonumber(had[2]) or 0, tonumber(had[3]) or 0
if not (token < now + 86400000) then token = 0 end
"""
# A key of another kind, or with more than gates write, is nobody's. So is a token far ahead of the clock.

# A token is never smaller than the clock, so that it grows even when Redis came back empty.
HOLD = (
    _NOW
    + """
local me, ttl, stands, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local lease = string.sub(had[4] or '', 1, 256)
local dropped = 9 + 2 * tonumber(ARGV[8])
local function at(written) return tonumber(string.match(written, '^(%d+):')) or 0 end
for i = 9, dropped - 1, 2 do
  local has = redis.call('HGET', KEYS[1], 'of:' .. ARGV[i])
  if has and redis.sha1hex(has) == ARGV[i + 1] then redis.call('HDEL', KEYS[1], 'of:' .. ARGV[i]) end
end
for i = dropped, #ARGV, 2 do
  local has = redis.call('HGET', KEYS[1], 'of:' .. ARGV[i])
  if not has or at(has) < at(ARGV[i + 1]) then redis.call('HSET', KEYS[1], 'of:' .. ARGV[i], ARGV[i + 1]) end
end
local is_mine, is_over = gate == me, gate == '' or ends <= now
local is_forged = gate ~= '' and gate == ARGV[6] and lease == ARGV[7]
if stands and (is_mine or is_over or is_forged) then
  if not is_mine or is_over then token = math.max(token + 1, now) end
  gate, ends, lease = me, now + ttl, ARGV[5]
elseif is_mine and not stands then
  ends = 0
elseif not (ends <= now + ttl) then
  ends = now + ttl
  redis.call('HSET', KEYS[1], 'until', string.format('%.0f', ends))
end
if gate == me then
  redis.call('HSET', KEYS[1], 'gate', gate, 'token', string.format('%.0f', token),
             'until', string.format('%.0f', ends), 'lease', lease)
end
redis.call('PEXPIRE', KEYS[1], keep)
local all, found, bytes = redis.call('HGETALL', KEYS[1]), {}, 0
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 3) == 'of:' then
    local written, size = at(all[i + 1]), #all[i + 1] + #all[i]
    if size > 1048576 or written + keep < now or not (written <= now + 3600000) then
      redis.call('HDEL', KEYS[1], all[i])
    elseif bytes + size <= 8388608 then
      bytes = bytes + size
      found[#found + 1] = string.sub(all[i], 4); found[#found + 1] = all[i + 1]
    end
  end
end
return {gate, token, math.max(0, ends - now), now, found, lease}
"""
)
"""ARGV: gate, lifetime in ms, whether it stands, KEEP_MS, its signed lease, who leads by which lease that is
not believed, how many documents are forged, their names and digests, then names and documents that are
missing or old. Returns who leads, its token, for how many ms more, Redis's clock, all documents, the lease.
A lease never ends later than in its lifetime, whatever somebody has written."""

WRITE = (
    _NOW
    + """
if gate ~= ARGV[1] or token ~= tonumber(ARGV[2]) or ends <= now then return {0, gate} end
local name = 'of:' .. ARGV[3]
local before = tonumber(string.match(redis.call('HGET', KEYS[1], name) or '', '^(%d+):')) or 0
local said = string.format('%.0f', math.max(now, before + 1)) .. ':' .. ARGV[4]
redis.call('HSET', KEYS[1], name, said)
return {1, said}
"""
)
"""ARGV: gate, its token, name, text. Returns 1 and the document as it is written, or 0 and who leads."""

ERASE = """
local name, written = 'of:' .. ARGV[1], ARGV[2]
if redis.call('HGET', KEYS[1], name) ~= written then return 0 end
local erased = string.format('%.0f', tonumber(string.match(written, '^(%d+):')) + 1) .. ':' .. ARGV[3]
redis.call('HSET', KEYS[1], name, erased)
return erased
"""
"""ARGV: name, the document as it was written, and one that says nothing. It becomes that, and newer, lest a
gate that has heard of it writes it again. Returns that, or 0: there is another one."""

FIRST = """
for _ = 1, 64 do
  local text = redis.pcall('LINDEX', KEYS[1], 0)
  if type(text) == 'table' then
    if not string.find(text.err, 'WRONGTYPE') then return text end
    redis.call('DEL', KEYS[1])
    return false
  end
  if not text or #text <= tonumber(ARGV[1]) then return text end
  redis.call('LTRIM', KEYS[1], 1, -1)
end
return false
"""
"""ARGV: how long a text may be. Returns the oldest of a list; longer ones before it are removed."""


# Recovery's side of leadership: which gate acts for a cell, and the attempts that gates have claimed.


RECOVERY_PURPOSE = "recovery"
VERSION = 1


class ClaimSharing:
    """The agreement of gates on who acts, as recovery knows it (`Acting`)."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._news: list[Claim] = []

    @property
    def trouble(self) -> str:
        """Why no gate is known to act; empty: one is."""
        return self._leadership.trouble

    def stand_for(self, cells: Collection[str]) -> None:
        """This gate could act for these cells now, and for no others."""
        self._leadership.stand_for(RECOVERY_PURPOSE, cells)

    def acts_for(self, cell: str) -> bool:
        """Whether this gate acts for the cell."""
        return self._leadership.leads(cell)

    def news(self) -> list[Claim]:
        """The claims of other gates since the last call."""
        news, self._news = self._news, []
        return news

    def hear(self, document: Document) -> None:
        """A document of a cell. One that is no claim is ignored."""
        claim = _read(document)
        if claim is not None and claim.gate != self._leadership.gate:
            self._news.append(claim)

    async def claim(self, claim: Claim) -> int:
        """Claim an attempt right before it begins; its fencing token. Raises NotActingError."""
        said = _written(replace(claim, gate=self._leadership.gate))
        return await self._leadership.write(claim.cell, claim.unit, said)

    async def withdraw(self, claim: Claim) -> None:
        """A claimed attempt was not begun after all. If Redis cannot be told, the unit is given its time."""
        await self._leadership.erase(claim.cell, claim.unit)

    async def close(self) -> None:
        """Let another gate act, at once."""
        await self._leadership.close()


def _written(claim: Claim) -> bytes:
    claimed = {"id": claim.id, "gate": claim.gate, "attempt": claim.attempt, "rest_s": claim.rest_s}
    return orjson.dumps({"v": VERSION} | claimed)


def _read(document: Document) -> Claim | None:
    """The claim in a document; None when there is none."""
    try:
        found = orjson.loads(document.text)
        who = str(found["gate"]), str(found["id"])
        numbers = int(found["attempt"]), float(found["rest_s"])
        return Claim(document.name, document.scope, *who, *numbers, age_s=document.age_s)
    except (ValueError, TypeError, KeyError):
        return None


# The roll that gates share through Redis: a document of the scope `:roll`, and a list of orders.


SCOPE = ":roll"
"""No cell can have this name."""
ROLL_LEASE = "roll"
ORDERS = "roll:orders"
ROLL_PURPOSE = "roll"
ROLL_KEPT_S = 600.0
"""So old a roll that goes on may be at a gate that has just begun."""
GATES_KEPT = 1024
FORGED_A_LOOK = 64
"""So many orders that no gate has signed are removed in one look."""


class SharedRoll:
    """The roll as all gates of this Redis know it (`RollStore`)."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._text = b""
        self._asked: tuple[bytes, bytes] = b"", b""
        """The order that was read last: as the list has it, and without its signature."""
        self._done: dict[str, bytes] = {}
        """The last order of each gate that was carried out or refused, as the list had it."""

    @property
    def trouble(self) -> str:
        """Why no gate is known to conduct; empty: one does."""
        return self._leadership.trouble

    @property
    def leader(self) -> str:
        """The gate that conducts; empty: none is known."""
        return self._leadership.leader(SCOPE)

    def hear(self, document: Document) -> None:
        """A document of the scope."""
        if document.name == ROLL_LEASE and self._is_of_now(document):
            self._text = document.text

    def _is_of_now(self, document: Document) -> bool:
        """Whether a gate may go on with it. One that goes on is written again each minute: an old one may be
        a replay, which would restart units.
        """
        if not self._leadership.signer.must or document.age_s <= ROLL_KEPT_S:
            return True
        with suppress(ValueError):
            if read_roll(document.text).is_over():
                return True
        what = f"a roll that was written {document.age_s:.0f} s ago, which does not go on: order it again"
        self._leadership.on_forged(SCOPE, what)
        return False

    def stand(self, *, willing: bool) -> None:
        """Whether this gate could conduct."""
        self._leadership.stand_for(ROLL_PURPOSE, {SCOPE} if willing else set())

    def conducts(self) -> bool:
        """Whether this gate conducts."""
        return self._leadership.leads(SCOPE)

    def clock_ms(self) -> int:
        """Redis's clock."""
        return self._leadership.clock_ms()

    def latest(self) -> bytes:
        """The document that was written last; empty: none."""
        return self._text

    async def write(self, text: bytes) -> int:
        """Write the document; its fencing token. Raises NotActingError when another gate conducts."""
        token = await self._leadership.write(SCOPE, ROLL_LEASE, text)
        self._text = text
        return token

    async def ask(self, text: bytes) -> None:
        """Ask the conductor for something. Raises NotActingError when Redis cannot be asked."""
        gate = self._leadership.gate
        said = b'{"gate":"%b",%b' % (gate.encode(), text[1:])
        await self._leadership.push(ORDERS, self._leadership.signer.sign(_orders_of(gate), said))

    async def asked(self) -> bytes | None:
        """What was asked first and is not done yet; None: nothing. What no gate has asked within a minute is
        removed. Raises NotActingError.
        """
        for _ in range(FORGED_A_LOOK):
            text = await self._leadership.first(ORDERS)
            if text is None:
                return None
            if self._is_believed(text):
                self._asked = text, self._leadership.signer.bare(text)
                return self._asked[1]
            await self._leadership.remove(ORDERS, text)
            what = f"an order that no gate has signed within {CLOCK_S:g} s, or again; it is not carried out"
            self._leadership.on_forged(SCOPE, what)
        return None

    async def done(self, text: bytes) -> None:
        """It was carried out, or refused. Raises NotActingError."""
        asked, bare = self._asked
        if text != bare:
            return
        if len(self._done) >= GATES_KEPT:
            self._done.clear()
        self._done[_asking_gate(asked)] = asked
        await self._leadership.remove(ORDERS, asked)

    def _is_believed(self, text: bytes) -> bool:
        """Whether a gate has asked for it, and for the first time."""
        signer, gate = self._leadership.signer, _asking_gate(text)
        if not signer.must:
            return True
        return signer.believes(_orders_of(gate), text) and self._done.get(gate) != text


def _orders_of(gate: str) -> str:
    """What a signature of its orders is for."""
    return f"{ORDERS}:{gate}"


def _asking_gate(text: bytes) -> str:
    """The gate that an order says it is from; empty: it does not say."""
    try:
        return str(orjson.loads(text)["gate"])[:128]
    except (ValueError, TypeError, KeyError):
        return ""


# Ties a control plane to what gates agree on.


class Agreement(NamedTuple):
    """What gates agree on: who acts for a cell, and the roll."""

    acting: Acting
    rolls: RollStore


def agree(plane: Plane, access: RedisAccess, gate: str) -> Agreement:
    """The agreement of this gate with others. With an invalid URL no gate acts."""
    try:
        connect = connector(access, plane.settings.tls)
    except ValueError as error:
        return Agreement(Undecided(f"redis: {error}"), UndecidedRoll(f"redis: {error}"))

    def on_leading(scope: str, token: int) -> None:
        if scope == SCOPE:
            detail = f"this gate conducts rolls from now on (fencing token {token})"
            plane.events.add(Action("roll", "gate", detail=detail))
            return
        detail = f"no other gate recovers units of it from now on (fencing token {token})"
        plane.events.add(Action("acting", "gate", detail=detail, cell=scope))

    rare = RareEvents(plane.events, plane.now)

    def on_forged(scope: str, what: str) -> None:
        detail = f"{what}: somebody who is no gate writes in Redis, or a gate has another secret of the fleet"
        rare.add(Action("forged", "gate", detail=detail, cell=None if scope == SCOPE else scope))

    def on_document(document: Document) -> None:
        (rolls if document.scope == SCOPE else claims).hear(document)

    leadership = Leadership(
        connect,
        gate,
        Names(access.prefix),
        now=plane.now,
        rng=random.Random(),
        on_leading=on_leading,
        on_document=on_document,
        on_forged=on_forged,
        signer=signer_of(plane.settings, routes=False),
    )
    claims, rolls = ClaimSharing(leadership), SharedRoll(leadership)
    leadership.start()
    plane.metrics.include(ActingMetrics(leadership.scopes, leadership.leads))
    return Agreement(claims, rolls)
