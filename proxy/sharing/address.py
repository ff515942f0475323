"""Where a gate tells other gates that they reach it."""

from __future__ import annotations

import socket
from contextlib import suppress

from cellgate.proxy.config.settings import Address, Settings

_ANY = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}
"""Hosts that stand for all addresses, and a far one of the same family: the way there leads through the
address that others know this machine by."""


def own_url(settings: Settings, port: int) -> str:
    """The configured URL, or that of the address listened on; empty when none can be told."""
    if settings.advertise:
        return settings.advertise
    host = settings.listen.host
    host = _outward(host) if host in _ANY else host
    scheme = "https" if settings.tls.cert else "http"
    return f"{scheme}://{Address(host, port)}" if host else ""


def _outward(host: str) -> str:
    """This machine's address on its way out. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((_ANY[host], 9))
        return str(way.getsockname()[0])
    return ""
