"""Sources of units beside the configuration: a file and a line here for each of config/sources.py."""

from __future__ import annotations

from collections.abc import Mapping

from cellgate.proxy.discovery import dns, ecs, file, lws
from cellgate.proxy.discovery.base import Follow

FOLLOW: Mapping[str, Follow] = {"dns": dns.follow, "ecs": ecs.follow, "file": file.follow, "lws": lws.follow}
"""By the kind of the source. Units of Redis are handed on by sharing/."""
