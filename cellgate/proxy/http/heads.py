"""Heads: what is forwarded, what is dropped, what is added. Pure functions on bytes.

Header names are lower case once they are parsed. A head is held in two parts: `lines`, which are forwarded
unchanged, and `fields`, which the gate reads, replaces or drops. Hop-by-hop fields (RFC 9110, 7.6.1), and
those that `Connection` names, are never forwarded. Framing is always the gate's own.
"""

from __future__ import annotations

import re
from collections.abc import Container
from http import HTTPStatus

from cellgate.proxy.config.limits import LIMITS

Fields = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
UNIT_FIELD = b"x-cellgate-unit"
"""A gate sends this to another gate, to name one of its units."""
UNIT_ID_FIELD = b"x-cellgate-unit-request-id"
"""The `x-request-id` of an engine that gives its own: that of an answer is the gate's."""
TOKEN_FIELD = b"x-cellgate-token"
"""The admin token, or what is made of it for gates: it lets a request choose units, and be explained."""
RANK_FIELD = b"x-data-parallel-rank"
"""The data parallel rank of an engine (vLLM, SGLang) that is to answer."""
PLACING_FIELDS = frozenset(
    {UNIT_FIELD, b"x-gateway-destination-endpoint", b"x-gateway-destination-endpoint-subset"}
)
"""Where the gate itself is to send the request (see request/placement.py)."""
EXPLAIN_FIELD, CONTINUE_FIELD = b"x-cellgate-explain", b"x-cellgate-continue"
KEY_FIELDS = frozenset({b"authorization", b"x-api-key", b"api-key"})
"""What may have the key of a client: OpenAI's, Anthropic's and Azure's libraries send one each."""
HIDDEN_FIELDS = frozenset({b"cookie", b"x_api_key", b"api_key", b"sec-websocket-protocol"})
"""Where a client may have put its key by mistake. Units get none of it."""
OPTION_FIELDS = frozenset({EXPLAIN_FIELD, CONTINUE_FIELD})
"""By which a client chooses what the gate does with its request."""


def client_head(status: int, lines: list[bytes], *, own: bytes, close: bool) -> bytes:
    """The head of a response as the client gets it. `own` are the gate's own lines, with the framing."""
    return b"%b%b%b%b\r\n" % (STATUS_LINES[status], b"".join(lines), own, CLOSE_LINE if close else b"")


REQUEST_FIELDS = (
    _HOP_BY_HOP
    | PLACING_FIELDS
    | OPTION_FIELDS
    | {
        # A compressed answer could not be scanned for events, so none is asked for.
        b"accept-encoding",
        # Bodies are decoded here, so that they can be read.
        b"content-encoding",
        # The gate itself gives the report that this asks for.
        b"endpoint-load-metrics-format",
        b"expect",
        b"host",
        TOKEN_FIELD,
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        # HAProxy's, of its own servers; of no meaning here.
        b"x-haproxy-server-state",
        b"x-request-id",
    }
)
"""Fields of a request that are not forwarded unchanged."""

REPLY_FIELDS = _HOP_BY_HOP | {
    b"content-encoding",
    b"content-type",
    # The gate's own report replaces that of the engine, which covers only one unit.
    b"endpoint-load-metrics",
    b"endpoint-load-metrics-bin",
    # From a gate between this one and the unit; the ingress would take it as this gate's.
    EXPLAIN_FIELD,
    b"x-cellgate-reason",
    UNIT_FIELD,
    b"x-envoy-degraded",
    b"x-envoy-immediate-health-check-fail",
    b"x-request-id",
}
"""Fields of a reply that are not forwarded unchanged (those of the content are read, and put back)."""


SHOWN_FIELDS = frozenset(
    b"accept-ranges age allow cache-control content-disposition content-language content-location "
    b"content-range date etag expires inference-header-content-length last-modified location pragma "
    b"request-id retry-after retry-after-ms server vary www-authenticate x-content-type-options "
    b"x-correlation-id x-process-time".split()
)
SHOWN_BEGINS = (
    *(b"access-control-", b"openai-", b"anthropic-", b"triton-", b"nv-"),
    # What engines measure: Text Embeddings and Text Generation Inference.
    *(b"x-compute-", b"x-total-", b"x-validation-", b"x-queue-", b"x-inference-", b"x-time-"),
    *(b"x-prompt-", b"x-generated-", b"x-tokenization-"),
)
"""All that a unit may say to clients in a head. Anything else speaks to browsers, to load balancers (files of
an nginx, by x-accel-redirect), or as the gate does (x-cellgate-, x-ratelimit-, x-should-retry)."""


def client_lines(lines: list[bytes]) -> list[bytes]:
    """Of the lines of a unit's head those that its client gets."""
    return [
        line for line in lines if line.partition(b":")[0] in SHOWN_FIELDS or line.startswith(SHOWN_BEGINS)
    ]


class _StatusLines(dict[int, bytes]):
    def __missing__(self, status: int) -> bytes:
        return b"HTTP/1.1 %d \r\n" % status


