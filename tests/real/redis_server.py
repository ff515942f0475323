"""A real redis-server for tests, which skip where there is none."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from loadtests.kit import redis_server
from loadtests.kit.redis_group import Cluster, Sentinels
from tests.real.programs import find


class RedisServer(redis_server.RedisServer):
    """Runs within its context, on a Unix socket; `options` are its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, *options, program=find("redis-server"))


def sentinels(
    folder: Path, stack: ExitStack, *, password: str = "", sentinel_password: str = ""
) -> Sentinels:
    """A primary, a replica and three Sentinels."""
    program = find("redis-server")
    return Sentinels(folder, stack, password=password, sentinel_password=sentinel_password, program=program)


def cluster(folder: Path, stack: ExitStack) -> Cluster:
    """Three primaries with a replica each."""
    return Cluster(folder, stack, find("redis-server"))
