"""Reports the state of the gate to systemd (sd_notify: datagrams to NOTIFY_SOCKET)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from cellgate.proxy.logs.log import log_line


def notify(*words: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send assignments such as READY=1. Without systemd nothing happens."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A leading @ means the abstract namespace.
    place = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1.0)
            sock.sendto("\n".join(words).encode(), place)
    except OSError as error:
        log_line("warning", f"systemd could not be notified of {' '.join(words)}: {error}")
