"""Connections to Redis: from a URL, with timeouts, and with errors that show no password."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cellgate.proxy.config.settings import Address, RedisAccess, Tls
from cellgate.proxy.logs.text import one_line
from cellgate.proxy.sharing.redis_client import EXCHANGE_S, RedisClient, ServerClient
from cellgate.proxy.sharing.redis_cluster import NODE_S, ClusterClient
from cellgate.proxy.sharing.redis_url import NO_URL, RedisKind, RedisUrl, read_url

_NO_TLS = Tls()
_REFUSED = "invalid username-password pair"
_SENTINEL_USER = "default"
"""With this name a Sentinel that wants no password accepts any."""

Connect = Callable[[], RedisClient]


def connector(access: RedisAccess, tls: Tls = _NO_TLS) -> Connect:
    """A factory of clients for the Redis at a URL (redis_url.py). TLS is verified by `tls.ca`, with
    `tls.unit_cert` as client certificate.

    Raises ValueError when the URL is invalid or has a password, without showing it.
    """
    url = read_url(access.url)
    options = _options(access, url, tls)
    makers: dict[RedisKind, Connect] = {
        RedisKind.SERVER: lambda: ServerClient(Redis.from_url(url.text, **options)),
        RedisKind.SENTINEL: lambda: _by_sentinel(access, url, options),
        RedisKind.CLUSTER: lambda: ClusterClient(url.hosts, lambda at: _node(at, options)),
    }
    try:
        makers[url.kind]()
    except Exception as error:
        raise ValueError(NO_URL) from error
    return makers[url.kind]


def _options(access: RedisAccess, url: RedisUrl, tls: Tls) -> dict[str, Any]:
    """Of each connection."""
    options: dict[str, Any] = {
        "username": access.username,
        "password": access.password,
        "protocol": 2,
        "socket_connect_timeout": EXCHANGE_S,
        # A timeout for each answer doubles the cost of an exchange: the caller limits it as a whole.
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
    }
    if not url.is_secured:
        return options
    secured = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.unit_cert, "ssl_keyfile": tls.unit_key}
    # A URL says itself that it wants TLS.
    return options | secured | ({} if url.kind is RedisKind.SERVER else {"ssl": True})


def _by_sentinel(access: RedisAccess, url: RedisUrl, options: dict[str, Any]) -> ServerClient:
    """A client of the primary. Sentinels are asked one after the other; the one that answered is the first to
    be asked next time.
    """
    asking = options | {"socket_connect_timeout": NODE_S, "socket_timeout": NODE_S}
    asking |= {"username": _SENTINEL_USER if access.password else None}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(at.host, at.port) for at in url.hosts], sentinel_kwargs=asking, **options
    )
    return ServerClient(sentinel.master_for(url.primary, db=url.database), sentinel.sentinels)


def _node(at: Address, options: dict[str, Any]) -> Redis:
    return Redis(host=at.host, port=at.port, **options)


def is_refusal(error: Exception) -> bool:
    """Whether the credentials were refused."""
    # While a connection is set up, redis-py turns the server's answer into a plain ConnectionError.
    return isinstance(error, (AuthenticationError, NoPermissionError)) or _REFUSED in str(error)


def refusal_reason(error: ResponseError) -> str:
    """Why Redis does not accept writes."""
    if isinstance(error, NoPermissionError):
        return "its access control list does not let this user write there: docs/redis.md has the rights"
    return "it is full, or read-only"


def in_words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, (TimeoutError, RedisTimeoutError)):
        return f"no answer within {EXCHANGE_S:g} s"
    if is_refusal(error):
        return "it rejects these credentials"
    return one_line(f"{type(error).__name__}: {error}")[:200]
