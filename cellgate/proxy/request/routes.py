"""The table of paths. A path that is not here is refused, unless `pass_unlisted` is on.

GENERATE asks a unit for work: retry, load, affinity, evidence. READ asks any usable unit for a fact.
STICKY asks the unit that created the object. OWN is answered by the gate. DENIED is engine administration:
an operator who may pause or reload an engine does so at the engine. AMBIGUOUS_PATH is of paths that have
empty or dot segments, or a backslash (/v1/models/../../pause): programs read them differently, so they are
not forwarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from urllib.parse import quote, unquote, unquote_to_bytes

from xxhash import xxh3_64_hexdigest

from cellgate.proxy.config.key_file import PRIORITY_LAST
from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import Fields
from cellgate.proxy.request.administration import Standing, standing
from cellgate.proxy.request.answer_shape import SHAPES, AnswerShape
from cellgate.router.nouns import Ask


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
        # What is stored may be anything: a job that runs, one that was cancelled.
        shape = None if self.kind is STICKY else SHAPES.get(self.name)
        object.__setattr__(self, "shape", shape)


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
_AMBIGUOUS = re.compile(rb"//|/\.\.?(?:[/;]|$)|\\")

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

_AMBIGUOUS_ROUTE = Route(AMBIGUOUS_PATH, "devious")
_UNLISTED = Route(UNLISTED, "unlisted", model=IN_BODY)
_UNLISTED_ROUTE = Route(UNLISTED, "unlisted", model=IN_BODY)
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
    if decoded is None or _AMBIGUOUS.search(decoded):
        return _AMBIGUOUS_ROUTE
    for pattern, row in _PATTERNS:
        if pattern.match(path):
            return row
    return _BY_STANDING[standing(decoded)]


_BY_STANDING = {
    Standing.ADMINISTERS: _ADMINISTRATION,
    Standing.HARMLESS: _UNLISTED,
    Standing.READABLE: _READABLE,
    Standing.UNKNOWN: _UNLISTED_ROUTE,
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
    if route is _UNLISTED_ROUTE or (route.kind is UNLISTED and method not in methods):
        reason = (
            "the gate does not forward what may be engine administration: a method that changes things, or a "
            "path that it cannot tell from that; call the engine directly"
        )
        return Failure(FailureKind.DENIED, reason)
    return None


# Reads the routing headers of a request: session, tenant, priority, deadline.


NAME_CHARS = 256
"""The longest name of a tenant, in characters; of a session so many count."""
_NO_RANK = 1 << 30

_TENANT = Ask._fields.index("tenant")
_new = tuple.__new__
_ENVOY = b"x-envoy-expected-rq-timeout-ms"

Read = Callable[[Ask, str, float], Ask]
"""The ask with the value of one header, read at a time. Raises ValueError with what was expected."""


class RoutingHeaders:
    """Reads the routing header lines: those of `names`. What a proxy has set wrongly is ignored."""

    def __init__(self, headers: HeaderNames) -> None:
        self._sessions = {name.encode(): rank for rank, name in enumerate(headers.sessions)}
        self._reads: dict[bytes, Read] = {
            headers.tenant.encode(): _tenant,
            headers.priority.encode(): _priority,
            b"x-slo-ttft-ms": _deadline,
            b"authorization": _credentials,
        }
        self.names = frozenset((*self._reads, *self._sessions, _ENVOY))

    def apply(self, ask: Ask, fields: Fields, now: float, best: int = _NO_RANK) -> Ask | Failure:
        """`ask` with the values of the routing headers, received at `now`. Only headers of sessions that come
        before the place `best` in their list count.
        """
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
            elif value and (rank := self._sessions.get(name, _NO_RANK)) < best:
                # Other programs may mean something else by these names: nothing in them is an error.
                best, ask = rank, ask._replace(session=value[:NAME_CHARS].decode("latin-1"))
        return ask


def _envoys(ask: Ask, value: str, now: float) -> Ask:
    """How long Envoy waits for the whole answer: a first token that comes later is not read."""
    try:
        return _deadline(ask, value, now)
    except ValueError:
        return ask


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
