"""CORS: which pages of other sites a browser lets use the gate (https://fetch.spec.whatwg.org). Pure."""

from __future__ import annotations

import re

from cellgate.proxy.config.settings import Cors
from cellgate.proxy.http.request import Request

ORIGIN_FIELD = b"origin"
METHOD_FIELD, NAMES_FIELD = b"access-control-request-method", b"access-control-request-headers"
FIELDS = frozenset({ORIGIN_FIELD, METHOD_FIELD, NAMES_FIELD})
ENGINES_LINES = (b"access-control-", b"vary: origin\r\n", b"vary: Origin\r\n")
"""How lines of a unit begin that the gate's own replace: browsers refuse an answer with both."""
OWN_LINES = (b"vary: origin\r\n", b"access-control-")
"""How the gate's own lines begin."""
_CORS_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: ?, ?[A-Za-z0-9!#$%&'*+.^_`|~-]+){0,63}")
_CORS_METHODS = (
    b"access-control-allow-methods: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n"
    b"access-control-max-age: 600\r\n"
)
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
        lines = _CORS_METHODS
        if _CORS_NAMES.fullmatch(names):
            lines += b"access-control-allow-headers: %b\r\n" % names
        return lines


def cors_rules(cors: Cors | None) -> CorsRules | None:
    """None: no page of another site is let in."""
    return None if cors is None else CorsRules(cors)


METHOD_FIELD, NAMES_FIELD = b"access-control-request-method", b"access-control-request-headers"