STATUS_LINES = _StatusLines((s.value, f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode()) for s in HTTPStatus)
"""The first line of a response, by its status."""
CLOSE_LINE = b"connection: close\r\n"
_ORDINARY_TOKENS = (b"keep-alive", b"close", b"Keep-Alive", b"Close")

_ID_MAX = 128
_ID_BYTES = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:=+/@"


def connection_tokens(fields: Fields) -> set[bytes]:
    """The lower-case tokens of all `Connection` fields."""
    values = [value for key, value in fields if key == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")}


def crossing(lines: list[bytes], fields: Fields) -> list[bytes]:
    """`lines` without those that `Connection` names."""
    for key, value in fields:
        if key == b"connection" and value not in _ORDINARY_TOKENS:
            named = tuple(token + b":" for token in connection_tokens(fields) if token)
            return [line for line in lines if not line.startswith(named)]
    return lines


def head_size(lines: list[bytes], fields: Fields) -> int:
    """The bytes of a head without its first line."""
    return sum(map(len, lines)) + sum(len(name) + len(value) + 4 for name, value in fields)


def is_request_id(value: bytes) -> bool:
    """True when a client's request id may be kept: short, and harmless in a log."""
    return 0 < len(value) <= _ID_MAX and not value.translate(None, _ID_BYTES)


def own_response(status: int, body: bytes, *, own: bytes = b"", close: bool) -> bytes:
    """A whole response of the gate's own, in JSON."""
    own = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n" % (own, len(body))
    return client_head(status, [], own=own, close=close) + body


# What the lines of heads mean, by their bytes: clients and engines send the same lines again and again.
#
# Only lines that every parser reads alike are known. Whatever is the least unusual, or may change where a
# message ends, is left to the real parser, which then reads the whole head.


LINES_MAX = 2048
"""So many lines are kept; then all are forgotten, and learned again."""
FIELD_LINE_BYTES = 256
"""No longer line is kept."""

_FIELD_LINE = re.compile(rb"([A-Za-z0-9-]+): ([!-~](?:[ -~]*[!-~])?)")
_FIELD_LENGTH = re.compile(rb"[1-9][0-9]{0,9}")
_FIELD_SECRET = re.compile(rb"auth|key|token|cookie|secret|session|credential", re.IGNORECASE)
"""What may be secret is not to stay in memory when its request has gone."""
_CHANGING = frozenset({b"traceparent", b"tracestate", b"x-request-id"})
"""What is another with each request need not be kept."""

Field = tuple[bytes, bytes]
KnownLine = tuple[bytes | None, Field | None, Field | None]
"""First the line as it is forwarded, or what the gate reads of it: it is one of the two, or unusual. Last the
field of either, if it says how a request is to be routed.
"""
_UNUSUAL: KnownLine = (None, None, None)


class KnownLines(dict[bytes, KnownLine]):
    """The lines of requests, or of replies. Those with a name in `fields` are fields; of these only the ones
    in `usual` are usual.
    """

    def __init__(
        self, fields: Container[bytes], usual: Container[bytes], routing_fields: Container[bytes] = ()
    ) -> None:
        super().__init__()
        self._fields = fields
        self._usual = usual
        self.routing_fields = routing_fields

    def __missing__(self, line: bytes) -> KnownLine:
        found = _FIELD_LINE.fullmatch(line)
        if found is None:
            return _UNUSUAL
        name, value = found.groups()
        name = name.lower()
        routing = (name, value) if name in self.routing_fields else None
        known: KnownLine = (b"%b: %b\r\n" % (name, value), None, routing)
        if name in self._fields:
            known = (None, (name, value), routing) if self._is_usual(name, value) else _UNUSUAL
        if name not in KEY_FIELDS and name not in _CHANGING and not _FIELD_SECRET.search(name):
            self._keep(line, known)
        return known

    def head(self, lines: list[bytes]) -> tuple[list[bytes], Fields, Fields] | None:
        """What is forwarded of a head, its fields, and the routing fields; None if anything is unusual."""
        if len(lines) > LIMITS.header_lines:
            return None
        forwarded: list[bytes] = []
        fields: Fields = []
        routing: Fields = []
        forward = forwarded.append
        for unchanged, field, routes in map(self.__getitem__, lines):
            if unchanged is not None:
                forward(unchanged)
            elif field is not None:
                fields.append(field)
            else:
                return None
            if routes is not None:
                routing.append(routes)
        return forwarded, fields, routing

    def _keep(self, line: bytes, known: KnownLine) -> None:
        if len(line) <= FIELD_LINE_BYTES:
            if len(self) >= LINES_MAX:
                self.clear()
            self[line] = known

    def _is_usual(self, name: bytes, value: bytes) -> bool:
        match name:
            case b"content-length":
                return _FIELD_LENGTH.fullmatch(value) is not None
            case b"connection":
                return value in (b"keep-alive", b"Keep-Alive")
            case b"transfer-encoding":
                return value == b"chunked" and name in self._usual
            case _:
                return name in self._usual
