"""What a unit serves: its engine, and the models of a unit that has none configured.

OpenAI's list of models has both; Triton has a separate path for each. A unit that is not UP is asked often,
so that another engine is soon detected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar

from cellgate.probes.apis import parsed
from cellgate.probes.base import Fetch, FetchError, ProbeContext
from cellgate.probes.engines import OWNERS
from cellgate.router.nouns import Finding, Models, Served, Verdict

_NOT_THERE = frozenset({404, 405, 501})
_SERVING = (Verdict.UP, Verdict.SUSPECT)


@dataclass(frozen=True, slots=True)
class ModelList:
    """Runs every `period_s`, and every `eager_s` while models or engine are unknown."""

    name: ClassVar[str] = "models"
    period_s: float = 30.0
    eager_s: float = 1.0
    timeout_s: float = 2.0

    def limit_s(self, _patient: ProbeContext) -> float:
        """Three fetches: a Triton server is asked last."""
        return 3 * self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """Soon while models or engine are unknown, or the unit might come back as another engine."""
        settled = context.models and context.engine and context.verdict in _SERVING
        return last_at + (self.period_s if settled or _is_told(context) else self.eager_s)

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """Engine and models, as far as they are known; other probes check the health."""
        if _is_told(context):
            return
        try:
            findings = await ask_served(context, self.timeout_s)
        except FetchError:
            return
        for finding in findings:
            yield finding


def _is_told(context: ProbeContext) -> bool:
    """True when the configuration has everything."""
    return bool(context.unit.models and context.unit.engine)


async def ask_served(context: ProbeContext, timeout_s: float) -> list[Served | Models]:
    """The engine and the models that the unit reports, without those configured. Raises FetchError."""
    engine, names = await _ask(context.fetch, context.unit.engine, timeout_s)
    unit, now = context.unit, context.now()
    found: list[Served | Models] = []
    if engine and not unit.engine:
        found.append(Served(unit.name, engine, now))
    if names and not unit.models:
        found.append(Models(unit.name, names, now))
    return found


async def _ask(fetch: Fetch, configured: str, timeout_s: float) -> tuple[str, tuple[str, ...]]:
    """The engine, empty if unknown, and its models."""
    if configured != "triton":
        reply = await fetch("GET", "/v1/models", timeout_s=timeout_s)
        if reply.status not in _NOT_THERE:
            return _read_list(reply.body) if reply.status == 200 else ("", ())
        reply = await fetch("GET", "/v2", timeout_s=timeout_s)
        metadata = parsed(reply.body) if reply.status == 200 else None
        if not isinstance(metadata, dict) or metadata.get("name") != "triton":
            return "openai" if reply.status in (200, *_NOT_THERE) else "", ()
    index = await fetch("POST", "/v2/repository/index", body=b'{"ready": true}', timeout_s=timeout_s)
    return "triton", _names(parsed(index.body), "name") if index.status == 200 else ()


def _read_list(body: bytes) -> tuple[str, tuple[str, ...]]:
    """Engine and ids in OpenAI's list shape {"data": [{"id": name, "owned_by": owner}]}."""
    listed = parsed(body)
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        return "", ()
    owners = {str(card.get("owned_by")) for card in cards if isinstance(card, dict)}
    known = [OWNERS[owner] for owner in sorted(owners & OWNERS.keys())]
    names = _names(cards, "id")
    # A list without models means that the server is still starting.
    return (next(iter(known), "openai"), names) if names else ("", ())


def _names(cards: Any, key: str) -> tuple[str, ...]:
    """The non-empty strings under `key` in a list of objects; none when it has another shape."""
    objects = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    return tuple(card[key] for card in objects if isinstance(card.get(key), str) and card[key])
