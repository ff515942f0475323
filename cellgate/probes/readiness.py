"""Readiness: the readiness path of the leader's engine.

Its 200 is weak evidence: it proves the front end, not the engine behind it. Its 503 is stronger: an engine
that reports itself as dead rarely errs.

In this order: `Readiness`, `PauseProbe`, `GateHealth`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple
from urllib.parse import quote

from cellgate.probes.base import (
    REST_LONG_S,
    FetchError,
    PageGet,
    ProbeContext,
    Reply,
    Trouble,
    is_in_use,
    keep_good,
    rested_s,
    said_before,
    words_in,
)
from cellgate.probes.engines import HoldQuestion, engine, object_of
from cellgate.router.nouns import (
    EnginePause,
    Evidence,
    Finding,
    HoldKind,
    Node,
    Role,
    Sign,
    Strength,
    Unit,
    Verdict,
)

_Weight = tuple[Sign, Strength]

_SAYS_NOTHING: _Weight = (Sign.NEUTRAL, Strength.WEAK)
_TROUBLES: dict[Trouble, _Weight] = {
    Trouble.REFUSED: (Sign.BAD, Strength.FATAL),
    Trouble.UNREACHABLE: (Sign.BAD, Strength.WEAK),
    Trouble.TIMEOUT: (Sign.BAD, Strength.WEAK),
    Trouble.BROKEN: (Sign.BAD, Strength.WEAK),
    Trouble.OWN: _SAYS_NOTHING,
    # Suspect at once; a canary says nothing of it (probes/canary.py), so never more than that.
    Trouble.NAME: (Sign.BAD, Strength.STRONG),
}
_READINESS_NOT_THERE = frozenset({404, 405})
_ASKS_MORE = _READINESS_NOT_THERE | {503}

_PATH = "path"
"""Note: the path that this unit has."""
_ASKED_NOTE = "asked"
"""Note: the path that is being asked, and until when."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """GET the engine's readiness path every `period_s`.

    Of an UP unit only when its address has answered no other probe and no request for so long, and every
    `answered_s` at the latest: what is to be noticed at once is an address that refuses. Of one that rests a
    connection shows that.

    `timeout_s` (3) is so long that slow answers alone stay below the rate that makes a busy unit suspect
    (5 in 10 s).
    """

    name: ClassVar[str] = "readiness"
    period_s: float = 1.0
    answered_s: float = 3.0
    timeout_s: float = 3.0

    def limit_s(self, _context: ProbeContext) -> float:
        """One timeout for all paths, and as long for a question about a bad answer."""
        return 2.0 * self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """One period after the last run, or after the last answer to another probe, or work."""
        if context.verdict is not Verdict.UP:
            return last_at + self.period_s
        rested = rested_s(context, context.fetch, last_at, self.answered_s, REST_LONG_S)
        if rested > self.answered_s:
            return last_at + rested
        answered_at = max(last_at, context.answered_at)
        if not context.is_peers_turn:
            # What another gate has seen says nothing of the way from here.
            answered_at = max(answered_at, context.progress_at)
        return min(answered_at + self.period_s, last_at + self.answered_s)

    def page(self, context: ProbeContext) -> PageGet:
        """The path that is known to exist, or the first."""
        path = _paths(context)[0]
        if context.is_calm and not context.fetch.is_held and context.rest(context.now()) > 1.0:
            context.fetch.hold(context.wake)
        context.notes[_ASKED_NOTE] = path, context.now() + self.timeout_s
        return PageGet(context.fetch, path, self.timeout_s)

    def read(
        self, context: ProbeContext, answer: Reply | FetchError
    ) -> tuple[Evidence, ...] | AsyncGenerator[Finding, None]:
        """The same good reply is the same evidence, but for its time."""
        if (known := said_before(context, answer)) is not None:
            return known
        path, deadline = context.notes[_ASKED_NOTE]
        if isinstance(answer, Reply):
            if answer.status in _ASKS_MORE:
                return self._ask_more(context, path, answer, deadline)
            context.notes[_PATH] = path
        evidence = self._evidence(context, path, answer)
        keep_good(context, answer, evidence)
        return (evidence,)

    async def _ask_more(
        self, context: ProbeContext, path: str, reply: Reply, deadline: float
    ) -> AsyncGenerator[Finding, None]:
        """Try the other paths; ask whether a unit that is not ready stands still on purpose."""
        answer: Reply | FetchError = reply
        others = [other for other in _paths(context) if other != path]
        try:
            while reply.status in _READINESS_NOT_THERE and others:
                path = others.pop(0)
                timeout_s = max(0.0, deadline - context.now())
                answer = reply = await context.fetch("GET", path, timeout_s=timeout_s)
        except FetchError as error:
            answer = error
        else:
            if reply.status not in _READINESS_NOT_THERE:
                context.notes[_PATH] = path
            if reply.status == 503:
                for word in await ask_pause(context):
                    yield word
        yield self._evidence(context, path, answer)

    def _evidence(self, context: ProbeContext, path: str, answer: Reply | FetchError) -> Evidence:
        if isinstance(answer, FetchError):
            (sign, strength), said = _TROUBLES[answer.trouble], str(answer)
        else:
            (sign, strength), said = _weigh(context, answer), f"HTTP {answer.status}"
            if answer.status >= 400 and (words := words_in(answer.body)):
                said += f" {words}"
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
    return (Sign.GOOD, Strength.WEAK) if reply.status == 200 else _SAYS_NOTHING


# EnginePause: whether an engine says that it stands still on purpose: it is paused, asleep or scaling.
#
# What follows from it is decided in router/health.py. An engine that has never been silent is hardly ever
# asked, and one without such paths at most once a minute.


ASK_S = 0.5
"""The timeout of one question: the front end answers by itself, or after one step of the engine."""
_SCALING = b"scaling"
"""In the body of a 503 with which an engine answers every path while it scales."""
_KNOWN_NOTE = "known"
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
class PauseProbe:
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
        if is_in_use(context):
            return last_at + self.period_s
        return last_at + rested_s(context, context.fetch, last_at, self.idle_s)

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
            context.notes[_KNOWN_NOTE] = _Known(context.engine, now, hidden or answered)
        for finding in _findings(context, said):
            yield finding


async def ask_pause(context: ProbeContext) -> list[EnginePause]:
    """What explains a bad answer that another probe has got: that the unit stands still on purpose. Empty:
    it does not say so.
    """
    try:
        found = _findings(context, await _ask(context, engine(context.engine).holds))
    except FetchError:
        return []
    return [said for said in found if said.kind is not None]


_Answers = dict[HoldQuestion, "HoldKind | _Says"]


def _findings(context: ProbeContext, said: _Answers) -> list[EnginePause]:
    kinds = [answer for answer in said.values() if isinstance(answer, HoldKind)]
    if not kinds and _Says.NO not in said.values():
        return []
    return [EnginePause(context.unit.name, kinds[0] if kinds else None, context.now())]


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
    found = object_of(reply.body) if reply.status == 200 else None
    flag = found.get(question.flag) if found else None
    if flag is True:
        return question.kind
    return _Says.NO if flag is False else _Says.NOTHING


def _known(context: ProbeContext) -> _Known:
    known: _Known = context.notes.get(_KNOWN_NOTE, _Known())
    return known


# The health of a unit as reported by the gate in front of it: replaces the canary for units of other gates.
#
# That gate sends canaries, and this one reads the results in Redis. Only when there are none, or after a
# failed request, is the gate itself probed, at its `/healthz/unit/NAME`.


VIA_GATE = "cellgate"
"""The engine of a unit that is reached through another gate."""
GATE_EPOCHS = "epochs at its gate"
"""The reader of the epochs of such a unit: a number that restarts with each process of this gate."""


def via_gate(name: str) -> tuple[Node, ...]:
    """The node of a unit that is called `name` at its gate: it has no probes here."""
    return (Node(name, Role.LEADER),)


def name_there(unit: Unit) -> str:
    """The name of a unit at its gate; here it may have another name."""
    return unit.nodes[0].name


_BAD: _Weight = (Sign.BAD, Strength.STRONG)
_GATE_TROUBLES: dict[Trouble, _Weight] = {
    Trouble.REFUSED: (Sign.BAD, Strength.FATAL),
    Trouble.UNREACHABLE: _BAD,
    Trouble.TIMEOUT: _BAD,
    Trouble.BROKEN: _BAD,
    Trouble.OWN: _SAYS_NOTHING,
    Trouble.NAME: _SAYS_NOTHING,
}
_NOT_USABLE = frozenset({404, 503})


@dataclass(frozen=True, slots=True)
class GateHealth:
    """Runs every `period_s`; for an UP unit only after `quiet_s` without progress.

    Its name is the canary's: it runs when a canary is wanted, and counts as one.
    """

    name: ClassVar[str] = "canary"
    period_s: float = 1.0
    quiet_s: float = 4.0
    timeout_s: float = 2.0

    def limit_s(self, _context: ProbeContext) -> float:
        return self.timeout_s

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """A period after the last run; for an UP unit not while it makes progress."""
        due = last_at + self.period_s
        return max(due, context.progress_at + self.quiet_s) if context.verdict is Verdict.UP else due

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        path = f"/healthz/unit/{quote(name_there(context.unit), safe='')}"
        try:
            reply = await context.fetch("GET", path, timeout_s=self.timeout_s)
        except FetchError as error:
            (sign, strength), said = _GATE_TROUBLES[error.trouble], str(error)
        else:
            (sign, strength), said = _weigh_gate(context, reply), f"HTTP {reply.status}"
        reason = f"GET {path} at its gate: {said}"
        yield Evidence(context.unit.name, sign, strength, self.name, reason, context.now())


def _weigh_gate(context: ProbeContext, reply: Reply) -> _Weight:
    if reply.status in _NOT_USABLE:
        return _BAD
    if reply.status != 200:
        return _SAYS_NOTHING
    # Its gate suspects it as well, or finds it slow: that does not clear it.
    if context.verdict is Verdict.SUSPECT and "x-envoy-degraded" in reply.headers:
        return _SAYS_NOTHING
    return Sign.GOOD, Strength.STRONG
