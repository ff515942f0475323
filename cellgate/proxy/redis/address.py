"""The name of this gate among others, and the address under which they reach it."""

from __future__ import annotations

import os
import random
import re
import socket
from contextlib import suppress

from cellgate.proxy.config.settings import Address, Settings

_ANY = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}
"""Wildcard hosts, each with a remote host of the same family: the route to it shows the address of this
machine that others can reach."""


def gate_name() -> str:
    """A new name for each process, so that a restarted gate does not take old reports for its own."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:80].lstrip(".-") or "gate"
    return f"{host}-{os.getpid()}-{random.getrandbits(32):08x}"


def own_url(settings: Settings, port: int) -> str:
    """The configured URL, or that of the listen address; empty when it cannot be determined."""
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
