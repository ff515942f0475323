"""TLS on each side: towards clients, units and webhooks.

A context that verifies others is created on first use, because the system's authorities take 2 MB.
"""

from __future__ import annotations

import ssl
from functools import cache

from cellgate.proxy.config.settings import Tls


def client_context(tls: Tls) -> ssl.SSLContext | None:
    """TLS towards clients, when a certificate is configured."""
    if tls.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["http/1.1"])
    return context


@cache
def webhook_context(tls: Tls) -> ssl.SSLContext:
    """TLS towards webhooks: verified by the system's authorities, and by the configured one."""
    context = ssl.create_default_context()
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
    return context


@cache
def unit_context(tls: Tls) -> ssl.SSLContext:
    """TLS towards https units: verified by the configured authority, or by the system's."""
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.unit_cert is not None:
        context.load_cert_chain(tls.unit_cert, tls.unit_key)
    return context
