"""Units from DNS: one for each address of a name (A, AAAA), or for each SRV record.

1. Queried every `period_s`, whatever the TTL: the name server caches.
2. An answer without records changes nothing: clusters answer so while nothing is ready, and probes notice
   that.

In this order: `Endpoint`, `follow_file`, `_follow_cluster`.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cellgate.extras import part_of
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.sources import (
    CLUSTER_SOURCES,
    DnsSource,
    EcsSource,
    FileSource,
    LwsSource,
    PodsSource,
)
from cellgate.proxy.discovery.base import Follow, Found, SourceError, named
from cellgate.router.nouns import Node, Role, Unit

SOURCE_PATIENCE_S = 5.0
LATER = 0.001
"""The factor of a weight for each earlier SRV priority: a later one gets what the others have no room for."""


async def follow_dns(source: DnsSource) -> AsyncGenerator[Found, None]:
    """The units of each answer."""
    resolver = await asyncio.to_thread(_resolver, source.server)
    while True:
        yield Found(units=units_at(await _places(source, resolver), source.like, source.scheme))
        await asyncio.sleep(source.period_s)


class Endpoint(NamedTuple):
    """Where a unit listens, and its share among those of the answer."""

    host: str
    port: int
    weight: float


def _resolver(server: str) -> Any:
    dns = importlib.import_module("dns.asyncresolver")
    try:
        resolver = dns.Resolver(configure=not server)
    except Exception as error:  # Each platform has its own errors for this.
        raise SourceError(f"the system's resolver is not configured: {error}") from None
    if server:
        host, _, port = server.rpartition(":")
        resolver.nameservers, resolver.port = [host.strip("[]")], int(port)
    return resolver


async def _places(source: DnsSource, resolver: Any) -> list[Endpoint]:
    errors = importlib.import_module("dns.exception")
    try:
        answer = await resolver.resolve(source.host, source.record, search=True, lifetime=SOURCE_PATIENCE_S)
    except errors.DNSException as error:
        raise SourceError(f"not resolved: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise SourceError(f"the name server cannot be reached: {error}") from None
    if source.record == "SRV":
        return weighed((row.priority, row.weight, str(row.target).rstrip("."), row.port) for row in answer)
    return [Endpoint(row.address, source.port, 1.0) for row in answer]


def weighed(records: Iterable[tuple[int, int, str, int]]) -> list[Endpoint]:
    """SRV records (priority, weight, target, port) with shares (RFC 2782): by weight within a priority,
    1 for the heaviest; what has a later priority gets next to nothing while there is room before it.
    """
    records = sorted(set(records))
    levels = sorted({priority for priority, *_ in records})
    heaviest = {
        level: max(max(weight, 1) for priority, weight, *_ in records if priority == level)
        for level in levels
    }
    return [
        Endpoint(target, port, max(weight, 1) / heaviest[priority] * LATER ** levels.index(priority))
        for priority, weight, target, port in records
        if target
    ]


def units_at(endpoints: Iterable[Endpoint], like: Unit, scheme: str) -> tuple[Unit, ...]:
    """A unit with one node for each place, named after it."""
    units = []
    for host, port, weight in sorted(set(endpoints)):
        name = named(f"{host}-{port}")
        at = f"[{host}]:{port}" if ":" in host else f"{host.lower()}:{port}"
        nodes = (Node(name, Role.LEADER),)
        units.append(
            replace(like, name=name, url=f"{scheme}://{at}", weight=like.weight * weight, nodes=nodes)
        )
    return tuple(units)


# Units from a watched YAML file: `units: [...]`, each with the keys that a unit of the configuration has.
#
# A file that cannot be read as a whole changes nothing; it is read again whenever its bytes have changed.


async def follow_file(source: FileSource) -> AsyncGenerator[Found, None]:
    """The units of the file, each time it has changed."""
    before: bytes | None = None
    while True:
        data = await asyncio.to_thread(_bytes, source.path)
        if data != before:
            yield Found(units=await asyncio.to_thread(_units, source, data))
            before = data
        await asyncio.sleep(source.period_s)


def _bytes(path: str) -> bytes:
    # Not by its time: files of a ConfigMap are links that change, and a copy may keep the old time.
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None


def _units(source: FileSource, data: bytes) -> tuple[Unit, ...]:
    # Imported late, because most gates have no such file.
    from cellgate.proxy.config.load import units_in

    try:
        return units_in(source.path, data, source.like)
    except ConfigError as error:
        raise SourceError(str(error)) from None


def _follow_cluster(source: EcsSource | LwsSource | PodsSource) -> AsyncGenerator[Found, None]:
    """By an extra, which has the APIs of orchestrators; most gates do not need them."""
    follow: Follow = part_of("clusters", source.kind).follow
    return follow(source)


FOLLOW: Mapping[str, Follow] = {
    "dns": follow_dns,
    "file": follow_file,
    **dict.fromkeys(CLUSTER_SOURCES, _follow_cluster),
}
"""By the kind of the source. Units of Redis are handed on by extras/redis/."""
