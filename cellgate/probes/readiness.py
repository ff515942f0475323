"""Readiness: the readiness path of the leader's engine.

Its 200 is weak evidence: it proves the front end, not the engine behind it. Its 503 is stronger: an engine
that reports itself as dead rarely errs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import ClassVar

from cellgate.probes.base import FetchError, PageGet, ProbeContext, Reply, Trouble
from cellgate.probes.engines import engine
from cellgate.probes.quiescence import ask_quiescence
from cellgate.router.nouns import Evidence, Finding, Sign, Strength, Verdict

_Weight = tuple[Sign, Strength]

_NOTHING: _Weight = (Sign.NEUTRAL, Strength.WEAK)
_TROUBLES: dict[Trouble, _Weight] = {
    Trouble.REFUSED: (Sign.BAD, Strength.FATAL),
    Trouble.UNREACHABLE: (Sign.BAD, Strength.WEAK),
    Trouble.TIMEOUT: (Sign.BAD, Strength.WEAK),
    Trouble.BROKEN: (Sign.BAD, Strength.WEAK),
    Trouble.OWN: _NOTHING,
}
_NOT_THERE = frozenset({404, 405})
_ASKS_MORE = _NOT_THERE | {503}

_PATH = "path"
"""Note: the path that this unit has."""
_ASKED = "asked"
"""Note: the path that is being asked, and until when."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """GET the engine's readiness path every `period_s`.

    Of an UP unit only when its address has not answered another probe for so long, and every `answered_s` at
    the latest: what is to be noticed at once is an address that refuses.

    `timeout_s` (3) is so long that slow answers alone stay below the rate that makes a busy unit suspect
    (5 in 10 s).
    """

    name: ClassVar[str] = "readiness"
    period_s: float = 1.0
    answered_s: float = 3.0
    timeout_s: float = 3.0

    def limit_s(self, _patient: ProbeContext) -> float:
        """One timeout for all paths, and as long for a question about a bad answer."""
        return 2.0 * self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """One period after the last run, or after the last answer to another probe."""
        if context.verdict is not Verdict.UP:
            return last_at + self.period_s
        return min(max(last_at, context.answered_at) + self.period_s, last_at + self.answered_s)

    def page(self, context: ProbeContext) -> PageGet:
        """The path that is known to exist, or the first."""
        path = _paths(context)[0]
        context.notes[_ASKED] = path, context.now() + self.timeout_s
        return PageGet(context.fetch, path, self.timeout_s)

    def read(
        self, context: ProbeContext, answer: Reply | FetchError
    ) -> tuple[Evidence] | AsyncGenerator[Finding, None]:
        """One piece of evidence."""
        path, deadline = context.notes[_ASKED]
        if isinstance(answer, Reply):
            if answer.status in _ASKS_MORE:
                return self._ask_more(context, path, answer, deadline)
            context.notes[_PATH] = path
        return (self._evidence(context, path, answer),)

    async def _ask_more(
        self, context: ProbeContext, path: str, reply: Reply, deadline: float
    ) -> AsyncGenerator[Finding, None]:
        """Try the other paths; ask whether a unit that is not ready stands still on purpose."""
        answer: Reply | FetchError = reply
        others = [other for other in _paths(context) if other != path]
        try:
            while reply.status in _NOT_THERE and others:
                path = others.pop(0)
                timeout_s = max(0.0, deadline - context.now())
                answer = reply = await context.fetch("GET", path, timeout_s=timeout_s)
        except FetchError as error:
            answer = error
        else:
            if reply.status not in _NOT_THERE:
                context.notes[_PATH] = path
            if reply.status == 503:
                for word in await ask_quiescence(context):
                    yield word
        yield self._evidence(context, path, answer)

    def _evidence(self, context: ProbeContext, path: str, answer: Reply | FetchError) -> Evidence:
        if isinstance(answer, FetchError):
            (sign, strength), said = _TROUBLES[answer.trouble], str(answer)
        else:
            (sign, strength), said = _weigh(context, answer), f"HTTP {answer.status}"
        return Evidence(context.unit.name, sign, strength, self.name, f"GET {path}: {said}", context.now())


def _paths(context: ProbeContext) -> tuple[str, ...]:
    """The paths to try: the one that is known to exist, while it is one of this engine's."""
    paths, known = engine(context.engine).ready, context.notes.get(_PATH)
    return (known, *(path for path in paths if path != known)) if known in paths else paths


def _weigh(context: ProbeContext, reply: Reply) -> _Weight:
    if reply.status in engine(context.engine).unready:
        return Sign.BAD, Strength.WEAK
    if reply.status >= 500:
        return Sign.BAD, Strength.STRONG
    # Anything else (no such path, not allowed) proves only that a server answers.
    return (Sign.GOOD, Strength.WEAK) if reply.status == 200 else _NOTHING
