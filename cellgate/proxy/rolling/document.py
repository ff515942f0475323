"""A roll as JSON: what gates share of it, and what the admin port shows. Reading raises ValueError alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson

from cellgate.proxy.rolling.nouns import Phase, Roll, RollStatus, UnitRoll

VERSION = 1


def roll_document(roll: Roll) -> bytes:
    """The document."""
    return orjson.dumps({"v": VERSION} | asdict(roll))


def read_roll(text: bytes) -> Roll:
    """The roll in a document. Raises ValueError."""
    try:
        found = orjson.loads(text)
        if found.pop("v") != VERSION:
            raise TypeError("another version")
        units = tuple(UnitRoll(**{**each, "phase": Phase(each["phase"])}) for each in found.pop("units"))
        return Roll(**{**found, "status": RollStatus(found["status"]), "units": units})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"no roll: {error!r}") from error


def roll_view(roll: Roll, conducted_by: str, now_ms: int) -> dict[str, Any]:
    """The roll for people: how long each unit has been in its phase, and which gate conducts."""
    told = asdict(roll) | {
        "conducted_by": conducted_by,
        "running_s": round((now_ms - roll.began_ms) / 1000, 1),
    }
    for each in told["units"]:
        since_ms = each.pop("since_ms")
        each["for_s"] = round((now_ms - since_ms) / 1000, 1) if since_ms else None
    return told
