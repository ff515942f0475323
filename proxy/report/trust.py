"""Who may see and do what on the admin port. Pure.

Probes and scrapers need no secret: liveness, readiness and metrics are for everyone. So is the status page,
which is empty without what it asks for. All else shows addresses or changes rotation, and needs a peer on
this machine or the token.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address

OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/metrics"})

_NOT_FROM_HERE = ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "Origin")
"""A loopback peer that sends one of these speaks for somebody else: a proxy's client, a page in a browser."""


def refusal(
    method: str, path: str, peer: str | None, headers: Mapping[str, str], token: str | None
) -> tuple[HTTPStatus, str] | None:
    """None when the request is allowed, else the status and what the caller can do about it."""
    if path in OPEN_PATHS and method in ("GET", "HEAD"):
        return None
    if is_loopback(peer) and not any(name in headers for name in _NOT_FROM_HERE):
        return None
    if token is None:
        return HTTPStatus.FORBIDDEN, (
            "this is for callers on the gate's own machine, and no admin token is configured: call it from "
            "there (not through a proxy), or set an admin token and send `Authorization: Bearer TOKEN`"
        )
    if _has_token(headers.get("Authorization", ""), token):
        return None
    return HTTPStatus.UNAUTHORIZED, (
        "this needs the gate's admin token: send `Authorization: Bearer TOKEN`, or call from the gate's own "
        "machine (not through a proxy)"
    )


def is_loopback(peer: str | None) -> bool:
    """Whether an address (no port) is this machine talking to itself."""
    try:
        address = ip_address(peer or "")
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _has_token(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    # The time this takes must not tell how much of a guess was right.
    same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token.encode())
    return scheme.lower() == "bearer" and same
