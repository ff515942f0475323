"""The table of paths. A path that is not here is refused, unless `pass_unlisted` is on.

GENERATE asks a unit for work: retry, load, affinity, evidence. READ asks any usable unit for a fact.
STICKY asks the unit that created the object. OWN is answered by the gate. DENIED is engine administration:
an operator who may pause or reload an engine does so at the engine. DEVIOUS paths have
empty or dot segments, or a backslash (/v1/models/../../pause): programs read them differently, so they are
not forwarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from math import inf
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_to_bytes, urlsplit

from xxhash import xxh3_64_hexdigest

from cellgate.proxy.config.key_file import PRIORITY_LAST
from cellgate.proxy.config.settings import Cors, HeaderNames, gates_token, is_token
from cellgate.proxy.http.errors import Failure, FailureKind, Fault
from cellgate.proxy.http.heads import TOKEN_FIELD, UNIT_FIELD, Fields
from cellgate.proxy.http.request import Request
from cellgate.proxy.request.answer_shape import SHAPES, AnswerShape
from cellgate.router.board import Board
from cellgate.router.nouns import Ask


class Standing(Enum):
    """What is known of a path."""

    ADMINISTERS = auto()
    HARMLESS = auto()
    READABLE = auto()
    """Harmless to be read: something below what is."""
    UNKNOWN = auto()


class RouteKind(Enum):
    """What the gate does with a path."""

    GENERATE = auto()
    READ = auto()
    STICKY = auto()
    LOCAL = auto()
    DENIED = auto()
    AMBIGUOUS_PATH = auto()
    UNLISTED = auto()


GENERATE, STICKY, OWN = RouteKind.GENERATE, RouteKind.STICKY, RouteKind.LOCAL
DENIED, AMBIGUOUS_PATH, UNLISTED = RouteKind.DENIED, RouteKind.AMBIGUOUS_PATH, RouteKind.UNLISTED


class ModelPlace(Enum):
    """Where a request names its model, as far as the gate reads it."""

    NOWHERE = auto()
    """It asks for a fact, or for what was made before."""
    BODY = auto()
    PATH = auto()
    """Its engine goes by the path, whatever is in the body."""
    FORM = auto()
    """In a field of a form; or in the body, where that is JSON all the same."""


NOWHERE, IN_BODY, IN_PATH, IN_FORM = ModelPlace


@dataclass(frozen=True, slots=True)
class Route:
    """One row. `methods` are those allowed; `json` means that the body must be a JSON object; `model` says
    where a request names the model that is to compute. `shape` is what a good answer is; None: any is.
    """

    kind: RouteKind
    name: str
    methods: tuple[bytes, ...] = ()
    json: bool = False
    model: ModelPlace = NOWHERE
    shape: AnswerShape | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", SHAPES.get(self.name))


_POST, _GET = (b"POST",), (b"GET", b"HEAD")


def _generate(name: str, *, json: bool = True, model: ModelPlace = IN_BODY) -> Route:
    return Route(GENERATE, name, _POST, json, model)


_EXACT: dict[bytes, Route] = {
    b"/v1/chat/completions": _generate("chat"),
    b"/v1/completions": _generate("completions"),
    b"/v1/responses": _generate("responses"),
    b"/v1/messages": _generate("messages"),
    b"/v1/embeddings": _generate("embeddings"),
    b"/v1/rerank": _generate("rerank"),
    b"/v2/rerank": _generate("rerank"),
    b"/rerank": _generate("rerank"),
    b"/v1/score": _generate("score"),
    b"/score": _generate("score"),
    b"/pooling": _generate("pooling"),
    b"/classify": _generate("classify"),
    b"/generate": _generate("generate"),
    b"/inference/v1/generate": _generate("generate"),
    b"/v1/audio/speech": _generate("speech"),
    b"/v1/images/generations": _generate("images"),
    b"/v1/moderations": _generate("moderations"),
    b"/invocations": _generate("invocations"),
    b"/v1/audio/transcriptions": _generate("audio", json=False, model=IN_FORM),
    b"/v1/audio/translations": _generate("audio", json=False, model=IN_FORM),
    b"/v1/images/edits": _generate("images", json=False, model=IN_FORM),
    b"/v1/images/variations": _generate("images", json=False, model=IN_FORM),
    b"/tokenize": Route(RouteKind.READ, "tokenize", _POST, json=True, model=IN_BODY),
    b"/detokenize": Route(RouteKind.READ, "tokenize", _POST, json=True, model=IN_BODY),
    b"/v1/messages/count_tokens": Route(RouteKind.READ, "tokenize", _POST, json=True, model=IN_BODY),
    b"/version": Route(RouteKind.READ, "version", _GET),
    b"/v1/models": Route(OWN, "models", _GET),
    b"/health": Route(OWN, "health", _GET),
    b"/readyz": Route(OWN, "health", _GET),
    b"/livez": Route(OWN, "health", _GET),
    b"/ping": Route(OWN, "health", _GET),
}

# Browsers read a backslash in a URL as a slash (https://url.spec.whatwg.org/#path-state).
_DEVIOUS = re.compile(rb"//|/\.\.?(?:[/;]|$)|\\")

_ENCODED_MOST = 4
_HARMLESS_METHODS = (b"GET", b"HEAD", b"POST", b"OPTIONS")
_READ_METHODS = (b"GET", b"HEAD", b"OPTIONS")
_TRITON_MODEL = rb"/v2/models/[^/]+(?:/versions/\d+)?"

_BY_PATH = re.compile(rb"(?:/v2/models/([^/]+)|/v1/models/(.+))")

_ADMINISTRATION = Route(DENIED, "denied")

_PATTERNS: tuple[tuple[re.Pattern[bytes], Route], ...] = (
    (re.compile(rb"/v1/responses/[^/]+(?:/cancel|/input_items)?$"), Route(STICKY, "responses")),
    (re.compile(rb"/healthz/unit/[^/]+$"), Route(OWN, "unit_health", _GET)),
    (re.compile(rb"/v1/models/.+$"), Route(RouteKind.READ, "model", _GET, model=IN_PATH)),
    (
        re.compile(_TRITON_MODEL + rb"/(?:generate|generate_stream|infer)$"),
        _generate("triton", model=IN_PATH),
    ),
    (re.compile(rb"/v2(?:/health/(?:live|ready))?$"), Route(RouteKind.READ, "triton", _GET)),
    (
        re.compile(_TRITON_MODEL + rb"(?:/ready|/config)?$"),
        Route(RouteKind.READ, "triton", _GET, model=IN_PATH),
    ),
)

_TWISTED = Route(AMBIGUOUS_PATH, "devious")
_UNLISTED = Route(UNLISTED, "unlisted", model=IN_BODY)
_UNKNOWN = Route(UNLISTED, "unlisted", model=IN_BODY)
"""Nothing says that it is no administration."""
_READABLE = Route(UNLISTED, "unlisted", model=IN_BODY)
"""The same, unless it is only read."""


def find_route(path: bytes) -> Route:
    """The route of a path (without its query). Trailing slashes count: engines do not ignore them either."""
    route = _EXACT.get(path)
    if route is not None:
        return route
    # Engines decode a path before they match it, and a proxy before them may have done so too.
    decoded = _decoded(path) if b"%" in path else path
    if decoded is None or _DEVIOUS.search(decoded):
        return _TWISTED
    for pattern, row in _PATTERNS:
        if pattern.match(path):
            return row
    return _BY_STANDING[standing(decoded)]


_BY_STANDING = {
    Standing.ADMINISTERS: _ADMINISTRATION,
    Standing.HARMLESS: _UNLISTED,
    Standing.READABLE: _READABLE,
    Standing.UNKNOWN: _UNKNOWN,
}


def _decoded(path: bytes) -> bytes | None:
    """What a path names, however often it was encoded; None: too often."""
    for _ in range(_ENCODED_MOST):
        before, path = path, unquote_to_bytes(path)
        if path == before:
            return path
    return None


def model_in(path: bytes) -> str | None:
    """The model that a path names: its engine goes by that, whatever is in the body."""
    found = _BY_PATH.match(path)
    return None if found is None else unquote((found[1] or found[2]).decode("latin-1"))


def with_path_model(target: bytes, new: str) -> bytes:
    """A path, with its query, that names a model, with another one."""
    found = _BY_PATH.match(target.partition(b"?")[0])
    assert found is not None
    begin, end = found.span(found.lastindex or 0)
    return target[:begin] + quote(new, safe="").encode() + target[end:]


def template(path: bytes) -> str:
    """The path, if it is the same for all requests of its route; empty if parts of it are names."""
    return path.decode() if path in _EXACT else ""


def why_refused(route: Route, method: bytes, *, pass_unlisted: bool) -> Failure | None:
    """Why the gate refuses a path or method; None when it does not."""
    if route.methods and method not in route.methods:
        return Failure(
            FailureKind.METHOD_NOT_ALLOWED,
            f"the method is not allowed; use {b', '.join(route.methods).decode()}",
        )
    if route.kind is GENERATE:
        # The usual case.
        return None
    if route.kind is DENIED:
        return Failure(
            FailureKind.DENIED, "the gate does not forward engine administration; call the engine directly"
        )
    if route.kind is AMBIGUOUS_PATH:
        reason = "the path has an empty segment, one of dots, or a backslash; send a normalized path"
        return Failure(FailureKind.BAD_REQUEST, reason)
    if route.kind is UNLISTED and not pass_unlisted:
        reason = "the gate does not forward this path; see pass_unlisted in its configuration"
        return Failure(FailureKind.UNKNOWN_PATH, reason)
    methods = _READ_METHODS if route is _READABLE else _HARMLESS_METHODS
    if route is _UNKNOWN or (route.kind is UNLISTED and method not in methods):
        reason = (
            "the gate does not forward what may be engine administration: a method that changes things, or a "
            "path that it cannot tell from that; call the engine directly"
        )
        return Failure(FailureKind.DENIED, reason)
    return None


# Which paths of an engine administer it, known by their words. Pure.
#
# Engines get new ones with each release: so a path is not looked up, its words are. One with a word of
# administration is refused; one of words that compute or tell is harmless, as is what is made below a
# versioned API, by its id; of any other nobody knows. What engines serve today is compared in
# tests/unit/request/test_routes.py.


_ADMINISTER = frozenset(
    b"abort aborts activate adapter adapters add admin administration alloc allocate attach ban begin "
    b"cache caches checker checkpoint clear close collective commit configure connect continue "
    b"control copy cordon corpora corpus cors create cuda deactivate debug delete demote deploy "
    b"destroy detach disable disconnect down drain drop dump dumper elastic enable end erase evacuate "
    b"evict exec execute exit expert experts expire export failover fault faults finish flush freeze "
    b"gc gpu group groups halt hibernate hicache import init initialise initialize inject install "
    b"internal invalidate kick kill level load lock log logger logging logs lora loras memory migrate "
    b"mode mount offload open park patch pause paused pin prefetch profile profiler profiling promote "
    b"props proxy prune pull purge push put quiesce quit ray rebalance reboot reclaim record "
    b"recording recover refit refresh register reindex reinit release reload remote remove rename "
    b"replace repository reset resize restart restore resume retire rl role roles rollback rotate rpc "
    b"run save scale scaling schedule scheduler send session sessions set setting settings shell "
    b"shutdown sleep sleeping slot slots slow snapshot sources spec stall standby start state states "
    b"stop stream streams suspend swap switch sync system tensor tensors terminate thaw throttle tool "
    b"tools trace tracing train transfer truncate unban uncordon undeploy undrain unfreeze uninstall "
    b"unload unlock unmount unpause unpin unregister unset up update updates upgrade upload vacuum "
    b"wake wakeup warm warmup weight weights wipe write zap".split()
)
_STEMS = re.compile(
    rb"abort|adapter|cache|flush|lora|offload|pause|profil|reload|repositor|sharedmem|shutdown|sleep|unload|wakeup"
    rb"|weight"
)
"""The same where words are not kept apart."""
_WHOLE = frozenset(
    (b"/server_info", b"/get_server_info", b"/kv_event_sources", b"/models", b"/is_scaling_elastic_ep")
)
"""They show addresses, or other models than the gate's; or they administer with another method."""
_KNOWN = frozenset((b"/", b"/load", b"/generate_stream", b"/v1/audio/speech/stream"))
"""They compute or tell, whatever their words are."""
_HARMLESS = frozenset(
    b"all answer api apply ask audio call chat classification classify completion completions count "
    b"decisions decode detokenization detokenize doc docs embed embedding embeddings encode favicon "
    b"function generate generation generations generative get health healthz ico image images infer "
    b"inference infill info input invocations json list live livez loads message messages metrics model "
    b"moderations openapi parse ping pooling predict predictions question ready readyz reasoning redoc "
    b"rerank reranking response responses score scoring separate similarity size sparse speech stats "
    b"status template text token tokenize tokenizer tokens transcribe transcriptions translate "
    b"translations version vertex video videos world".split()
)
_BELOW_VERSION = _HARMLESS | frozenset(
    b"asr assistants batch batches calls cancel client complete containers content conversations derender "
    b"document documents edits evals file files item items license manifest meshes metadata models ocr "
    b"parts ps query rank ranking realtime remix render runs search secrets segment show sound speaker "
    b"speakers steps stores stt summarize systemone tags thread threads timestamps tts vad variations "
    b"vector voice voices".split()
)
"""Words of APIs of users, where a version says that it is one."""
_VERSIONED = re.compile(rb"(?:/[a-z]+)?/v[0-9][a-z0-9]*/|/api/(?:v[0-9]+/)?")
_DIGIT = re.compile(rb"[0-9]")
_WORDS = re.compile(rb"[a-z0-9]+")
_CAMEL = re.compile(rb"(?<=[a-z0-9])(?=[A-Z])")


