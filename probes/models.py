"""The models a unit serves, for units whose models are not configured."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import ClassVar

import orjson

from probes.base import FetchError, Patient
from router.nouns import Finding, Models


@dataclass(frozen=True, slots=True)
class ModelList:
    """GET /v1/models every `period_s`, and every `eager_s` until the first answer with a model in it."""

    name: ClassVar[str] = "models"
    period_s: float = 30.0
    eager_s: float = 1.0
    timeout_s: float = 2.0

    def limit_s(self, _patient: Patient) -> float:
        """One fetch."""
        return self.timeout_s

    def due_at(self, patient: Patient, last_at: float) -> float:
        """Soon while the unit's models are unknown."""
        return last_at + (self.period_s if patient.models else self.eager_s)

    async def look(self, patient: Patient) -> AsyncGenerator[Finding, None]:
        """The models, or nothing: whether the unit is well is asked by other probes."""
        if patient.unit.models:
            return
        try:
            models = await ask_models(patient, self.timeout_s)
        except FetchError:
            return
        if models is not None:
            yield models


async def ask_models(patient: Patient, timeout_s: float) -> Models | None:
    """What the unit says it serves; None when it names no model. Raises FetchError."""
    reply = await patient.fetch("GET", "/v1/models", timeout_s=timeout_s)
    names = _names(reply.body) if reply.status == 200 else ()
    return Models(patient.unit.name, names, patient.now()) if names else None


def _names(body: bytes) -> tuple[str, ...]:
    """The ids in OpenAI's list shape {"data": [{"id": name}]}; none when it has another."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ()
    data = parsed.get("data") if isinstance(parsed, dict) else None
    cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    return tuple(card["id"] for card in cards if isinstance(card.get("id"), str) and card["id"])
