"""`SharedBans`: the bans of prompts that gates share, a JSON document for each. docs/redis.md describes it.

Advisory like everything in Redis: a document that is invalid, of an unknown gate, or without an end is
counted and ignored. The time of a ban here is limited by this gate's own `poison.ban_s`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import orjson

from cellgate.proxy.control.containment import Containment, fingerprint_name
from cellgate.router.poison import Ban

VERSION = 1
COMMAND_DOCUMENT_MAX = 4096
BANS_MAX = 1024
"""The most entries of the index that are read."""
LEFT_MS_MAX = 1 << 40
BAN_AGE_S = 3600.0
"""A document that is older was not written for a ban that still holds."""
LIFTED_MS = 1000
"""How long the end of a ban stays readable."""
_BEGIN = b'{"poison":'
_COMMAND_MARK = re.compile(r"[0-9a-f]{16}")
_COMMAND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL_MAX, _UNITS_MAX = 128, 8


class BanDocument(NamedTuple):
    """One document. `left_ms`: how long it holds; 0: it is lifted."""

    mark: str
    gate: str
    model: str
    units: tuple[str, ...]
    left_ms: int
    payer: str = ""


class BanWrite(NamedTuple):
    """A document to be written, and its expiry."""

    mark: str
    document: bytes
    expiry_ms: int
    is_lifted: bool
    gate: str = ""


def is_ban(document: bytes) -> bool:
    """Whether a message on the channel is of this kind."""
    return document.startswith(_BEGIN)


def read_ban(document: bytes) -> BanDocument | None:
    """The content of a document; None when it is invalid."""
    try:
        found = orjson.loads(document) if len(document) <= COMMAND_DOCUMENT_MAX else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or found.get("v") != VERSION:
        return None
    mark, gate = _fit(found.get("poison"), _COMMAND_MARK), _fit(found.get("gate"), _COMMAND_NAME)
    left_ms, model, units = found.get("left_ms"), found.get("model"), found.get("units")
    if mark is None or gate is None or not isinstance(left_ms, int) or not 0 <= left_ms <= LEFT_MS_MAX:
        return None
    named = [str(unit) for unit in units if _fit(unit, _COMMAND_NAME)] if isinstance(units, list) else []
    model = model[:_MODEL_MAX] if isinstance(model, str) else ""
    payer = found.get("payer", "")
    payer = payer[:_MODEL_MAX] if isinstance(payer, str) else ""
    return BanDocument(mark, gate, model, tuple(named[:_UNITS_MAX]), left_ms, payer)


class SharedBans:
    """One gate's part in it, under the name `gate`."""

    def __init__(self, containment: Containment, gate: str, now: Callable[[], float]) -> None:
        self._containment = containment
        self._gate = gate
        self._now = now

    def own(self) -> list[BanWrite]:
        """The bans of this gate."""
        return [self.row(ban, lifted=False) for ban in self._containment.bans.all() if not ban.gate]

    def row(self, ban: Ban, *, lifted: bool) -> BanWrite:
        """The document of a ban that begins, or was lifted."""
        left_ms = 0 if lifted else max(1, round(1000 * (ban.until - self._now())))
        written = {
            "poison": fingerprint_name(ban.fingerprint),
            "v": VERSION,
            "gate": self._gate,
            "model": ban.model[:_MODEL_MAX],
            "units": ban.units[:_UNITS_MAX],
            "left_ms": left_ms,
            "payer": ban.payer[:_MODEL_MAX],
        }
        mark, expiry_ms = fingerprint_name(ban.fingerprint), left_ms or LIFTED_MS
        return BanWrite(mark, orjson.dumps(written), expiry_ms, lifted, self._gate)

    def knows(self, mark: str) -> bool:
        """Whether that prompt is refused here."""
        return (
            _fit(mark, _COMMAND_MARK) is not None
            and self._containment.bans.find(int(mark, 16), self._now()) is not None
        )

    def received(self, document: Any, gates: Collection[str], left_ms: int | None = None) -> bool:
        """Apply a document of one of `gates`; False when it is ignored. `left_ms`: the time to live of its
        key.
        """
        written = read_ban(document) if isinstance(document, bytes) else None
        if written is None or written.gate not in gates or written.gate == self._gate:
            return False
        mark, contained = int(written.mark, 16), self._containment
        if not written.left_ms:
            contained.lift(mark, f"gate {written.gate}", tell=False)
            return True
        left_s = min(written.left_ms if left_ms is None else left_ms, written.left_ms) / 1000.0
        now = self._now()
        until = now + min(left_s, contained.ban_s)
        if until > now:
            contained.take(Ban(mark, written.model, now, until, written.units, written.gate, written.payer))
        return True


def _fit(found: Any, pattern: re.Pattern[str]) -> str | None:
    return found if isinstance(found, str) and pattern.fullmatch(found) else None
