"""The check of keys: finds the key of each request, and watches over those in flight.

In this order: `KeyChecker`, `KeyFollower`, `KeyAdmission`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote_to_bytes

from cellgate.proxy.admission.limits import IN_FLIGHT, Accounts, Period, UsageRecord
from cellgate.proxy.config.key_file import Key, KeyFileError, KeyRing, read_keys
from cellgate.proxy.http.errors import UNCHARGED, Failure, FailureKind
from cellgate.proxy.http.heads import HIDDEN_FIELDS, KEY_FIELDS
from cellgate.proxy.observe.defects import report_defect
from cellgate.proxy.process.signals import Signature, signature
from cellgate.proxy.process.tasks import end_tasks
from cellgate.proxy.request.one_meaning import models_in_query
from cellgate.proxy.request.routes import IN_PATH, NOWHERE, find_route, model_in
from cellgate.proxy.request.services import OPEN_ROUTES, Admission
from cellgate.router.nouns import Ask, Outcome

if TYPE_CHECKING:
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.observe.access_log import Finished
    from cellgate.proxy.request.ports import Charge
    from cellgate.proxy.request.response import Response
    from cellgate.proxy.request.routes import ModelPlace
from cellgate.proxy.admission.token_estimator import FORGET_S, NOVICE, TokenEstimators
from cellgate.router.cost_model import Usage

_SCHEME = b"Bearer "
_SCHEME_BYTES = len(_SCHEME)


class KeyChecker:
    """The check of one process. `accounts` get what requests use; `ends_streams`: a request in flight ends
    when its key is revoked or expires. `tokens`, of an extra, are asked about what is in no file.
    """

    def __init__(
        self,
        accounts: Accounts,
        wall: Callable[[], float],
        *,
        ends_streams: bool,
        tokens: Any = None,
    ) -> None:
        self.accounts = accounts
        self.in_flight: dict[KeyAdmission, None] = {}
        """Requests that were charged."""
        self._wall = wall
        self._ends_streams = ends_streams
        self._tokens = tokens
        self._ring = KeyRing()
        self.closed: dict[tuple[str, str], tuple[float, Failure]] = {}
        """By key and tenant: until when nothing is left of a limit, and what its clients get."""
        self.estimators = TokenEstimators()

    def take(self, ring: KeyRing) -> None:
        """These keys hold from now on."""
        self._ring = ring
        self.closed.clear()

    def start(self) -> None:
        """Begin to follow what is behind tokens, until `close`."""
        if self._tokens is not None:
            self._tokens.start()

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()

    def identify(self, keyed_request: KeyedRequest) -> KeyAdmission | Failure:
        """What the key of a request allows, or why it does not count."""
        shown = take_credentials(keyed_request.request)
        digest = sha256(shown).digest()
        at = self._wall()
        key = self._ring.keys.get(digest)
        if key is None or key.expires_at <= at:
            found = self._find(shown, digest, at)
            if isinstance(found, Failure):
                return found
            key = found
        if self.closed and (refusal := self._refused(key)) is not None:
            return refusal
        return KeyAdmission(self, digest, key, keyed_request, at)

    def _find(self, shown: bytes, digest: bytes, at: float) -> Key | Failure:
        """The key that stands for what was shown, whose digest this is; or why it does not count."""
        if not shown:
            message = "no API key: send one, as Authorization: Bearer KEY, or as x-api-key: KEY"
            return Failure(FailureKind.BAD_KEY, message, lines=_CHALLENGE)
        key = self._ring.keys.get(digest)
        if key is None and self._tokens is not None:
            key = self._tokens.key(shown, digest, self._ring)
        if key is None:
            message = "this API key is not known here; ask the operator for one"
            return Failure(FailureKind.BAD_KEY, message, lines=_CHALLENGE)
        if key.expires_at <= at:
            message = "this API key has expired; ask the operator for another one"
            return Failure(FailureKind.KEY_EXPIRED, message, lines=_CHALLENGE)
        return key

    def _refused(self, key: Key) -> Failure | None:
        """Why a request of a key that counts is refused at once; it is counted."""
        if (refusal := self.refusal(key)) is not None:
            self.accounts.refused(key.tenant.name, refusal.used_up)
        return refusal

    def shut(self, key: Key, refusal: Failure) -> None:
        """A limit of this key has nothing left: before the next request is read, it is refused."""
        at = self._wall()
        # What is used up of a minute is there again when the next one begins.
        until = min(at + SHUT_S, Period.MINUTE.window(at)[1])
        self.closed[key.name, key.tenant.name] = until, refusal

    def ended(self, key: Key) -> None:
        """A request of this key is over: it may have another one in flight."""
        _, refusal = self.closed.get((key.name, key.tenant.name), _OPEN)
        if refusal is not None and refusal.used_up == IN_FLIGHT:
            del self.closed[key.name, key.tenant.name]

    def refusal(self, key: Key) -> Failure | None:
        """Why a request of this key is refused at once."""
        until, refusal = self.closed.get((key.name, key.tenant.name), _OPEN)
        return refusal if self._wall() < until else None

    def turns_away(self, request: Request) -> Failure | None:
        """Why a request is refused before its body has come: its key does not count, or is used up."""
        if find_route(request.path).name in OPEN_ROUTES or request.method == b"OPTIONS":
            return None
        key = self._shown(request)
        return key if isinstance(key, Failure) else self._refused(key)

    def tenant_of(self, request: Request) -> str:
        """Whose key a request shows; empty: none that counts."""
        key = self._shown(request)
        return "" if isinstance(key, Failure) else key.tenant.name

    def _shown(self, request: Request) -> Key | Failure:
        shown = shown_credentials(request)
        return self._find(shown, sha256(shown).digest(), self._wall())

    def tick(self, _now: float) -> None:
        """A few times a second: account for the answers that come, and end those whose key counts no more."""
        at = self._wall()
        for who in [who for who, (until, _) in self.closed.items() if at >= until]:
            del self.closed[who]
        for admission in list(self.in_flight):
            admission.spend()
            if self._ends_streams and not self._counts(admission, at):
                message = "the API key of this request was revoked, or has expired"
                admission.keyed_request.stop(Failure(FailureKind.KEY_REVOKED, message))

    def _counts(self, admission: KeyAdmission, at: float) -> bool:
        """Whether the key of a request in flight still counts."""
        key = admission.key
        if not key.name:
            return key.tenant.name in self._ring.tenants and key.expires_at > at
        present = self._ring.keys.get(admission.digest)
        return present is not None and present.expires_at > at


_KEY_NAME = re.compile(
    rb"(?:x[-_])?(?:api[-_]?)?key|(?:access[-_]|auth[-_]|api[-_])?token|authorization", re.IGNORECASE
)
_KEY_PROTOCOL = re.compile(rb"key|token|bearer|auth", re.IGNORECASE)


def take_credentials(request: Request) -> bytes:
    """The key that the head shows; it is taken out. Empty: none, or several that differ.

    `Authorization: Bearer KEY` (OpenAI), `x-api-key: KEY` (Anthropic) or `api-key: KEY` (Azure). Where else
    clients may have put it, it does not count, and units do not see it.
    """
    routing = request.routing
    if b"?" in request.target:
        request.target = without_keys(request.target)
    if len(routing) == 1:
        name, value = routing[0]
        if name in KEY_FIELDS:
            # As nearly all clients do.
            request.routing = []
            try:
                request.lines.remove(b"%b: %b\r\n" % (name, value))
            except ValueError:
                # It was named in `Connection`, and is not forwarded anyway.
                return b""
            if name == b"authorization" and value.startswith(_SCHEME):
                return value[_SCHEME_BYTES:].strip()
            return _key(name, value)
    shown = [field for field in routing if field[0] in KEY_FIELDS]
    hidden = [field for field in routing if field[0] in HIDDEN_FIELDS]
    dropped = {b"%b: %b\r\n" % field for field in (*shown, *hidden)}
    request.lines = [line for line in request.lines if line not in dropped]
    request.lines += _protocols(hidden)
    request.routing = [field for field in routing if field[0] not in KEY_FIELDS | HIDDEN_FIELDS]
    keys = {_key(name, value) for name, value in shown}
    return keys.pop() if len(keys) == 1 else b""


def without_keys(target: bytes) -> bytes:
    """A path without what its query says of a key."""
    path, _, query = target.partition(b"?")
    parts = [(part, unquote_to_bytes(part.partition(b"=")[0])) for part in query.split(b"&")]
    kept = [part for part, name in parts if not _KEY_NAME.fullmatch(name)]
    return path + b"?" + b"&".join(kept) if kept else path


def _protocols(hidden: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The lines of subprotocols without those that are keys, as browsers send them."""
    lines = []
    for name, value in hidden:
        if name == b"sec-websocket-protocol":
            kept = [each for each in value.split(b",") if not _KEY_PROTOCOL.search(each)]
            lines += [b"%b: %b\r\n" % (name, b",".join(kept).strip())] if kept else []
    return lines


