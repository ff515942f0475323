"""The canary: one token through an API that the unit serves. The only probe that proves generation.

1. A failed canary is BAD only without an excuse: a busy unit is healthy, and a timeout during which the unit
   made progress, or restarted, is neutral.
2. After a busy answer it retries. Busy counts against the unit only when the unit has no work, or has
   requests of this gate without progress.
3. apis.py has the requests; which API a unit serves is detected once, and remembered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

import orjson

from cellgate.probes.apis import CANARIES, Api, at, fingerprint_of, has_answer, parsed
from cellgate.probes.base import FetchError, ProbeContext, Reply, Trouble
from cellgate.probes.engines import engine
from cellgate.probes.models import ask_served
from cellgate.probes.version import ask_version
from cellgate.router.engine_nouns import Build, Built
from cellgate.router.nouns import Evidence, Finding, Models, Sign, Strength, Verdict

ASK_AGAIN_S = 0.25
"""The pause before a retry at a busy unit."""
YIELD_S = 0.75
"""The delay until the result of another gate's canary is known here: it is published, read and applied every
0.25 s each."""
VERSION_S = 0.5
"""The timeout of each question for what a unit is that is about to come up."""
_USUAL_TIMES = 4.0
_USUAL_SHARE = 0.2
IN_LINE = 4.0
"""The factor of the timeout when it is unknown whether the canary has to wait for other requests."""
_WARM = (Verdict.UP, Verdict.SUSPECT, Verdict.PROBATION)
"""A unit with another verdict may take its first request, which warms the engine up."""
_COMES_UP = (Verdict.STARTING, Verdict.PROBATION)
_NOT_SERVED = frozenset({400, 404, 405, 422, 501})
_NOT_ALLOWED = frozenset({401, 403})
_BUSY = frozenset({429, 503})
_EXCERPT = 160
_DOUBLINGS_MAX = 16
_LEFT_MAX_S = 8.0
"""The longest pause after a canary that ran out of time at a unit that makes progress: it may wait in line
there, and an engine that does not notice that it was given up (llama.cpp) computes it before the requests of
clients.
"""

_API = "api"
"""Note: the API that the unit answered last."""
_TIMEOUTS = "timeouts"
"""Note: canaries that ran out of time in a row."""
_RANK = "rank"
"""Note: the data parallel rank that the next canary goes to."""
_USUAL_S = "usual_s"
"""Note: how long a canary takes on an idle unit."""


NO_PAIR = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 0}
"""What makes an engine of SGLang that only does its part of a pair generate a token without the other one
(FAKE_BOOTSTRAP_HOST; its own /health_generate asks like this). Without a room, it may end with an error."""


def is_half(context: ProbeContext) -> bool:
    """Whether its engine is, or may be, one of SGLang that only does its part of a pair."""
    return context.unit.role != "both" and context.engine in ("", "sglang")


class _Fate(NamedTuple):
    """The result of a canary."""

    sign: Sign
    strength: Strength
    reason: str
    fingerprint: str = ""
    """What the unit says that it is."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Requests one token: every `period_s` of a unit that is not UP, of an UP unit after a while without
    progress; less and less often while canaries run out of time at a unit that makes progress.
    """

    name: ClassVar[str] = "canary"
    period_s: float = 1.0

    def limit_s(self, context: ProbeContext) -> float:
        """The longest timeout, for each request of a run: models, canary, second canary."""
        return 3 * max(context.rules.warm_up_timeout_s, self.timeout_s(context))

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """The next period, but for an UP unit not before `canary_idle_s` after its last progress. A little
        later if another gate is about to send one, which may save this one.
        """
        if context.held_down or context.is_on_hold:
            return inf
        due = max(last_at + self.period_s, self._left_until(context, last_at))
        # A canary that timed out is repeated, because its own first steps may have excused it.
        is_doubtful = _timeouts(context) > 0 and context.in_flight == 0
        if context.verdict is Verdict.UP and not is_doubtful:
            yield_s = YIELD_S if context.is_peers_turn else 0.0
            return max(due, context.life_at + context.rules.canary_idle_s + yield_s)
        return due

    def _left_until(self, context: ProbeContext, last_at: float) -> float:
        """Until when a unit is left alone after several timeouts in a row: longer from one to the next, but
        only while it makes progress.
        """
        repeats = min(_timeouts(context) - 1, _DOUBLINGS_MAX)
        if repeats < 1:
            return -inf
        pause_s = min(self.period_s * (1 << repeats), _LEFT_MAX_S)
        return min(last_at + pause_s, context.life_at + context.rules.canary_idle_s)

    def timeout_s(self, context: ProbeContext) -> float:
        """Short for a unit with requests, long when the first request may have to warm the engine up.

        Never shorter than the unit's stall limit, nor than what is usual for it; longer
        while it may have work of which nothing but its answers shows that it moves. For a DOWN unit it
        doubles from one timeout to the next: it may need to warm up, or be gone again.
        """
        rules = context.rules
        if context.verdict in (Verdict.STARTING, Verdict.PROBATION):
            return rules.warm_up_timeout_s
        if context.verdict is Verdict.DOWN:
            doublings = min(_timeouts(context), _DOUBLINGS_MAX)
            return min(rules.warm_up_timeout_s, rules.canary_timeout_s * (1 << doublings))
        # A suspect has already stalled for the limit.
        silent_s = context.stall_limit_s * (0.5 if context.verdict is Verdict.SUSPECT else 1.0)
        limit_s = max(rules.canary_timeout_s, silent_s, _USUAL_TIMES * _usual_s(context))
        load = context.load
        sees = load is not None and (load.sighted or _has_nothing_to_do(context))
        if sees:
            return limit_s
        # The requests of others are unknown: a canary may have to wait for them.
        return limit_s * (2.0 if context.verdict is Verdict.UP or context.shows_work else IN_LINE)

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """Evidence of one canary; before it the models of the unit, if unknown. Nothing of a unit on hold."""
        if context.is_on_hold:
            return
        is_starting = context.verdict is Verdict.STARTING
        life_at, reborn, timeout_s = context.life_at, context.reborn, self.timeout_s(context)
        deadline = context.now() + timeout_s
        timed_out = False
        try:
            model = model_of(context)
            if not model:
                for finding in await ask_served(context, timeout_s):
                    model = _first(finding) if isinstance(finding, Models) else model
                    yield finding
            fate = await _fly(context, model, deadline)
        except FetchError as error:
            timed_out = error.trouble is Trouble.TIMEOUT
            # A unit that has restarted meanwhile may need longer than this timeout.
            excused = context.life_at > life_at or context.hides_work or self.timeout_s(context) > timeout_s
            reason = f"no token within {timeout_s:.3g} s: {error}" if timed_out else f"no token: {error}"
            fate = _Fate(*_weigh(error.trouble, excused=excused), reason)
        context.notes[_TIMEOUTS] = _timeouts(context) + 1 if timed_out else 0
        if context.reborn != reborn:
            # Perhaps the process before has answered, in its last moment.
            fate = _Fate(Sign.NEUTRAL, Strength.WEAK, f"{fate.reason}; but the unit has restarted meanwhile")
        # What it is comes before the evidence: a unit that comes up is known.
        if fate.fingerprint:
            yield Built(context.unit.name, Build(fate.fingerprint), context.now())
        if fate.sign is Sign.GOOD and context.verdict in _COMES_UP:
            async for told in _what_it_is(context):
                yield told
        yield Evidence(context.unit.name, fate.sign, fate.strength, self.name, fate.reason, context.now())
        if is_starting and fate.sign is Sign.GOOD:
            await self._learn_usual(context, model)

    async def _learn_usual(self, context: ProbeContext, model: str) -> None:
        """The first canary may have warmed the engine up: only the next one shows what is usual."""
        with suppress(FetchError):
            await _fly(context, model, context.now() + context.rules.canary_timeout_s)


async def _what_it_is(context: ProbeContext) -> AsyncGenerator[Finding, None]:
    """The engine and its version, as far as they are unknown: after a restart both are."""
    if not context.engine:
        with suppress(FetchError):
            for finding in await ask_served(context, VERSION_S):
                yield finding
    if not context.build.version:
        for built in await ask_version(context, VERSION_S):
            yield built


def model_of(context: ProbeContext) -> str:
    """The first model configured, or the first of those the unit lists; empty when none is known.

    Never a LoRA adapter: a canary must not take the place of one that clients use.
    """
    return next(iter(context.unit.models), "") or min(context.models, default="")


def _first(models: Models) -> str:
    return next((name for name in models.names if name not in models.bases), "")


async def _fly(context: ProbeContext, model: str, deadline: float) -> _Fate:
    """Request one token until the answer is not busy. Raises FetchError."""
    life_at, busy_at, has_work = context.life_at, inf, True
    while True:
        asked_at, is_usual = context.now(), context.verdict in _WARM and _has_nothing_to_do(context)
        name, reply = await _ask(context, model, deadline)
        if reply.status not in _BUSY:
            break
        busy_at = min(busy_at, context.now())
        # A request that is refused at once is also in flight for a moment; only one that stays is work.
        has_work = has_work and context.in_flight > 0
        if _is_empty_since(context, busy_at):
            return _Fate(Sign.BAD, Strength.STRONG, f"busy with an empty queue, {_say(name, model, reply)}")
        if context.now() + ASK_AGAIN_S >= deadline:
            busy_s, moved = context.now() - busy_at, context.life_at > life_at
            stuck = has_work and not moved and context.load is not None and context.load.sighted
            return _stayed_busy(busy_s, _say(name, model, reply), stuck=stuck)
        await context.pause(ASK_AGAIN_S)
    fate = _read(name, model, reply)
    if fate.sign is Sign.GOOD:
        context.notes[_API] = name
        context.notes[_RANK] = (_rank(context) or 0) + 1
        if is_usual and _has_nothing_to_do(context):
            usual_s = _usual_s(context)
            context.notes[_USUAL_S] = usual_s + _USUAL_SHARE * (context.now() - asked_at - usual_s)
    return fate


async def _ask(context: ProbeContext, model: str, deadline: float) -> tuple[str, Reply]:
    """The first API that the unit serves, and its reply; those of the first one tried when it serves none."""
    request_id = f"cellgate-canary-{context.new_id()}"
    known, configured = context.notes.get(_API), context.unit.canary
    names = (configured,) if configured else engine(context.engine).canaries
    tried: list[tuple[str, Reply]] = []
    for name in sorted(names, key=lambda name: name != known):
        reply = await _ask_by(CANARIES[name], context, model, request_id, deadline)
        if reply.status not in _NOT_SERVED:
            return name, reply
        tried.append((name, reply))
    return tried[0]


async def _ask_by(api: Api, context: ProbeContext, model: str, request_id: str, deadline: float) -> Reply:
    """The reply of one API; that of the page about the model, when that allows no request."""
    about = None
    if api.about:
        page = await context.fetch("GET", at(api.about, model), timeout_s=deadline - context.now())
        about = parsed(page.body)
    body = api.body(model, context.new_id(), about)
    if body is None:
        return Reply(404, {}, page.body)
    if is_half(context):
        body |= NO_PAIR
    return await context.fetch(
        "POST",
        at(api.path, model),
        body=orjson.dumps(body),
        request_id=request_id,
        rank=_rank(context),
        # A suspicion may be about connections.
        fresh=context.verdict is not Verdict.UP or _timeouts(context) > 0,
        timeout_s=max(0.0, deadline - context.now()),
    )


def _timeouts(context: ProbeContext) -> int:
    """How many canaries in a row have run out of time."""
    timeouts: int = context.notes.get(_TIMEOUTS, 0)
    return timeouts


def _rank(context: ProbeContext) -> int | None:
    """The data parallel rank to ask: one that stalls; else each in turn, the same until it answers."""
    if not context.ranks:
        return None
    stalled = context.stalled_rank
    turn: int = context.notes.get(_RANK, 0) % context.ranks
    return turn if stalled is None else stalled


def _has_nothing_to_do(context: ProbeContext) -> bool:
    """True when no request is known to be there."""
    load = context.load
    return context.in_flight == 0 and (load is None or load.running + load.waiting == 0)


def _is_empty_since(context: ProbeContext, busy_at: float) -> bool:
    """True when the engine's metrics, read after its first busy answer, show that it is idle."""
    return context.load is not None and context.load.at > busy_at and _has_nothing_to_do(context)


