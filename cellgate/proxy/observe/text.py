"""How texts (on one line) and durations are written, for people and in logs."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from cellgate.router.nouns import Fleet

_TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def one_line(text: str) -> str:
    """`text` with what is no visible character escaped: controls, and marks that turn the direction round."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(ord(each)) for each in text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def only_visible(page: bytes) -> bytes:
    """A page of lines of text in UTF-8, the same without controls."""
    page = page.translate(None, _CONTROLS)
    return page if page.isascii() else _INVISIBLE.sub(b"?", page)


_CONTROLS = bytes(code for code in (*range(0x20), 0x7F) if code != 0x0A)
_INVISIBLE = re.compile(
    rb"\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8b-\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]|\xef\xbb\xbf"
)
"""C1 controls, and characters that have no width or turn the direction round."""


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
