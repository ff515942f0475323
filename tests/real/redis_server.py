"""A real redis-server for tests, which skip where there is none."""

from __future__ import annotations

from pathlib import Path

from loadtests.kit import redis_server
from tests.real.programs import find


class RedisServer(redis_server.RedisServer):
    """Runs within its context, on a Unix socket; `options` are its command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, *options, program=find("redis-server"))
