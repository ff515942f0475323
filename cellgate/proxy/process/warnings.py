"""Warnings about a configuration that is valid: what cannot be meant, or will fail. For `cellgate check`, and
at the start of a gate.

In this order: `warnings_of`, `cannot_be_meant`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.process.certificates import expiries, trouble_of

_HERE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})


def warnings_of(settings: Settings) -> Iterator[str]:
    """One line each."""
    yield from _certificates(settings)
    yield from cannot_be_meant(settings)
    for source in settings.sources:
        path = getattr(source, "path", None)
        if isinstance(path, str) and not Path(path).is_file():
            yield f"{source.title}: there is no such file yet: no unit comes from it until there is"


def cannot_be_meant(settings: Settings) -> Iterator[str]:
    """Those that a gate says once, at its start; of certificates and sources it tells as of helpers."""
    yield from _places(settings)
    yield from _trust(settings)
    yield from _aliases(settings)
    yield from _agents(settings)


def _certificates(settings: Settings) -> Iterator[str]:
    wall = time.time()
    for one in expiries(settings.tls):
        if (trouble := trouble_of(one, wall)) is not None:
            yield f"{one.of}: {trouble.says}"


def _places(settings: Settings) -> Iterator[str]:
    """Units at one place, and at the gate's own."""
    seen: dict[tuple[str, int], str] = {}
    own = {_place(each.host, each.port): key for key, each in _listeners(settings)}
    for unit in settings.fleet.units:
        parts = urlsplit(unit.url)
        place = _place(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        if place in own:
            yield f"unit {unit.name}: {unit.url} is {own[place]} of this gate itself; a unit is an engine"
        if (other := seen.setdefault(place, unit.name)) != unit.name:
            yield f"unit {unit.name}: {unit.url} is where unit {other} is; each request would count twice"


def _listeners(settings: Settings) -> Iterator[tuple[str, Address]]:
    yield "listen", settings.listen
    yield "admin", settings.admin


def _place(host: str, port: int) -> tuple[str, int]:
    return ("127.0.0.1" if host in _HERE else host.lower(), port)


def _trust(settings: Settings) -> Iterator[str]:
    for number, network in enumerate(settings.trusted):
        if ip_network(network).prefixlen == 0:
            yield f"trusted[{number}]: {network} is everybody: any client may name units and see internals"


def _aliases(settings: Settings) -> Iterator[str]:
    """Names that lead to a model which no unit is configured with. Units that are asked may have it."""
    units = settings.fleet.units
    if settings.sources or not units or not all(unit.models for unit in units):
        return
    known = {model for unit in units for model in unit.models}
    for name, split in settings.models.items():
        for model, _ in split:
            if model not in known and model not in settings.models:
                yield f"models.{name}: no unit lists {model}: requests for {name} get 404"


def _agents(settings: Settings) -> Iterator[str]:
    """Agents on other machines want a token (docs/agent.md)."""
    if settings.agent_token:
        return
    nodes = [node.agent for unit in settings.fleet.units for node in unit.nodes if node.agent]
    far = [agent for agent in nodes if agent.rpartition(":")[0].strip("[]") not in _HERE]
    if far:
        yield (
            f"agents such as {far[0]} are on other machines and want a token: set CELLGATE_AGENT_TOKEN here "
            "to the one that they have"
        )
