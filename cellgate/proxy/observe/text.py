"""How texts (on one line) and durations are written, for people and in logs."""

from __future__ import annotations

from urllib.parse import urlsplit

from cellgate.router.nouns import Fleet

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def one_line(text: str) -> str:
    """`text` with its control characters escaped."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def duration(seconds: float) -> str:
    """Seconds as the two largest units of time that matter: 7s, 3m 5s, 2d 4h."""
    left = int(seconds)
    parts: list[str] = []
    for size, letter in _TIME_UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{letter}")
    return " ".join(parts[:2]) or "0s"


def unsaid_ports(fleet: Fleet) -> list[str]:
    """A line for each unit whose URL has no port, and so means the one of its scheme."""
    ports = {"http": 80, "https": 443}
    parts = [(unit, urlsplit(unit.url)) for unit in fleet.units]
    return [
        f"unit {unit.name}: {unit.url} has no port, so it means port {ports[url.scheme]}"
        for unit, url in parts
        if url.port is None
    ]
