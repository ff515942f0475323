"""`RedisUrl`: where Redis is, as the operator wrote it: one server, one that Sentinels know, or a Cluster.
Connections to it, with timeouts, and with errors that show no password.

In this order: `RedisUrl`, `connector`, `Outage`, `in_words`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from redis.asyncio import Redis, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from cellgate.extras.redis_client.cluster import NODE_S, ClusterClient
from cellgate.extras.redis_client.servers import EXCHANGE_S, RedisClient, ServerClient
from cellgate.proxy.config.checks import address
from cellgate.proxy.config.settings import Address, RedisAccess, Tls
from cellgate.proxy.observe.text import one_line
from cellgate.proxy.process.certificates import note_shown

NO_URL = (
    "expected a URL such as redis://HOST:PORT/0, rediss://HOST:PORT/0, unix:///PATH, "
    "redis+sentinel://HOST:PORT,HOST:PORT/NAME or redis+cluster://HOST:PORT,HOST:PORT, without user and "
    "password: these have keys of their own (docs/redis.md)"
)
_SERVER = re.compile(r"rediss?://[^@/?#\s,]+(/\d*)?|unix:///[^@?#\s]+(\?db=\d+)?", re.ASCII)
_SENTINEL = re.compile(
    r"rediss?\+sentinel://(?P<hosts>[^@/?#\s]+)/(?P<name>[\w.-]+)(/(?P<db>\d{1,5}))?", re.ASCII
)
_CLUSTER = re.compile(r"rediss?\+cluster://(?P<hosts>[^@/?#\s]+)/?", re.ASCII)
_SENTINEL_PORT, _PORT = 26379, 6379


class RedisKind(Enum):
    """What answers there."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`hosts` are Sentinels, or nodes of a Cluster; `primary` is the name under which Sentinels know it."""

    text: str = field(repr=False)
    kind: RedisKind = RedisKind.SERVER
    hosts: tuple[Address, ...] = ()
    primary: str = ""
    database: int = 0

    @property
    def is_secured(self) -> bool:
        """Whether connections are TLS."""
        return self.text.startswith("rediss")


def read_url(text: str) -> RedisUrl:
    """Raises ValueError, without showing what may be a password."""
    if _SERVER.fullmatch(text):
        return RedisUrl(text)
    if found := _SENTINEL.fullmatch(text):
        hosts = _hosts(found["hosts"], _SENTINEL_PORT)
        return RedisUrl(text, RedisKind.SENTINEL, hosts, found["name"], int(found["db"] or 0))
    if found := _CLUSTER.fullmatch(text):
        return RedisUrl(text, RedisKind.CLUSTER, _hosts(found["hosts"], _PORT))
    raise ValueError(NO_URL)


def _hosts(text: str, port: int) -> tuple[Address, ...]:
    has_port = re.compile(r".*:\d+", re.ASCII)
    try:
        return tuple(address(one if has_port.fullmatch(one) else f"{one}:{port}") for one in text.split(","))
    except ValueError as error:
        raise ValueError(NO_URL) from error


_NO_TLS = Tls()
_COMMAND_REFUSED = "invalid username-password pair"
_SENTINEL_USER = "default"
"""With this name a Sentinel that wants no password accepts any."""

Connect = Callable[[], RedisClient]


def connector(access: RedisAccess, tls: Tls = _NO_TLS) -> Connect:
    """A factory of clients for the Redis at a URL. TLS is verified by `tls.ca`, with
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
    secured: dict[str, Any] = {
        "ssl_ca_certs": tls.ca,
        "ssl_certfile": tls.unit_cert,
        "ssl_keyfile": tls.unit_key,
        "redis_connect_func": _note_certificate,
    }
    # A URL says itself that it wants TLS.
    return options | secured | ({} if url.kind is RedisKind.SERVER else {"ssl": True})


async def _note_certificate(connection: Any) -> None:
    """What redis-py does with a new connection; and when the certificate of the other end ends."""
    await connection.on_connect()
    note_shown("Redis", connection._writer.get_extra_info("peercert"))


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
    return isinstance(error, (AuthenticationError, NoPermissionError)) or _COMMAND_REFUSED in str(error)


def refusal_reason(error: ResponseError) -> str:
    """Why Redis does not accept writes."""
    if isinstance(error, NoPermissionError):
        return "its access control list does not let this user write there: docs/redis.md has the rights"
    return "it is full, or read-only"


class Outage:
    """What was said of a Redis that is away. The first reason may be that of its loss (no answer), and
    another one keep it away (a certificate): that is said as well, once.
    """

    def __init__(self) -> None:
        self._is_explained = False

    def tells(self, why: str) -> bool:
        """Whether this reason is to be said, though the outage was told of."""
        is_news = not self._is_explained and bool(_LASTS.search(why))
        self._is_explained = self._is_explained or is_news
        return is_news


_LASTS = re.compile("certificate|SSL|TLS|Name or service|rejects these credentials", re.IGNORECASE)
"""What does not pass by itself."""


def in_words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, (TimeoutError, RedisTimeoutError)):
        return f"no answer within {EXCHANGE_S:g} s"
    if is_refusal(error):
        return "it rejects these credentials"
    return one_line(f"{type(error).__name__}: {error}")[:200]