def _stayed_busy(busy_s: float, said: str, *, stuck: bool) -> _Fate:
    """Stuck: this gate had requests there all the time, and an engine that counts its steps counted none."""
    if stuck:
        return _Fate(Sign.BAD, Strength.STRONG, f"busy, but without progress for {busy_s:.3g} s, {said}")
    return _Fate(Sign.NEUTRAL, Strength.WEAK, f"busy, {said}")


def _usual_s(context: ProbeContext) -> float:
    """How long a canary usually takes; at first so long that the shortest timeout is just enough."""
    usual_s: float = context.notes.get(_USUAL_S, context.rules.canary_timeout_s / _USUAL_TIMES)
    return usual_s


def _weigh(trouble: Trouble, *, excused: bool) -> tuple[Sign, Strength]:
    if trouble is Trouble.REFUSED:
        return Sign.BAD, Strength.FATAL
    if trouble is Trouble.OWN or (trouble is Trouble.TIMEOUT and excused):
        return Sign.NEUTRAL, Strength.WEAK
    return Sign.BAD, Strength.STRONG


def _read(name: str, model: str, reply: Reply) -> _Fate:
    """The evidence of a reply, with its reason."""
    if reply.status == 200 and has_answer(CANARIES[name], reply.body):
        fingerprint = fingerprint_of(reply.body)
        return _Fate(Sign.GOOD, Strength.STRONG, f"one token by {name}", fingerprint)
    said = _say(name, model, reply)
    if reply.status == 200:
        return _Fate(Sign.BAD, Strength.STRONG, f"no token in {said}")
    if reply.status >= 500 and reply.status not in _NOT_SERVED:
        return _Fate(Sign.BAD, Strength.STRONG, said)
    # The front end answers these without its engine: they prove nothing about it.
    reason = f"nothing is proven by {said}"
    if reply.status in _NOT_ALLOWED:
        reason += "; set `api_key_file:` to a key that the unit accepts"
    elif reply.status in _NOT_SERVED:
        reason += "; set `canary:` to an API that the unit serves"
    return _Fate(Sign.NEUTRAL, Strength.WEAK, reason)


def _say(name: str, model: str, reply: Reply) -> str:
    """A reply on one line, for a person to read."""
    excerpt = ascii(reply.body[:_EXCERPT].decode("utf-8", "replace"))
    return f"POST {at(CANARIES[name].path, model)}: HTTP {reply.status} {excerpt}"
