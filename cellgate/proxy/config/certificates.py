"""Whether certificate files can be used: at start, and whenever they have changed."""

from __future__ import annotations

import ssl

from cellgate.proxy.config import values
from cellgate.proxy.config.settings import Tls

PAIRS = (("cert", "key"), ("unit_cert", "unit_key"), ("admin_cert", "admin_key"))
"""Keys of `tls` that belong together: a certificate and its key."""
AUTHORITIES = ("ca", "admin_client_ca")
"""Keys of `tls` that name certificates of authorities."""


def check_certificates(tls: Tls) -> None:
    """A certificate comes with its key, and authorities can be read. Raises ValueError."""
    for one, other in PAIRS:
        cert, key = getattr(tls, one), getattr(tls, other)
        if (cert is None) != (key is None):
            missing = one if cert is None else other
            raise ValueError(f"{one} and {other} must be given together: {missing} is missing")
        if cert is not None:
            with values.pem_errors(f"a certificate in {one} and its key in {other}, in PEM format"):
                # Without a password OpenSSL would ask the terminal for that of an encrypted key.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    for name in AUTHORITIES:
        if (file := getattr(tls, name)) is not None:
            with values.pem_errors(f"CA certificates in {name}, in PEM format"):
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    if tls.admin_client_ca is not None and tls.admin_cert is None:
        raise ValueError("admin_client_ca needs admin_cert and admin_key: without them the port has no TLS")


def files_of(tls: Tls) -> tuple[str, ...]:
    """All file names."""
    names = (*(name for pair in PAIRS for name in pair), *AUTHORITIES)
    return tuple(file for name in names if (file := getattr(tls, name)) is not None)
