"""Connections to Redis: from a URL, with timeouts, and with errors that show no password."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cellgate.proxy.config.settings import RedisAccess, Tls
from cellgate.proxy.logs.text import one_line

EXCHANGE_S = 1.0
"""How long one exchange may take before the connection is given up."""

_URL = re.compile(r"rediss?://[^@/?#\s]+(/\d*)?|unix:///[^@?#\s]+(\?db=\d+)?", re.ASCII)
_NO_URL = (
    "expected a URL such as redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH, without user and "
    "password: these have keys of their own (docs/redis.md)"
)
_NO_TLS = Tls()
_REFUSED = "invalid username-password pair"

Connect = Callable[[], Redis]


def connector(access: RedisAccess, tls: Tls = _NO_TLS) -> Connect:
    """A factory of clients for the Redis at a URL: redis://, rediss:// (verified by `tls.ca`, with
    `tls.unit_cert` as client certificate), or unix://.

    Raises ValueError when the URL is invalid or has a password, without showing it.
    """
    if _URL.fullmatch(access.url) is None:
        raise ValueError(_NO_URL)
    secured: dict[str, Any] = {
        "ssl_ca_certs": tls.ca,
        "ssl_certfile": tls.unit_cert,
        "ssl_keyfile": tls.unit_key,
    }

    def connect() -> Redis:
        client: Redis = Redis.from_url(
            access.url,
            username=access.username,
            password=access.password,
            protocol=2,
            socket_connect_timeout=EXCHANGE_S,
            # A timeout for each answer doubles the cost of an exchange: the caller limits the exchange as a
            # whole.
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            **(secured if access.url.startswith("rediss:") else {}),
        )
        return client

    try:
        connect()
    except Exception as error:
        raise ValueError(_NO_URL) from error
    return connect


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
