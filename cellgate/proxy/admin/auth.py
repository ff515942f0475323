"""Who may see and do what on the admin port. Pure.

Probes and scrapers need no secret: liveness, readiness and metrics are for everyone. So is the status page,
which has no data of its own. Everything else shows addresses or changes rotation, and needs the token or a
trusted peer: this machine, or one in a network that the configuration names. A caller that sends a token is
judged by it alone: a wrong one is refused from anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

from cellgate.proxy.config.trusted_peers import Peers, is_token

OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/metrics"})

_NOT_FROM_HERE = ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "Origin")
"""A trusted peer that sends one of these acts for another: a proxy's client, a page in a browser."""


def unencrypted(path: str, peer: str | None) -> tuple[HTTPStatus, str] | None:
    """Why a port with TLS refuses a request that came without: a token must not travel like that."""
    if path in OPEN_PATHS or _is_loopback(peer or ""):
        return None
    return HTTPStatus.FORBIDDEN, "this port speaks TLS with callers of other machines: use https://"


def refusal(
    method: str,
    path: str,
    peer: str | None,
    headers: Mapping[str, str],
    token: str | None,
    peers: Peers,
    *,
    certified: bool = False,
) -> tuple[HTTPStatus, str] | None:
    """None when the request is allowed, else the status and what the caller can do about it. `certified`: it
    came with a client certificate that counts like the token.
    """
    if path in OPEN_PATHS and method in ("GET", "HEAD"):
        return None
    given = _shown_token(headers)
    if given is not None:
        return None if token is not None and is_token(given, token) else _wrong(token)
    speaks_for_itself = not any(name in headers for name in _NOT_FROM_HERE)
    if certified and speaks_for_itself:
        return None
    if peers.trusts(peer or "") and speaks_for_itself and _asks_for_here(peer or "", headers):
        return None
    if token is None:
        return HTTPStatus.FORBIDDEN, (
            "this is for callers on the gate's own machine or in a network of `trusted`, and no admin token "
            "is configured: call it from there (not through a proxy), or set an admin token and send "
            "`Authorization: Bearer TOKEN`"
        )
    return HTTPStatus.UNAUTHORIZED, (
        "this needs the gate's admin token: send `Authorization: Bearer TOKEN`, or call from the gate's own "
        "machine or a network of `trusted` (not through a proxy)"
    )


def _shown_token(headers: Mapping[str, str]) -> bytes | None:
    """The token that the caller sends, if any: other schemes of authorization are not for the gate."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    return given.encode(errors="surrogateescape") if scheme.lower() == "bearer" else None


def _wrong(token: str | None) -> tuple[HTTPStatus, str]:
    why = (
        "because this gate has no admin token"
        if token is None
        else "because it is not the gate's admin token"
    )
    return HTTPStatus.UNAUTHORIZED, (
        f"the token was rejected, {why}: send the right one, or none from the gate's own machine or a "
        "network of `trusted`"
    )


def _asks_for_here(peer: str, headers: Mapping[str, str]) -> bool:
    """Whether a request from this machine is meant for it: by an address, or as localhost.

    A page of somebody else may have its name made to point here (DNS rebinding): then the browser sends that.
    """
    host = headers.get("Host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return not _is_loopback(peer) or name in ("", "localhost") or _is_address(name)


def _is_loopback(peer: str) -> bool:
    return _is_address(peer) and ipaddress.ip_address(peer).is_loopback


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False
