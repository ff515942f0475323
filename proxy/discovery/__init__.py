"""Where units come from beside the configuration: one file each. A new source is a line in this registry."""

from __future__ import annotations

from cellgate.proxy.discovery.dns import DnsSource
from cellgate.proxy.discovery.ecs import EcsSource
from cellgate.proxy.discovery.file import FileSource
from cellgate.proxy.discovery.lws import LwsSource

SOURCES: dict[str, type[DnsSource | EcsSource | FileSource | LwsSource]] = {
    "dns": DnsSource,
    "file": FileSource,
    "lws": LwsSource,
    "ecs": EcsSource,
}
"""Those of one cell: `cells[].discover.from`."""

PACKAGES: dict[str, tuple[str, str]] = {
    "dns": ("dns", "dns"),
    "lws": ("kubernetes_asyncio", "k8s"),
    "ecs": ("boto3", "ecs"),
}
"""The module that a source needs beyond what is always there, and the extra that brings it."""