def standing(path: bytes) -> Standing:
    """What is known of a path that is not in the table, decoded."""
    plain = path.lower()
    base = plain.rstrip(b"/") or b"/"
    if base in _KNOWN:
        return Standing.HARMLESS
    words = {*_WORDS.findall(plain), *_WORDS.findall(_CAMEL.sub(b"_", path).lower())}
    if base in _WHOLE or not words.isdisjoint(_ADMINISTER) or _STEMS.search(plain):
        return Standing.ADMINISTERS
    if words and words <= _HARMLESS:
        return Standing.HARMLESS
    found = _VERSIONED.match(base)
    return Standing.UNKNOWN if found is None else _below_version(base[found.end() :].split(b"/"))


def _below_version(parts: list[bytes]) -> Standing:
    """What is known of the parts of a path behind a version: each is known, or an id (with a digit)."""
    known = [bool(words := _WORDS.findall(part)) and _BELOW_VERSION.issuperset(words) for part in parts]
    if not known[0]:
        return Standing.UNKNOWN
    if all(is_known or _DIGIT.search(part) for is_known, part in zip(known, parts, strict=True)):
        return Standing.HARMLESS
    return Standing.READABLE


# CORS: which pages of other sites a browser lets use the gate (https://fetch.spec.whatwg.org). Pure.


