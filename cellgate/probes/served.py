"""What a unit serves: its engine, and the models of a unit that has none configured.

OpenAI's list of models has both; Triton has a path for each. A unit that is not UP is asked often, so that
another engine is soon detected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from cellgate.probes.base import REST_LONG_S, REST_SAME_S, Fetch, FetchError, ProbeContext, rested_s
from cellgate.probes.engines import OWNERS, engine, object_of, parsed, short_text
from cellgate.router.nouns import USABLE, Build, Built, Finding, ModelCards, Models, Served

_ABSENT = "absent"
"""Note: the page that the unit does not have."""


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """Runs every `period_s`; every `eager_s` until the version of the present engine is known."""

    name: ClassVar[str] = "version"
    period_s: float = 60.0
    eager_s: float = 1.0
    timeout_s: float = 2.0

    def limit_s(self, _context: ProbeContext) -> float:
        return self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """Soon while it is not known, although the unit may have such a page."""
        page = engine(context.engine).version
        is_absent = bool(context.engine) and page in (None, context.notes.get(_ABSENT))
        if context.build.version or is_absent:
            return last_at + rested_s(context, context.fetch, last_at, self.period_s, REST_SAME_S)
        return last_at + self.eager_s

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        page = engine(context.engine).version
        if page is None:
            return
        try:
            version, status = await _ask_page(context, page, self.timeout_s)
        except FetchError:
            return
        context.notes[_ABSENT] = None if version or status >= 500 else page
        if version:
            yield Built(context.unit.name, Build(version=version), context.now())


async def ask_version(context: ProbeContext, timeout_s: float) -> list[Built]:
    """The version, if the engine shows one on its page; whatever else happens is of no interest."""
    page, version = engine(context.engine).version, ""
    if page is not None:
        with suppress(FetchError):
            version, _ = await _ask_page(context, page, timeout_s)
    return [Built(context.unit.name, Build(version=version), context.now())] if version else []


async def _ask_page(context: ProbeContext, page: tuple[str, str], timeout_s: float) -> tuple[str, int]:
    """What the page shows as the version, or nothing, and its status. Raises FetchError."""
    path, name = page
    reply = await context.fetch("GET", path, timeout_s=timeout_s)
    shown = object_of(reply.body) if reply.status == 200 else None
    return short_text(shown.get(name)) if shown else "", reply.status


_NUMBERS, _TEXTS = ("created", "max_model_len"), ("owned_by", "root", "parent")
"""What is passed on of each model in a list."""
_CARDS_MAX, _TEXT_CHARS = 4096, 1024
_NOT_THERE = frozenset({404, 405, 501})


class _Served(NamedTuple):
    """The engine (empty: unknown), its models, and the LoRA adapters among them with their base models."""

    engine: str = ""
    names: tuple[str, ...] = ()
    bases: Mapping[str, str] = {}
    cards: ModelCards = MappingProxyType({})


_NONE_SERVED = _Served()


@dataclass(frozen=True, slots=True)
class ModelList:
    """Runs every `period_s`, and every `eager_s` while models or engine are unknown. A model that no unit is
    known to serve has all of them asked (`ask_for_models`), those that rest too.
    """

    name: ClassVar[str] = "models"
    period_s: float = 30.0
    eager_s: float = 1.0
    timeout_s: float = 2.0

    def limit_s(self, _context: ProbeContext) -> float:
        """Three fetches: a Triton server is asked last."""
        return 3 * self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """Soon while models or engine are unknown, or the unit might come back as another engine."""
        settled = context.models and context.engine and context.verdict in USABLE
        if settled or _is_reported(context):
            return last_at + rested_s(context, context.fetch, last_at, self.period_s, REST_LONG_S)
        return last_at + self.eager_s

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """Engine and models, as far as they are known; other probes check the health."""
        if _is_reported(context):
            return
        try:
            findings = await ask_served(context, self.timeout_s)
        except FetchError:
            return
        for finding in findings:
            yield finding


def _is_reported(context: ProbeContext) -> bool:
    """True when the configuration has everything."""
    return bool(context.unit.models and context.unit.engine)


async def ask_served(context: ProbeContext, timeout_s: float) -> list[Served | Models]:
    """The engine and the models that the unit reports, without those configured. Raises FetchError."""
    engine, names, bases, cards = await _ask_models(context.fetch, context.unit.engine, timeout_s)
    unit, now = context.unit, context.now()
    found: list[Served | Models] = []
    if engine and not unit.engine:
        found.append(Served(unit.name, engine, now))
    if names and not unit.models:
        found.append(Models(unit.name, names, now, bases, cards))
    return found


async def _ask_models(fetch: Fetch, configured: str, timeout_s: float) -> _Served:
    """The engine, empty if unknown, and its models."""
    if configured != "triton":
        reply = await fetch("GET", "/v1/models", timeout_s=timeout_s)
        if reply.status not in _NOT_THERE:
            return _read_list(reply.body) if reply.status == 200 else _NONE_SERVED
        reply = await fetch("GET", "/v2", timeout_s=timeout_s)
        metadata = parsed(reply.body) if reply.status == 200 else None
        if not isinstance(metadata, dict) or metadata.get("name") != "triton":
            return _Served("openai") if reply.status in (200, *_NOT_THERE) else _NONE_SERVED
    index = await fetch("POST", "/v2/repository/index", body=b'{"ready": true}', timeout_s=timeout_s)
    return _Served("triton", _names(parsed(index.body), "name") if index.status == 200 else ())


def _read_list(body: bytes) -> _Served:
    """Engine and ids in OpenAI's list shape {"data": [{"id": name, "owned_by": owner}]}.

    vLLM and SGLang name the model that a LoRA adapter is for as its "parent".
    """
    listed = parsed(body)
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        return _NONE_SERVED
    owners = {str(card.get("owned_by")) for card in cards if isinstance(card, dict)}
    known = [OWNERS[owner] for owner in sorted(owners & OWNERS.keys())]
    names = _names(cards, "id")
    # A list without models means that the server is still starting.
    if not names:
        return _NONE_SERVED
    return _Served(next(iter(known), "openai"), names, _bases(cards, names), _facts(cards))


def _facts(cards: list[Any]) -> dict[str, dict[str, str | int]]:
    """What a list says of its models that clients of the gate are told as well."""
    found: dict[str, dict[str, str | int]] = {}
    for card in cards[:_CARDS_MAX]:
        if isinstance(card, dict) and isinstance(name := card.get("id"), str) and _is_name(name):
            facts: dict[str, str | int] = {}
            found[name] = facts
            for key in _NUMBERS:
                if type(number := card.get(key)) is int:
                    facts[key] = number
            for key in _TEXTS:
                if isinstance(text := card.get(key), str) and len(text) <= _TEXT_CHARS and text.isprintable():
                    facts[key] = text
    return found


def _bases(cards: list[Any], names: tuple[str, ...]) -> dict[str, str]:
    """The LoRA adapters among the names of a list. One whose model is not in the list is for another unit."""
    listed = frozenset(names)
    objects = [card for card in cards if isinstance(card, dict) and "parent" in card]
    pairs = [(card.get("id"), card["parent"]) for card in objects]
    named = [(name, base) for name, base in pairs if isinstance(name, str) and isinstance(base, str)]
    return {name: base for name, base in named if name and base in listed and base != name}


def _names(cards: Any, key: str) -> tuple[str, ...]:
    """The non-empty strings under `key` in a list of objects; none when it has another shape."""
    objects = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    return tuple(card[key] for card in objects if isinstance(name := card.get(key), str) and _is_name(name))


def _is_name(name: str) -> bool:
    """A name with controls, or marks that turn a line round, is none."""
    return name != "" and name.isprintable()
