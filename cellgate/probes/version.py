"""The version of a unit's engine, from the page where the engine shows it (ENGINES in engines.py).

It proves nothing about the unit's health: a page that is missing, late or strange is no evidence.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from cellgate.probes.apis import parsed, short_text
from cellgate.probes.base import FetchError, ProbeContext
from cellgate.probes.engines import engine
from cellgate.router.engine_nouns import Build, Built
from cellgate.router.nouns import Finding

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
        """One fetch."""
        return self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """Soon while it is not known, although the unit may have such a page."""
        page = engine(context.engine).version
        is_absent = bool(context.engine) and page in (None, context.notes.get(_ABSENT))
        return last_at + (self.period_s if context.build.version or is_absent else self.eager_s)

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """The version, or nothing."""
        page = engine(context.engine).version
        if page is None:
            return
        try:
            version, status = await _ask(context, page, self.timeout_s)
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
            version, _ = await _ask(context, page, timeout_s)
    return [Built(context.unit.name, Build(version=version), context.now())] if version else []


async def _ask(context: ProbeContext, page: tuple[str, str], timeout_s: float) -> tuple[str, int]:
    """What the page shows as the version, or nothing, and its status. Raises FetchError."""
    path, name = page
    reply = await context.fetch("GET", path, timeout_s=timeout_s)
    shown = parsed(reply.body) if reply.status == 200 else None
    return short_text(shown.get(name)) if isinstance(shown, dict) else "", reply.status
