"""The expiry of certificates: until when those of files are valid, and what is said before and after.

Read from the encoding itself (RFC 5280, 4.1): Python's ssl shows the dates of certificates of others only.

In this order: `Expiry`, `expiries`, `trouble_of`, `note_shown`, `ends_of`, `certificate_metrics`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Metric

from cellgate.proxy.config.checks import AUTHORITIES
from cellgate.proxy.config.settings import Tls
from cellgate.proxy.observe.families import gauge
from cellgate.proxy.observe.helpers import HelperTrouble, Weight

WARN_S = 30 * 86400.0
"""So long before its end a certificate is spoken of."""
CERTIFICATE_FILE_BYTES = 4 << 20

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _LONG_TIME, _VERSION = 0x17, 0x18, 0xA0


class Expiry(NamedTuple):
    """The end of a certificate, in seconds since 1970. `of` is who shows it: a key of `tls`, or a unit.

    `file` is empty for what somebody else showed on a connection.
    """

    of: str
    file: str
    end: float


_OWN_FILES: dict[str, tuple[str, Weight]] = {
    "cert": ("clients refuse connections to this gate", "grave"),
    "ca": ("units, Redis and others that show a certificate of it are refused", "lost"),
    "unit_cert": ("units that ask for a certificate refuse this gate", "lost"),
    "admin_cert": ("operators and Prometheus refuse the admin port", "lost"),
    "admin_client_ca": ("operators with a certificate of it are refused", "lost"),
}
"""What follows when it has expired, and how bad that is."""


def expiries(tls: Tls) -> list[Expiry]:
    """That of each file of `tls`: of a certificate and its chain the first end, of authorities the last."""
    found = []
    for name in _OWN_FILES:
        file: str | None = getattr(tls, name)
        if file is not None and (ends := ends_of(file)):
            found.append(Expiry(f"tls.{name}", file, max(ends) if name in AUTHORITIES else min(ends)))
    return found


def trouble_of(one: Expiry, wall: float) -> HelperTrouble | None:
    """What is said of it at `wall` (seconds since 1970); None while its end is far away."""
    words = expiry_words(one.end, wall)
    if not words:
        return None
    if one.file:
        follows, weight = _OWN_FILES[one.of.removeprefix("tls.")]
        renew = "renew the file, it is read again by itself"
        said = f"the certificate in {one.file} {words}"
    else:
        follows, weight = f"the gate refuses {one.of}", "lost"
        renew, said = "renew it there", f"its certificate {words}"
    if one.end > wall:
        return HelperTrouble(f"{said}; then {follows}: {renew}", "soon")
    return HelperTrouble(f"{said}: {follows}; {renew}", weight)


_SHOWN: dict[str, float] = {}


def note_shown(of: str, certificate: Mapping[str, Any] | None) -> None:
    """A helper of the gate has shown this certificate (as Python's ssl has it) on a connection."""
    if certificate and "notAfter" in certificate:
        _SHOWN[of] = ssl.cert_time_to_seconds(certificate["notAfter"])


def shown_by_helpers() -> list[Expiry]:
    """The ends of what helpers have shown last."""
    return [Expiry(of, "", end) for of, end in _SHOWN.items()]


def ends_of(path: str) -> list[float]:
    """When each certificate in a PEM file ends, in seconds since 1970; nothing for what cannot be read."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(CERTIFICATE_FILE_BYTES).decode("latin-1")
        return [_end(ssl.PEM_cert_to_DER_cert(pem)) for pem in _PEM.findall(text)]
    except (OSError, ValueError, IndexError):
        return []


def expiry_words(end: float, now: float) -> str:
    """What is true of a certificate that ends then: empty while that is far away."""
    if end <= now:
        return f"has expired {in_days(now - end)} ago, on {_date(end)}"
    if end - now <= WARN_S:
        return f"expires in {in_days(end - now)}, on {_date(end)}"
    return ""


def in_days(seconds: float) -> str:
    """A span for a person: days; where it is less than two of them hours, then minutes."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} hours"
    minutes = round(seconds / 60)
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


_NO_FILE = (0, b"")


def _end(der: bytes) -> float:
    """The end of the validity in a certificate. Raises ValueError and IndexError for what is none."""
    _, whole = next(_values(der), _NO_FILE)
    _, signed = next(_values(whole), _NO_FILE)
    fields = [value for tag, value in _values(signed) if tag != _VERSION]
    # After the version: serial number, signature, issuer, validity.
    (_, _), (tag, written) = _values(fields[3])
    if tag not in (_UTC_TIME, _LONG_TIME):
        raise ValueError("no time")
    text = written.decode("ascii")
    if tag == _UTC_TIME:
        # RFC 5280, 4.1.2.5.1: two digits from 50 on are of the last century.
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _values(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of one level: tag and content (DER: lengths are definite)."""
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + size > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + size]
        at += size


def certificate_metrics(expiries: Callable[[], list[Expiry]]) -> Iterator[Metric]:
    """When certificates end; `expiries` gives those of now."""
    text = "When a certificate ends, in seconds since 1970; the file is empty where another one shows it."
    rows = (((one.of, one.file), one.end) for one in expiries())
    yield gauge("certificate_expires_timestamp_seconds", text, ("of", "file"), rows)
