"""Where Redis is: one server, a primary that Sentinels know, or a Cluster; as the operator wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from cellgate.proxy.config.settings import Address
from cellgate.proxy.config.values import address

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