ORIGIN_FIELD = b"origin"
METHOD_FIELD, NAMES_FIELD = b"access-control-request-method", b"access-control-request-headers"
FIELDS = frozenset({ORIGIN_FIELD, METHOD_FIELD, NAMES_FIELD})
ENGINES_LINES = (b"access-control-", b"vary: origin\r\n", b"vary: Origin\r\n")
"""How lines of a unit begin that the gate's own replace: browsers refuse an answer with both."""
OWN_LINES = (b"vary: origin\r\n", b"access-control-")
"""How the gate's own lines begin."""
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: ?, ?[A-Za-z0-9!#$%&'*+.^_`|~-]+){0,63}")
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED = (
    b"retry-after, x-request-id, x-should-retry, x-cellgate-model, x-cellgate-fallback-from, "
    b"x-cellgate-reason, x-cellgate-unit-request-id, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
    b"x-ratelimit-reset-tokens"
)
"""Header lines of answers that a page may read."""


class CorsRules:
    """The rules of a configuration."""

    def __init__(self, cors: Cors) -> None:
        self._all = "*" in cors.origins
        self._origins = frozenset(origin.encode() for origin in cors.origins)
        self._max_age = b"access-control-max-age: %d\r\n" % cors.max_age_s

    def lines(self, request: Request) -> bytes:
        """Header lines for the answer to `request`. Units do not learn its origin: they would answer it."""
        given = dict(request.routing)
        origin = given.get(ORIGIN_FIELD)
        vary = b"" if self._all else b"vary: origin\r\n"
        if origin is None:
            return vary
        request.lines = [
            line for line in request.lines if not line.startswith(tuple(b"%b:" % f for f in FIELDS))
        ]
        if not self._all and origin not in self._origins:
            return vary
        shown = b"*" if self._all else origin
        allowed = b"%baccess-control-allow-origin: %b\r\n" % (vary, shown)
        if request.method != b"OPTIONS" or METHOD_FIELD not in given:
            return allowed + b"access-control-expose-headers: %b\r\n" % _EXPOSED
        return allowed + self._permissions(given.get(NAMES_FIELD, b"").strip())

    def _permissions(self, names: bytes) -> bytes:
        """What a preflight is told."""
        lines = b"access-control-allow-methods: %b\r\n%b" % (_METHODS, self._max_age)
        if _NAMES.fullmatch(names):
            lines += b"access-control-allow-headers: %b\r\n" % names
        return lines


def cors_rules(cors: Cors | None) -> CorsRules | None:
    """None: no page of another site is let in."""
    return None if cors is None else CorsRules(cors)


# How a request names its unit, and what a gate answers that cannot use that unit. Pure.
#
# `x-cellgate-unit: NAME` is sent by a gate to another gate, for one of its units. The other fields are those
# of the Gateway API Inference Extension, whose endpoint pickers know units by ADDRESS:PORT. An address proves
# nothing here: what comes from an ingress may have been written by its clients. So a token is asked for.


ENDPOINT_FIELD = b"x-gateway-destination-endpoint"
"""ADDRESS:PORT of units, the best first; the others are used when it fails."""
SUBSET_FIELD = b"x-gateway-destination-endpoint-subset"
"""ADDRESS:PORT of the units among which the gate may choose."""
REASON_FIELD = b"x-cellgate-reason"
"""In a 503 of a gate: why the unit is not available there, in one word."""

_ELSEWHERE = frozenset({FailureKind.NO_UNIT, FailureKind.FULL, FailureKind.LATE, FailureKind.EVICTED})
_FINAL = FailureKind.POISON_SUSPECTED
_BUSY = frozenset(kind.value.encode() for kind in (FailureKind.BUSY, FailureKind.FULL, FailureKind.LATE))


class Placement(NamedTuple):
    """The units a request may go to; `ordered`: they are to be tried in this order."""

    units: tuple[str, ...]
    ordered: bool


def may_place(fields: Fields, token: str | None) -> bool:
    """Whether a request may choose its unit, or ask for an explanation: it has the token."""
    given = next((value for name, value in fields if name == TOKEN_FIELD), None)
    if given is None or token is None:
        return False
    return is_token(given, token) or is_token(given, gates_token(token))


def read_placement(fields: Fields, board: Board) -> Placement:
    """The units that the fields of a request name, as far as they exist."""
    given = dict(fields)
    if (name := given.get(UNIT_FIELD)) is not None:
        unit = name.decode("utf-8", "replace")
        return Placement((unit,) if unit in board.units else (), ordered=True)
    at = {_authority(state.unit.url): state.unit.name for state in board}
    inside, wanted = (_named(given.get(field), at) for field in (SUBSET_FIELD, ENDPOINT_FIELD))
    if wanted is None:
        return Placement(inside or (), ordered=False)
    return Placement(tuple(unit for unit in wanted if inside is None or unit in inside), ordered=True)


def not_trusted(*, is_placed: bool) -> Failure:
    """The failure for a request without the token that chooses a unit or asks for an explanation."""
    what = "chooses its unit" if is_placed else "asks why its unit was chosen"
    return Failure(
        FailureKind.NOT_TRUSTED, f"a request that {what} needs the admin token in x-cellgate-token"
    )


def not_here(failure: Failure, board: Board, unit: str | None) -> tuple[Failure, str]:
    """A refusal for a client that has chosen the unit and may choose another; and its reason in one word."""
    kind = failure.kind
    if kind not in _ELSEWHERE and kind.row.fault is not Fault.UNIT:
        return failure, ""
    reason = why_not(board, unit) if kind is FailureKind.NO_UNIT else kind.value
    return Failure(FailureKind.NOT_HERE, f"{reason}: {failure.message}"), reason


def why_not(board: Board, unit: str | None) -> str:
    """Why a unit cannot take a request, in one word; `unit` None: no particular one."""
    if unit is None:
        return FailureKind.NO_UNIT.value
    if (state := board.units.get(unit)) is None:
        return "unknown"
    if state.drained:
        return "drained"
    return state.case.verdict.value if state.hold is None else "on_hold"


def is_final(status: int, fields: Fields) -> bool:
    """Whether a refusal of the gate in front of a unit must reach the client: no other unit may get the
    request.
    """
    return status == _FINAL.row.status and (REASON_FIELD, _FINAL.value.encode()) in fields


def gate_refusal(status: int, fields: Fields) -> FailureKind | None:
    """The kind of a refusal by the gate in front of a unit; None when the answer is the unit's own."""
    reason = next((value for name, value in fields if name == REASON_FIELD), None) if status == 503 else None
    if reason is None:
        return None
    # A full unit is healthy: this is no evidence, and asking the next unit draws on the retry budget.
    return FailureKind.BUSY if reason in _BUSY else FailureKind.NOT_HERE


def _named(value: bytes | None, at: Mapping[str, str]) -> tuple[str, ...] | None:
    """The units at a list of addresses; None when there is no list."""
    if value is None:
        return None
    parts = (part.strip() for part in value.decode("latin-1").split(","))
    return tuple(at[part] for part in parts if part in at)


@lru_cache(4096)
def _authority(url: str) -> str:
    """ADDRESS:PORT of a unit's URL."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


# Reads the routing headers of a request: session, tenant, priority, deadline.


NAME_CHARS = 256
"""The longest name of a session or tenant, in characters."""

_TENANT = Ask._fields.index("tenant")
_new = tuple.__new__
_ENVOY = b"x-envoy-expected-rq-timeout-ms"

Read = Callable[[Ask, str, float], Ask]
"""The ask with the value of one header, read at a time. Raises ValueError with what was expected."""


class RoutingHeaders:
    """Reads the routing header lines: those of `names`. What a proxy has set wrongly is ignored."""

    def __init__(self, headers: HeaderNames) -> None:
        self._reads: dict[bytes, Read] = {
            headers.session.encode(): _session,
            headers.tenant.encode(): _tenant,
            headers.priority.encode(): _priority,
            b"x-slo-ttft-ms": _deadline,
            b"authorization": _credentials,
        }
        self.names = frozenset((*self._reads, _ENVOY))

    def apply(self, ask: Ask, fields: Fields, now: float) -> Ask | Failure:
        """`ask` with the values of the routing headers, received at `now`."""
        reads = self._reads
        for name, value in fields:
            if name in reads:
                text = value.decode("latin-1")
                try:
                    ask = reads[name](ask, text, now)
                except ValueError as error:
                    line = name.decode("latin-1")
                    message = f"{line}: expected {error}, found {text[:64]!r}"
                    return Failure(FailureKind.BAD_HEADER, message, param=line)
            elif name == _ENVOY:
                ask = _envoys(ask, value.decode("latin-1"), now)
        return ask


def _envoys(ask: Ask, value: str, now: float) -> Ask:
    """How long Envoy waits for the whole answer: a first token that comes later is not read."""
    try:
        return _deadline(ask, value, now)
    except ValueError:
        return ask


def _session(ask: Ask, value: str, _now: float) -> Ask:
    return ask._replace(session=_name(value))


def _tenant(ask: Ask, value: str, _now: float) -> Ask:
    return ask._replace(tenant=_name(value))


def _name(value: str) -> str:
    if not 0 < len(value) <= NAME_CHARS:
        raise ValueError(f"a name of 1 to {NAME_CHARS} characters")
    return value


def _priority(ask: Ask, value: str, _now: float) -> Ask:
    try:
        number = int(value)
    except ValueError:
        number = PRIORITY_LAST + 1
    if abs(number) > PRIORITY_LAST:
        raise ValueError(f"an integer from {-PRIORITY_LAST} to {PRIORITY_LAST}, lower goes first")
    return ask._replace(priority=number)


def _deadline(ask: Ask, value: str, now: float) -> Ask:
    try:
        left_ms = float(value)
    except ValueError:
        left_ms = 0.0
    if not 0.0 < left_ms < inf:
        raise ValueError("milliseconds above 0")
    return ask._replace(deadline_at=min(ask.deadline_at, now + left_ms / 1000.0))


def _credentials(ask: Ask, value: str, _now: float) -> Ask:
    """Requests with the same credentials are of the same tenant, unless a header names one."""
    if ask.tenant:
        return ask
    # As _replace does, in a fifth of the time: nearly every request has credentials.
    fields = list(ask)
    fields[_TENANT] = xxh3_64_hexdigest(value.encode())
    return _new(Ask, fields)