def shown_credentials(request: Request) -> bytes:
    """The same, and the head stays as it is."""
    keys = {_key(name, value) for name, value in request.routing if name in KEY_FIELDS}
    return keys.pop() if len(keys) == 1 else b""


def _key(name: bytes, value: bytes) -> bytes:
    if name != b"authorization":
        return value.strip()
    if value.startswith(_SCHEME):
        return value[_SCHEME_BYTES:].strip()
    # The name of a scheme has no case (RFC 9110, 11.1).
    return value[_SCHEME_BYTES:].strip() if value[:_SCHEME_BYTES].lower() == _SCHEME.lower() else b""


# Follows the file of keys: what it says holds within a second. A file with a mistake changes nothing.


REST_S = 0.0002
"""While a large file is read, streams go on this often."""
KEYS_LOOK_S = 0.4
"""How often the file is looked at: revocation takes at most a second."""


def _rest() -> None:
    """Let the thread of the streams go on."""
    time.sleep(REST_S)


class KeyFollower:
    """Follows the file at `path`. `take` gets its keys, `refused` a line for each of its mistakes."""

    def __init__(
        self, path: str, take: Callable[[KeyRing], None], refused: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._path = path
        self._take = take
        self._refused = refused
        self._mark: Signature = None
        self._ring = KeyRing()
        self._task: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Read it now, in this thread: at start nobody waits."""
        self._mark = signature(self._path)
        try:
            self._ring = read_keys(self._path)
            self._take(self._ring)
        except KeyFileError as error:
            self._refused(error.problems)

    def start(self) -> None:
        """Follow it until `close`."""
        self._task = asyncio.create_task(self._follow(), name="keys")

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(KEYS_LOOK_S)
            # In another thread, because the file may be on a network.
            mark = await asyncio.to_thread(signature, self._path)
            if mark == self._mark:
                continue
            self._mark = mark
            try:
                ring = await asyncio.to_thread(read_keys, self._path, _rest)
                self._take(ring)
                old, self._ring = self._ring, ring
                await asyncio.to_thread(old.forget, _rest)
            except KeyFileError as error:
                self._refused(error.problems)
            except Exception as error:  # The file must be followed, whatever comes.
                report_defect(asyncio.get_running_loop(), "the keys of clients", error)


# What one request may do, by its key, and the account of what it uses.


_NOT_CHARGED = tuple(kind.value for kind in UNCHARGED)
_OK, _LEFT = Outcome.OK, Outcome.CLIENT_LEFT
_ANSWERLESS = ("embeddings", "rerank", "score", "pooling", "classify", "moderations", "speech", "images")
"""Routes whose engines generate no tokens."""
_OK_BELOW = 300
_SWITCHED = 101
"""A WebSocket: what goes through it is not counted in tokens."""
_TENANT = Ask._fields.index("tenant")
_BEFORE_TENANT = slice(0, _TENANT)
_TO_PAYER = slice(_TENANT + 1, Ask._fields.index("payer"))
_new = tuple.__new__


class KeyedRequest(Protocol):
    """A request whose key is checked: its exchange."""

    request: Request
    response: Response

    def stop(self, failure: Failure) -> None:
        """End it with this error, at any time."""


class KeyAdmission(Admission):
    """That of one request, which came at `at` (seconds since 1970). `digest` is that of what it has shown."""

    __slots__ = (
        "_asked",
        "_at",
        "_charged",
        "_charged_as",
        "_key_check",
        "_known",
        "_usage",
        "digest",
        "key",
        "keyed_request",
    )

    def __init__(
        self, key_check: KeyChecker, digest: bytes, key: Key, keyed_request: KeyedRequest, at: float
    ) -> None:
        self._key_check = key_check
        self.digest = digest
        self.key = key
        self.keyed_request = keyed_request
        self._at = at
        self._charged: tuple[int, int] | None = None
        self._usage: Usage | None = None

    # -- what it may do ------------------------------------------------------------------------------------

    def admit(self, ask: Ask, body_priority: int, place: ModelPlace) -> Ask | Failure:
        """The ask with its tenant; or why the key does not allow it."""
        key = self.key
        models = key.models
        if models is not None and (
            ask.model not in models
            or ask.models_beside
            or place is IN_PATH
            or b"?" in self.keyed_request.request.target
        ):
            refusal = self._barred(ask, models, place)
            if refusal is not None:
                return refusal
        low, high = key.priority
        # The gate goes by a header, and the engine by the body, if that has one.
        if not low <= ask.priority <= high or (body_priority and not low <= body_priority <= high):
            priority = body_priority if low <= ask.priority <= high else ask.priority
            reason = f"this key allows priorities from {low} to {high}, and the request has {priority}"
            return Failure(FailureKind.PRIORITY_NOT_ALLOWED, reason, param="priority")
        # As _replace does, in a quarter of the time; the payer is the last field.
        return _new(
            Ask,
            (
                *ask[_BEFORE_TENANT],  # type: ignore[misc] # mypy takes a slice that is no literal for an index
                key.tenant.name,
                *ask[_TO_PAYER],
                key.tenant.name,
            ),
        )

    def _barred(self, ask: Ask, models: frozenset[str], place: ModelPlace) -> Failure | None:
        """Why a key for some models is not for all that a request names, or for one that names none."""
        request = self.keyed_request.request
        in_path = model_in(request.path) if place is IN_PATH else None
        named = {ask.model, in_path, *ask.models_beside, *models_in_query(request.target)} - {None}
        if named <= models and (named or place is NOWHERE):
            return None
        asked = f"model {', '.join(map(repr, named - models))}" if named else "a request that names no model"
        reason = f"this key is not for {asked}; it is for {', '.join(sorted(models))}"
        return Failure(FailureKind.MODEL_NOT_ALLOWED, reason, param="model")

    def may_fall_back(self, model: str) -> bool:
        """Whether another model may serve it."""
        return self.key.models is None or model in self.key.models

    def used_up(self, refusal: Failure) -> None:
        """A limit of its key has nothing left."""
        self._key_check.shut(self.key, refusal)

    def refusal(self) -> Failure | None:
        """Why it is refused by now, before anything was done for it."""
        if (refusal := self._key_check.refusal(self.key)) is not None:
            self._key_check.accounts.refused(self.key.tenant.name, refusal.used_up)
        return refusal

    @property
    def payer(self) -> str:
        return f"key {self.key.name} of {self.key.tenant.name}"

    # -- what it uses --------------------------------------------------------------------------------------

    def charge(self, ask: Ask) -> Charge:
        """What it may take at most. It is settled at its end."""
        self._asked = ask
        self._charged_as = ask.model or ""
        key, at = self.key, self._at
        known = self._key_check.estimators.known.get((key.name, ask.tenant, self._charged_as), NOVICE)
        if at > known.until:
            known = NOVICE
        self._known = known
        prompt, completion = known.expect(ask.prompt_tokens, ask.max_tokens, ask.answers)
        if self.keyed_request.response.route in _ANSWERLESS:
            completion = 0
        self._charged = prompt, completion
        self._key_check.in_flight[self] = None
        return key.name, prompt, completion, at

    def completed(self, usage: Usage | None) -> None:
        self._usage = usage

    def spend(self) -> None:
        """Account for tokens of the answer that came and were not expected."""
        response, charged = self.keyed_request.response, self._charged
        if charged is None or (more := response.events - charged[1]) <= 0:
            return
        self._charged = charged[0], response.events
        self._key_check.accounts.spent(self.key.name, self.key.tenant.name, self._charged_as, more)

    def over(self, record: Finished, _at: float) -> None:
        charged, key_check = self._charged, self._key_check
        if charged is not None:
            del key_check.in_flight[self]
            if record.code not in _NOT_CHARGED:
                key_check.accounts.settle(self._usage_record(record, charged))
                if key_check.closed:
                    key_check.ended(self.key)
        # They hold each other, and would wait for the garbage collector.
        del self.keyed_request

    def _usage_record(self, record: Finished, charged: tuple[int, int]) -> UsageRecord:
        usage, asked, key = self._usage, self._asked, self.key
        if usage is not None:
            prompt = usage.prompt_tokens
            completion = usage.answer_tokens
            known = self._known
            if known is NOVICE:
                known = self._key_check.estimators.make((key.name, asked.tenant, self._charged_as))
            known.until = self._at + FORGET_S
            known.learn(asked.prompt_tokens, prompt, completion // asked.answers)
        elif record.events or record.outcome is _OK or (record.outcome is _LEFT and record.attempts):
            # Its engine has computed, and did not say how much, or not all.
            prompt, completion, usage = self._estimate(record, charged)
        elif self.keyed_request.response.whole and not record.code:
            # What it answered is doubtful, and was shown all the same.
            prompt, completion, usage = self._estimate_doubtful()
        else:
            prompt = completion = 0
        return _new(
            UsageRecord,
            (
                record.request_id,
                key.name,
                asked.tenant,
                record.model,
                self._charged_as,
                record.route,
                record.status,
                self._at,
                *charged,
                prompt,
                completion,
                usage is None,
            ),
        )

    def _estimate(self, record: Finished, charged: tuple[int, int]) -> tuple[int, int, Usage | None]:
        """Tokens of the prompt and of the answer as far as they are known, and the usage if it was told."""
        response, asked = self.keyed_request.response, self._asked
        reported = response.usage_for(asked)
        if reported is not None and response.has_answered():
            # It was told, though the client has left before the very end.
            return (
                reported.prompt_tokens,
                reported.answer_tokens,
                reported if type(reported) is Usage else None,
            )
        prompt, least = (
            (reported.prompt_tokens, reported.answer_tokens) if reported is not None else (charged[0], 0)
        )
        if record.route in _ANSWERLESS or response.status == _SWITCHED:
            return prompt, least, None
        events, text = response.tokens_shown()
        if not asked.stream and record.outcome is not _OK:
            # Nobody knows how much of it was computed when its client left.
            text = max(text, charged[1])
        if limit := response.longest_answer(asked):
            text = min(text, limit * asked.answers)
        return prompt, max(least, events, text), None

    def _estimate_doubtful(self) -> tuple[int, int, Usage | None]:
        """The same of an answer under 200 that is not known to be a good one: what its unit says it took."""
        response = self.keyed_request.response
        reported = response.usage_for(self._asked) if response.status < _OK_BELOW else None
        if reported is None:
            return 0, 0, None
        return reported.prompt_tokens, reported.answer_tokens, reported if type(reported) is Usage else None


# The check of keys: finds the key of each request, and watches over those in flight.
#
# Keys are looked up by their SHA-256. That takes as long for a wrong key as for a right one as far as anybody
# can use it: how far a comparison of digests gets says nothing about the key, because nobody can choose a key
# by its digest.


SHUT_S = 1.0
"""So long a key is refused at once when a limit of it had nothing left: some may be given back."""
_OPEN: tuple[float, Failure | None] = (0.0, None)
_CHALLENGE = b"www-authenticate: Bearer\r\n"
"""A 401 must have one (RFC 9110, 15.5.2)."""
