"""Sources of units beside the configuration: a file and a line here for each of config/settings.py."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from cellgate.proxy.config.settings import EcsSource, LwsSource
from cellgate.proxy.discovery import sources
from cellgate.proxy.discovery.base import Follow, Found


def _follow_lws(source: LwsSource) -> AsyncGenerator[Found, None]:
    # Imported late: it brings an HTTP client, which other gates and commands do not need.
    from cellgate.proxy.discovery.kubernetes import follow_lws

    return follow_lws(source)


def _follow_ecs(source: EcsSource) -> AsyncGenerator[Found, None]:
    from cellgate.proxy.discovery.ecs import follow_ecs

    return follow_ecs(source)


FOLLOW: Mapping[str, Follow] = {
    "dns": sources.follow_dns,
    "ecs": _follow_ecs,
    "file": sources.follow_file,
    "lws": _follow_lws,
}
"""By the kind of the source. Units of Redis are handed on by redis/."""
