"""Quiescence: whether an engine says that it stands still on purpose: it is paused, asleep or scaling.

What follows from it is decided in router/hold.py. An engine that has never been silent is hardly ever
asked, and one without such paths at most once a minute.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from cellgate.probes.apis import parsed
from cellgate.probes.base import FetchError, ProbeContext, Trouble, is_in_use
from cellgate.probes.engines import HoldQuestion, engine
from cellgate.router.hold_nouns import HoldKind, Quiescence
from cellgate.router.nouns import Evidence, Finding, Sign, Strength

ASK_S = 0.5
"""The timeout of one question: the front end answers by itself, or after one step of the engine."""
_SCALING = b"scaling"
"""In the body of a 503 with which an engine answers every path while it scales."""
_KNOWN = "known"
"""Note: which of its paths the engine has."""


class _Says(Enum):
    NO = "no"
    NOTHING = "nothing"
    """It has no such path, or no such flag."""


class _Known(NamedTuple):
    """The questions that an engine answers, as of `at`."""

    engine: str = ""
    at: float = 0.0
    questions: tuple[HoldQuestion, ...] = ()


@dataclass(frozen=True, slots=True)
class QuiescenceProbe:
    """Asks when requests, or a canary, get no answer; otherwise every `rest_s`. An engine that was found to
    have such paths is asked every `period_s` while in use, every `idle_s` without work, every `held_s` on
    hold. Paths that an engine did not have are tried again after `absent_s`.
    """

    name: ClassVar[str] = "quiescence"
    period_s: float = 1.0
    idle_s: float = 2.0
    held_s: float = 0.5
    absent_s: float = 60.0
    rest_s: float = 3600.0

    def limit_s(self, context: ProbeContext) -> float:
        """The timeouts of all questions, each of which may take two requests."""
        return 2.0 * ASK_S * max(1, len(engine(context.engine).holds))

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """Seldom, of an engine that is not known to say so."""
        if context.is_on_hold:
            return last_at + self.held_s
        known = _known(context)
        if known.engine != context.engine or all(question.is_shown for question in known.questions):
            return last_at + self.rest_s
        return last_at + (self.period_s if is_in_use(context) else self.idle_s)

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """What the engine says of itself; nothing when it says nothing."""
        known, now = _known(context), context.now()
        is_new = known.engine != context.engine or now >= known.at + self.absent_s
        questions = engine(context.engine).holds if is_new else known.questions
        try:
            said = await _ask(context, questions)
        except FetchError as error:
            if error.trouble is Trouble.REFUSED:
                yield _refused(context, self.name, str(error))
            return
        if is_new and len(said) == len(questions):
            answered = tuple(q for q, answer in said.items() if answer is not _Says.NOTHING)
            hidden = tuple(question for question in answered if not question.is_shown)
            context.notes[_KNOWN] = _Known(context.engine, now, hidden or answered)
        for finding in _findings(context, said):
            yield finding


async def ask_quiescence(context: ProbeContext) -> list[Quiescence]:
    """What explains a bad answer that another probe has got: that the unit stands still on purpose. Empty:
    it does not say so.
    """
    try:
        found = _findings(context, await _ask(context, engine(context.engine).holds))
    except FetchError:
        return []
    return [said for said in found if said.kind is not None]


_Answers = dict[HoldQuestion, "HoldKind | _Says"]


def _findings(context: ProbeContext, said: _Answers) -> list[Quiescence]:
    kinds = [answer for answer in said.values() if isinstance(answer, HoldKind)]
    if not kinds and _Says.NO not in said.values():
        return []
    return [Quiescence(context.unit.name, kinds[0] if kinds else None, context.now())]


def _refused(context: ProbeContext, source: str, reason: str) -> Evidence:
    """No canary is sent to a unit on hold, so this may be the first to meet a process that is gone."""
    return Evidence(context.unit.name, Sign.BAD, Strength.FATAL, source, reason, context.now())


async def _ask(context: ProbeContext, questions: tuple[HoldQuestion, ...]) -> _Answers:
    """The answers, up to the first that says that it stands still. Raises FetchError."""
    said: _Answers = {}
    for question in questions:
        said[question] = await _answer(context, question)
        if isinstance(said[question], HoldKind):
            break
    return said


async def _answer(context: ProbeContext, question: HoldQuestion) -> HoldKind | _Says:
    """Raises FetchError."""
    reply = await context.fetch(question.method, question.path, timeout_s=ASK_S)
    if reply.status == 503 and _SCALING in reply.body:
        return HoldKind.SCALING
    if question.but:
        if reply.status != 503:
            return _Says.NO if reply.status == 200 else _Says.NOTHING
        beside = await context.fetch(question.method, question.but, timeout_s=ASK_S)
        return question.kind if beside.status == 200 else _Says.NO
    found = parsed(reply.body) if reply.status == 200 else None
    flag = found.get(question.flag) if isinstance(found, dict) else None
    if flag is True:
        return question.kind
    return _Says.NO if flag is False else _Says.NOTHING


def _known(context: ProbeContext) -> _Known:
    known: _Known = context.notes.get(_KNOWN, _Known())
    return known
