"""Connections to Redis: from a URL, bounded in time, and what went wrong in words that hold no password."""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError

from proxy.report.log import one_line

EXCHANGE_S = 1.0
"""How long one exchange may take before the connection is given up."""

_REFUSED = "invalid username-password pair"

Connect = Callable[[], Redis]


def connector(url: str, *, username: str | None = None, password: str | None = None) -> Connect:
    """What makes a client for a URL (redis://, rediss:// or unix://).

    Raises ValueError, which does not name the password, when the URL is none.
    """

    def connect() -> Redis:
        client: Redis = Redis.from_url(
            url,
            username=username,
            password=password,
            protocol=2,
            socket_connect_timeout=EXCHANGE_S,
            socket_timeout=EXCHANGE_S,
            retry=Retry(NoBackoff(), 0),
        )
        return client

    try:
        connect()
    except Exception as error:
        raise ValueError("not a Redis URL like redis://HOST:PORT/0, rediss://… or unix:///PATH") from error
    return connect


def is_refusal(error: Exception) -> bool:
    """Whether the credentials were refused."""
    # While a connection is set up, redis-py turns the server's answer into a plain ConnectionError.
    return isinstance(error, (AuthenticationError, NoPermissionError)) or _REFUSED in str(error)


def in_words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, TimeoutError):
        return f"nothing came within {EXCHANGE_S:g} s"
    if is_refusal(error):
        return "it refuses these credentials"
    return one_line(f"{type(error).__name__}: {error}")[:200]
