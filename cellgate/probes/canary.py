"""The canary: one token through an API that the unit serves. The only probe that proves generation.

1. A failed canary is BAD only without an excuse: a busy unit is healthy, and a timeout during which the unit
   made progress, or restarted, is neutral.
2. After a busy answer it retries. Busy counts against the unit only when the unit has no work, or has
   requests of this gate without progress.
3. engines.py has the requests; which API a unit serves is detected once, and remembered. What clients use is
   asked for as well: one kind (path, stream or not, model) after the other while the unit is well, and all of
   them when it is suspected or comes back. A kind that this unit has never served counts only if it hangs.
4. A canary never has a model loaded that is not: engines that keep a few of many loaded are asked for which.
5. A unit without any API for canaries is proven by its readiness, its models, and requests of clients.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from cellgate.probes.base import FetchError, ProbeContext, Reply, Trouble, is_in_use, shuts_down, words_in
from cellgate.probes.engines import (
    APIS,
    MEDIA,
    NOTHING_GENERATED,
    at,
    encoded,
    engine,
    fingerprint_of,
    parsed,
    why_no_answer,
)
from cellgate.probes.runner import RESOLUTION_S
from cellgate.probes.served import ask_served, ask_version
from cellgate.router.nouns import (
    BUSY_STATUSES,
    USABLE,
    Build,
    Built,
    Evidence,
    Finding,
    Models,
    Sign,
    Strength,
    Use,
    Verdict,
)

AWAKE_S, COUNTED_AWAKE_S = 2.0, 1.5
"""A unit with work gets a canary after so long without a sign of life; the second: if steps are counted."""
CANARY_KINDS_MAX = 4
"""Kinds of requests that are asked for: the last ones in use."""
CANARY_MODELS_MAX = 4
"""Models that are tried, one after the other, until one answers."""
REFUSED_MAX_S = 4.0
"""The longest pause between canaries of a unit that refuses them all."""
ASK_AGAIN_S = 0.25
"""Before a retry at a busy unit."""
YIELD_S = 0.75
"""Until the result of another gate's canary is known here: published, read, applied every 0.25 s each."""
VERSION_S = 0.5
"""The timeout of each question for what a unit is that is about to come up."""
_UNASKED = {"x-cellgate": "unasked"}
"""Of a page about a model for which no request can be made."""
_UNFIT = {"x-cellgate": "unfit"}
"""Unasked too: the model is served, and its page tells no inputs that a canary can send."""
_USUAL_TIMES, _STILL_TIMES = 4.0, 2.0
"""A canary may take so many times as long as usual; and where the engine's own counters stand still."""
_USUAL_SHARE = 0.2
IN_LINE = 2.0
"""The factor of the timeout when it is unknown whether the canary has to wait for other requests."""
BLIND_IDLE = 2.0 / 3.0
"""A unit that counts no steps gets its idle canary after this share of `canary_idle_s`: they fail later."""
YOUNG, YOUNG_LATE = 5, 2
"""After so many answered canaries it is known how long they take; until then so many more decide, and idle
ones come as soon as with work, so that a hang is found no later."""
_WARM = (Verdict.UP, Verdict.SUSPECT, Verdict.PROBATION)
"""A unit with another verdict may take its first request, which warms the engine up."""
_COMES_UP = (Verdict.STARTING, Verdict.PROBATION)
_NOT_SERVED = frozenset({400, 404, 405, 422, 501})
_LACKS = frozenset({404, 405, 501})
_NOT_ALLOWED = frozenset({401, 403})
_CANARY_NO_PATH = re.compile(
    rb"^\W*(?:detail\W*)?(?:not found|method not allowed|\d{3}:? not found)", re.IGNORECASE
)
"""What servers say of a path that they do not have."""
_EXCERPT = 80
_DOUBLINGS_MAX = 16
_LEFT_MAX_S = 8.0
"""The longest pause after a canary that ran out of time at a unit that makes progress: it may wait in line,
and llama.cpp computes it before requests of clients, although it was given up."""
_WAITS_MAX_S = 8.0
"""A canary waits no longer for the work of a unit; whether that explains its time-out is another question."""
_JOINS = 0.25
"""What came to the unit within this part of the timeout of a canary may have been computed before it."""
_API = "api"
"""Note: the API that the unit answered last, and the model."""
_SERVED = "served"
"""Note: the kinds that the unit has answered."""
_TURN = "turn"
"""Note: the number of the next kind that is asked for."""
_YOUNG_FOR = "young_for"
"""Note: how many more have to be answered."""
_HUNG = "hung"
"""Note: the kind that ran out of time last, while others were answered."""
_REFUSED_NOTE = "refused"
"""Note: canaries in a row that were refused."""
_LOADED = "loaded"
"""Note: the page on which the engine lists the models that are loaded; empty: it has none."""
_LISTS = (("/api/ps", "models"), ("/running", "running"))
"""Pages of engines that load models on demand (Ollama, llama-swap), and their lists."""
_TIMEOUTS = "timeouts"
"""Note: canaries that ran out of time in a row."""
_UNANSWERED = "unanswered"
"""Note: since when canaries in a row have had no answer; and when the last one was sent."""
_ASKED_NOTE = "asked"
_LATE = "late"
"""Note: those of them that nothing explains but a hang, or chance."""
_OUTRUN = "outrun"
"""Note: canaries in a row that an idle unit was too slow for."""
_RANK = "rank"
"""Note: the data parallel rank that the next canary goes to."""
_USUAL_S_NOTE = "usual_s"
"""Note: how long a canary takes on an idle unit."""
NO_PAIR = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 0}
"""With it an engine of SGLang that only does its part of a pair generates a token without the other one
(FAKE_BOOTSTRAP_HOST, as its own /health_generate); without a room, it may end with an error."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Requests one token: every `period_s` of a unit that is not UP, of an UP unit after a while without
    progress; less and less often while canaries run out of time at a unit that makes progress.
    """

    name: ClassVar[str] = "canary"
    period_s: float = 1.0

    def limit_s(self, context: ProbeContext) -> float:
        """The longest timeout, for each request of a run: models, canaries of each kind, second canary."""
        return (3 + CANARY_KINDS_MAX) * max(context.rules.warm_up_timeout_s, canary_timeout_s(context))

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """The next period, but for an UP unit not before `canary_idle_s` after its last progress, or AWAKE_S
        while it has work. A little later if another gate is about to send one, which may save this one.
        """
        if context.held_down or context.is_on_hold:
            return inf
        due = max(last_at + self.period_s, self._left_until(context, last_at))
        # A canary that timed out is repeated, because its own first steps may have excused it.
        is_doubtful = _timeouts(context) > 0 and context.in_flight == 0
        if context.verdict is Verdict.UP and not is_doubtful:
            yield_s = YIELD_S if context.is_peers_turn else 0.0
            return max(due, context.progress_at + idle_s(context) + yield_s)
        refused: int = context.notes.get(_REFUSED_NOTE, 0)
        return max(due, last_at + min(self.period_s * (1 << min(refused, 8)) - self.period_s, REFUSED_MAX_S))

    def _left_until(self, context: ProbeContext, last_at: float) -> float:
        """Until when a unit is left alone after several timeouts in a row: longer from one to the next, but
        only while it makes progress.
        """
        repeats = min(_timeouts(context) - 1, _DOUBLINGS_MAX)
        if repeats < 1:
            return -inf
        left_until = last_at + min(self.period_s * (1 << repeats), _LEFT_MAX_S)
        is_seen = context.verdict is Verdict.SUSPECT and context.is_seen_still
        if context.hides_work() and not (is_seen or (_is_young(context) and not context.in_flight)):
            return left_until
        return min(left_until, context.progress_at + idle_s(context))

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """Evidence of one canary; before it the models of the unit, if unknown. Nothing of a unit on hold."""
        if context.is_on_hold:
            return
        is_starting, asked_at = context.verdict is Verdict.STARTING, context.now()
        progress_at, restarted, timeout_s = context.progress_at, context.restarted, canary_timeout_s(context)
        timed_out, is_unseen, was_idle = False, False, context.in_flight == 0
        late = _timeouts(context)
        waited_s = asked_at - context.notes.get(_ASKED_NOTE, asked_at) if late else 0.0
        context.notes[_ASKED_NOTE] = asked_at
        if not late:
            context.notes[_UNANSWERED] = asked_at
        try:
            model = model_of(context)
            if not model:
                for finding in await ask_served(context, timeout_s):
                    model = _first(finding) if isinstance(finding, Models) else model
                    yield finding
            judged = await _fly_each(context, model, timeout_s)
        except FetchError as error:
            timed_out = error.trouble is Trouble.TIMEOUT
            excused = _is_excused(
                context, error, asked_at, timeout_s, moved=context.progress_at > progress_at
            )
            is_unseen = timed_out and not context.is_seen_still
            within = f" within {context.now() - asked_at:.3g} s" if timed_out else ""
            judged = _Finding(*_weigh(error.trouble, excused=excused), f"no token{within}: {error}")
        context.notes[_TIMEOUTS] = _timeouts(context) + 1 if timed_out else 0
        if not timed_out:
            context.notes[_LATE] = 0
        is_outrun = timed_out and was_idle and context.in_flight == 0 and context.progress_at > progress_at
        context.notes[_OUTRUN] = context.notes.get(_OUTRUN, 0) + 1 if is_outrun else 0
        if context.restarted != restarted:
            # Perhaps the process before has answered, in its last moment.
            reason = f"{judged.reason}; but the unit has restarted meanwhile"
            judged = _Finding(Sign.NEUTRAL, Strength.WEAK, reason)
        # What it is comes before the evidence: a unit that comes up is known.
        if judged.fingerprint:
            yield Built(context.unit.name, Build(judged.fingerprint), context.now())
        if judged.sign is Sign.GOOD and context.verdict in _COMES_UP:
            async for reported in _what_it_is(context):
                yield reported
        if judged.sign is Sign.GOOD:
            _count_answered(context, asked_at, late, waited_s)
        name, now = context.unit.name, context.now()
        yield judged.evidence(name, now, is_unseen=is_unseen)
        if is_starting and judged.sign is Sign.GOOD:
            await self._learn_usual(context, model, now - asked_at)

    async def _learn_usual(self, context: ProbeContext, model: str, first_s: float) -> None:
        """The first canary may have warmed the engine up: only the next one shows what is usual. It takes no
        longer than that.
        """
        asked_at, least_s = context.now(), IN_LINE * context.rules.canary_timeout_s
        try:
            deadline = asked_at + max(context.rules.canary_timeout_s, 2.0 * first_s)
            judged = await _fly(context, _Kind(model=model), deadline)
        except FetchError as error:
            if error.trouble is Trouble.TIMEOUT:
                context.is_late_by_chance(1, is_young=True, is_beside=False)
        else:
            took_s, usual = (
                min(context.now() - asked_at, first_s),
                context.notes.setdefault(_USUAL_S_NOTE, {}),
            )
            if judged.sign is Sign.GOOD:
                context.answered_beside(asked_at, 0, 0.0)
            if judged.sign is Sign.GOOD and not usual and took_s > least_s:
                # Clients came meanwhile; but it took as long before any did.
                usual[context.notes[_API][0]] = took_s


def is_half(context: ProbeContext) -> bool:
    """Whether its engine is, or may be, one of SGLang that only does its part of a pair."""
    return context.unit.role != "both" and context.engine in ("", "sglang")


class _Kind(NamedTuple):
    """What a canary asks for. Without an API: the first that the unit serves."""

    api: str = ""
    stream: bool = False
    model: str = ""

    @property
    def word(self) -> str:
        return f"{self.api}{', streamed' if self.stream else ''}"


class _AloneError(FetchError):
    """No answer in time, while the unit answered others that came later."""


class _Finding(NamedTuple):
    """The result of a canary."""

    sign: Sign
    strength: Strength
    reason: str
    fingerprint: str = ""
    """What the unit says that it is."""
    is_refusal: bool = False
    """It answered with an error."""
    is_refused: bool = False
    """The error is one of the request."""
    is_empty: bool = False
    """It answered with nothing, and ended in good order."""

    def evidence(self, unit: str, at: float, *, is_unseen: bool) -> Evidence:
        """What it says of the unit."""
        return Evidence(
            unit,
            self.sign,
            self.strength,
            Canary.name,
            self.reason,
            at,
            is_unseen=is_unseen,
            is_reply=self.is_refusal,
            is_refusal=self.is_refused,
            is_empty=self.is_empty,
        )


def canary_timeout_s(context: ProbeContext) -> float:
    """Short for a unit with requests, long when the first request may have to warm the engine up.

    Never shorter than the unit's stall limit, nor than what is usual for it; longer while it may have work
    that shows nothing but answers. For a DOWN unit it doubles each time: it may need to warm up, or be gone.
    While a unit is borne it is asked again and again, because one may be late by chance; the last one waits
    until that ends.
    """
    timeout_s = _worked_s(context)
    if context.verdict not in USABLE:
        return timeout_s
    borne_s = _borne_until(context, at_once=True) - context.now()
    return borne_s if timeout_s < borne_s < 2.0 * timeout_s else timeout_s


def _worked_s(context: ProbeContext) -> float:
    """How long a canary may take at a unit that works."""
    rules = context.rules
    if context.verdict in (Verdict.STARTING, Verdict.PROBATION):
        return rules.warm_up_timeout_s
    if context.verdict is Verdict.DOWN:
        doublings = min(_timeouts(context), _DOUBLINGS_MAX)
        return min(rules.warm_up_timeout_s, rules.canary_timeout_s * (1 << doublings))
    is_suspect = context.verdict is Verdict.SUSPECT
    if is_suspect and context.is_seen_still:
        # It has stalled for the limit, and its own counters say so.
        return max(rules.canary_timeout_s, _STILL_TIMES * _usual_s(context))
    # Those in a row without an answer have waited together.
    is_next = _timeouts(context) > 0 and context.progress_at < context.notes[_ASKED_NOTE]
    silent_s = min(context.stall_limit_s * (0.5 if is_suspect or is_next else 1.0), _WAITS_MAX_S)
    load = context.load
    sees = load is not None and (load.sighted or _has_nothing_to_do(context))
    # Else the requests of others are unknown: a canary may have to wait for them.
    least_s = rules.canary_timeout_s * (1.0 if sees else IN_LINE)
    usual_s = _USUAL_TIMES * _usual_s(context)
    # Nothing kept it waiting, and the unit moved: the canary itself takes longer than that.
    outrun: int = min(context.notes.get(_OUTRUN, 0), _DOUBLINGS_MAX)
    return max(least_s, silent_s, min(usual_s * (1 << outrun), max(usual_s, _WAITS_MAX_S)))


def late_at(context: ProbeContext, doubted_at: float) -> float:
    """When a canary on its way to a unit that came into doubt then is late: as one that was sent then; but
    those in a row without an answer, of a unit that is seen to stand still, have waited together.
    """
    still, notes = context.is_seen_still, context.notes
    since: float = notes.get(_UNANSWERED, -inf) if still else max(notes.get(_ASKED_NOTE, -inf), doubted_at)
    return max(max(since, context.progress_at) + canary_timeout_s(context), context.borne_until)


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


async def _fly_each(context: ProbeContext, model: str, timeout_s: float) -> _Finding:
    """Ask for each kind that is to be asked for: the worst of what comes of it. Raises FetchError."""
    waiting = context.takes_turn()
    loaded = await _loaded(context, timeout_s)
    if loaded is not None and not loaded:
        return await _by_pages(context, "it has no model loaded, and a canary loads none", timeout_s)
    passed, fates = set[_Kind](), list[_Finding]()
    for kind in _kinds(context, model, waiting, loaded):
        asked_at, was_hung = context.now(), context.notes.get(_HUNG) == kind
        # It may be one of the requests for which that takes long.
        limit_s = max(timeout_s, context.borne_s) if was_hung else timeout_s
        try:
            judged = await _fly(context, kind, asked_at + limit_s)
        except FetchError as error:
            if error.trouble is not Trouble.TIMEOUT or not kind.api:
                raise
            if not ((was_hung and passed) or context.answers_since(asked_at)):
                raise
            context.notes[_HUNG] = kind
            if context.now() - asked_at < context.borne_s:
                raise
            raise _AloneError(error.trouble, f"{kind.word}, while others are answered: {error}") from error
        if judged.sign is Sign.GOOD:
            passed.add(kind)
            _served(context).add(kind[:2])
            if context.notes.get(_HUNG) == kind:
                del context.notes[_HUNG]
        elif kind.api and judged.is_refusal and not _counts(context, kind):
            continue
        fates.append(judged)
    if not fates:
        fates.append(await _fly(context, _Kind(model=model), context.now() + timeout_s))
    worst = min(fates, key=lambda judged: (judged.sign is not Sign.BAD, judged.sign is not Sign.NEUTRAL))
    is_refused = worst.is_refusal and worst.sign is Sign.NEUTRAL
    context.notes[_REFUSED_NOTE] = context.notes.get(_REFUSED_NOTE, 0) + 1 if is_refused else 0
    return worst


def _served(context: ProbeContext) -> set[tuple[str, bool]]:
    served: set[tuple[str, bool]] = context.notes.setdefault(_SERVED, set())
    return served


def _counts(context: ProbeContext, kind: _Kind) -> bool:
    """Whether a unit is at fault for refusing this kind: it served it before, and its one model is there."""
    return kind[:2] in _served(context) and len(context.models) < 2


def _kinds(
    context: ProbeContext, model: str, waiting: Use | None, loaded: frozenset[str] | None
) -> list[_Kind]:
    """The kinds to ask for now: one of a unit that seems well, all of any other."""
    is_well = context.verdict is Verdict.UP and not _timeouts(context)
    found = {} if context.unit.canary or is_half(context) else _in_use(context, loaded, is_well=is_well)
    known = context.notes.get(_API)
    if found and known is not None and len(context.models) < 2:
        found.setdefault((known[0], False), _Kind(model=model))
    if not found:
        of = min(loaded & context.models, default=model) if loaded else model
        return [_Kind(model=of)]
    kinds = list(found.values())
    if not is_well:
        return kinds
    if waiting is not None and (asked := found.get((waiting.route, waiting.stream))) is not None:
        return [asked]
    turn: int = context.notes.get(_TURN, 0)
    context.notes[_TURN] = turn + 1
    return [kinds[turn % len(kinds)]]


def _in_use(
    context: ProbeContext, loaded: frozenset[str] | None, *, is_well: bool
) -> dict[tuple[str, bool], _Kind]:
    """What clients use of what canaries can ask for, the last first; each path with its last model."""
    found: dict[tuple[str, bool], _Kind] = {}
    for use in context.uses:
        api, model = APIS.get(use.route), use.model or model_of(context)
        if api is None or (use.route, use.stream) in found or (api.is_costly and is_well):
            continue
        # Never an adapter, nor a name that only its engine knows.
        if model and model not in context.models:
            model = model_of(context)
        if (not use.stream or api.streams) and (loaded is None or model in loaded):
            found[use.route, use.stream] = _Kind(use.route, use.stream, model)
        if len(found) == CANARY_KINDS_MAX:
            break
    return found


async def _loaded(context: ProbeContext, timeout_s: float) -> frozenset[str] | None:
    """The models that an engine with several has loaded; None: it has all of them, or does not say."""
    if len(context.models) < 2 or context.notes.get(_LOADED) == "":
        return None
    for path, field in _LISTS:
        if context.notes.get(_LOADED, path) != path:
            continue
        page = parsed((await context.fetch("GET", path, timeout_s=timeout_s)).body)
        listed = page.get(field) if isinstance(page, dict) else None
        if isinstance(listed, list):
            context.notes[_LOADED] = path
            cards = [card for card in listed if isinstance(card, dict)]
            return frozenset(str(card.get("name") or card.get("model")) for card in cards)
    context.notes[_LOADED] = ""
    return None


async def _by_pages(context: ProbeContext, why: str, timeout_s: float) -> _Finding:
    """The fate of a unit that no canary can prove: by its readiness and its models. Raises FetchError."""
    for path in (engine(context.engine).ready[0], "/v1/models"):
        reply = await context.fetch("GET", path, timeout_s=timeout_s)
        if reply.status != 200 and not (reply.status in _LACKS and path != "/v1/models"):
            return _Finding(Sign.NEUTRAL, Strength.WEAK, f"{why}; GET {path}: HTTP {reply.status}")
    return _Finding(
        Sign.GOOD, Strength.STRONG, f"{why}: it is proven by GET {path} and requests of clients alone"
    )


async def _fly(context: ProbeContext, kind: _Kind, deadline: float) -> _Finding:
    """Request one token until the answer is not busy. Raises FetchError."""
    progress_at, busy_at, has_work = context.progress_at, inf, True
    while True:
        asked_at, is_usual = context.now(), context.verdict in _WARM and _has_nothing_to_do(context)
        done, reply = await _ask_token(context, kind, deadline)
        if reply.status not in BUSY_STATUSES or (reply.status == 503 and shuts_down(words_in(reply.body))):
            break
        busy_at = min(busy_at, context.now())
        # A request that is refused at once is also in flight for a moment; only one that stays is work.
        has_work = has_work and context.in_flight > 0
        if _is_empty_since(context, busy_at):
            return _Finding(Sign.BAD, Strength.STRONG, f"busy with an empty queue, {_say(done, reply)}")
        if context.now() + ASK_AGAIN_S >= deadline:
            busy_s, moved = context.now() - busy_at, context.progress_at > progress_at
            said = _say(done, reply)
            if has_work and not moved and context.load is not None and context.load.sighted:
                # This gate had requests there all the time, and an engine that counts its steps counted none.
                said = f"busy, but without progress for {busy_s:.3g} s, {said}"
                return _Finding(Sign.BAD, Strength.STRONG, said)
            return _Finding(Sign.NEUTRAL, Strength.WEAK, f"busy, {said}")
        await context.pause(ASK_AGAIN_S)
    if not kind.api and context.now() < deadline and _lacks_all(context, [(done, reply)]):
        why = "it serves no API that a canary could ask for"
        return await _by_pages(context, why, max(0.0, deadline - context.now()))
    judged = _read(context, done, reply)
    if judged.sign is Sign.GOOD:
        if not kind.api:
            context.notes[_API] = done.api, done.model
        context.notes[_RANK] = (_rank(context) or 0) + 1
        # What an engine reports may be this canary itself; that the one before it ran out of time tells more.
        is_outrun = context.notes.get(_OUTRUN, 0) > 0 and context.in_flight == 0
        if (is_usual and _has_nothing_to_do(context)) or is_outrun:
            usual: dict[str, float] = context.notes.setdefault(_USUAL_S_NOTE, {})
            usual_s = usual.get(done.word, context.rules.canary_timeout_s / _USUAL_TIMES)
            usual[done.word] = usual_s + _USUAL_SHARE * (context.now() - asked_at - usual_s)
    return judged


def _lacks_all(context: ProbeContext, tried: Sequence[tuple[_Kind, Reply]]) -> bool:
    """Whether a unit without an answered canary has none of the paths: that is no missing model."""
    if _API in context.notes or context.unit.canary or context.engine == "triton":
        return False
    return all(_lacks_path(done, reply) for done, reply in tried)


def _lacks_path(kind: _Kind, reply: Reply) -> bool:
    """Whether it is the path that is missing, and not the model."""
    return reply.status in _LACKS and not (kind.model and kind.model.encode("utf-8", "replace") in reply.body)


async def _ask_token(context: ProbeContext, kind: _Kind, deadline: float) -> tuple[_Kind, Reply]:
    """What was asked, and the reply. Without an API: the first that the unit serves, and its reply; those of
    the first one tried when it serves none.
    """
    request_id = f"cellgate-canary-{context.new_id()}"
    if kind.api:
        return kind, await _ask_by(kind, context, request_id, deadline)
    known, configured = context.notes.get(_API, ("", "")), context.unit.canary
    names = (configured,) if configured else engine(context.engine).canaries
    if known[0] in MEDIA and not configured:
        names = (known[0], *names)
    models = [kind.model]
    if not context.unit.models and kind.model in context.models:
        models += sorted(context.models - {kind.model})[: CANARY_MODELS_MAX - 1]
    tried: list[tuple[_Kind, Reply]] = []
    for name in sorted(names, key=lambda name: name != known[0]):
        for model in sorted(models, key=lambda model: model != known[1]):
            done = _Kind(name, False, model)
            reply = await _ask_by(done, context, request_id, deadline)
            if reply.status not in _NOT_SERVED:
                return done, reply
            tried.append((done, reply))
            if _lacks_path(done, reply):
                break
    if _lacks_all(context, tried) and context.now() < deadline:
        for name in MEDIA:
            done = _Kind(name, False, kind.model)
            reply = await _ask_by(done, context, request_id, deadline)
            if reply.status not in _LACKS:
                return done, reply
    return next((each for each in tried if each[1].status not in _LACKS), tried[0])


async def _ask_by(kind: _Kind, context: ProbeContext, request_id: str, deadline: float) -> Reply:
    """The reply of one API; that of the page about the model, when that allows no request."""
    api, model, about = APIS[kind.api], kind.model, None
    if api.about:
        page = await context.fetch("GET", at(api.about, model), timeout_s=deadline - context.now())
        about = parsed(page.body)
    body = api.body(model, context.new_id(), about)
    if body is None:
        return Reply(404, _UNFIT if page.status == 200 else _UNASKED, page.body)
    if is_half(context):
        body |= NO_PAIR
    if kind.stream:
        body["stream"] = True
    data, content_type = encoded(api, body)
    return await context.fetch(
        "POST",
        at(api.path, model),
        body=data,
        content_type=content_type,
        request_id=request_id,
        rank=_rank(context),
        # A suspicion may be about connections.
        fresh=context.verdict is not Verdict.UP or _timeouts(context) > 0,
        timeout_s=max(0.0, deadline - context.now()),
    )


def idle_s(context: ProbeContext) -> float:
    """How long a unit may show no life: what runs there makes a hang urgent."""
    counts = context.load is not None and context.load.sighted
    due_s = context.rules.canary_idle_s * (1.0 if counts else BLIND_IDLE)
    is_urgent = is_in_use(context) or (_is_young(context) and not counts)
    return min(due_s, COUNTED_AWAKE_S if counts else AWAKE_S) if is_urgent else due_s


def _is_excused(
    context: ProbeContext, error: FetchError, asked_at: float, timeout_s: float, *, moved: bool
) -> bool:
    """Whether a canary that failed so says nothing against the unit, which has `moved` meanwhile."""
    is_explained = context.hides_work(asked_at + _JOINS * timeout_s) or _worked_s(context) > timeout_s
    is_alone, is_hung, is_chance = isinstance(error, _AloneError), _HUNG in context.notes, False
    if moved and not is_hung:
        context.notes[_LATE] = 0
    if error.trouble is Trouble.TIMEOUT and (is_hung or not (moved or is_explained)):
        late = context.notes[_LATE] = context.notes.get(_LATE, 0) + 1
        is_beside = is_alone or (is_hung and moved)
        is_chance = context.is_late_by_chance(late, is_young=_says_little(context), is_beside=is_beside)
    # A unit that has restarted meanwhile may need longer than this timeout.
    # Timers fire a little early; one that had all its time counts.
    is_borne = context.now() + 2.0 * RESOLUTION_S < _borne_until(context)
    others = not is_alone and (moved or is_explained or is_borne)
    return is_chance or others


def _borne_until(context: ProbeContext, *, at_once: bool = False) -> float:
    """Until when no canary of its row speaks against the unit; `at_once`: if the next one is sent now."""
    if context.in_flight:
        return context.borne_until
    since = context.now() if at_once and not _timeouts(context) else context.notes.get(_UNANSWERED, -inf)
    return max(since, context.progress_at) + context.borne_s if context.borne_s else -inf


def _is_young(context: ProbeContext) -> bool:
    """Whether so few canaries have been answered that one that is late says little."""
    return _young_for(context) > 0


def _says_little(context: ProbeContext) -> bool:
    """Whether one more that is late says little, as far as nothing is known of others."""
    return _is_young(context) and _timeouts(context) < YOUNG_LATE


def _young_for(context: ProbeContext) -> int:
    count: int = context.notes.get(_YOUNG_FOR, 0)
    return count


def _count_answered(context: ProbeContext, asked_at: float, late: int, waited_s: float) -> None:
    context.answered_beside(asked_at, late, waited_s)
    before = YOUNG if context.verdict is Verdict.STARTING else _young_for(context)
    context.notes[_YOUNG_FOR] = max(0, before - 1)


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
    return context.in_flight == 0 and (load is None or load.at_engine == 0)


def _is_empty_since(context: ProbeContext, busy_at: float) -> bool:
    """True when the engine's metrics, read after its first busy answer, show that it is idle."""
    return context.load is not None and context.load.at > busy_at and _has_nothing_to_do(context)


def _usual_s(context: ProbeContext) -> float:
    """How long a canary usually takes; at first so long that the shortest timeout is just enough."""
    usual: dict[str, float] = context.notes.get(_USUAL_S_NOTE, {})
    return max(usual.values(), default=context.rules.canary_timeout_s / _USUAL_TIMES)


def _weigh(trouble: Trouble, *, excused: bool) -> tuple[Sign, Strength]:
    if trouble is Trouble.REFUSED:
        return Sign.BAD, Strength.FATAL
    if trouble in (Trouble.OWN, Trouble.NAME) or (trouble is Trouble.TIMEOUT and excused):
        return Sign.NEUTRAL, Strength.WEAK
    return Sign.BAD, Strength.STRONG


def _read(context: ProbeContext, kind: _Kind, reply: Reply) -> _Finding:
    """The evidence of a reply, with its reason."""
    if reply.status == 200:
        if wrong := why_no_answer(APIS[kind.api], reply, stream=kind.stream):
            is_empty, said = wrong == NOTHING_GENERATED, f"{wrong} in {_say(kind, reply)}"
            return _Finding(Sign.BAD, Strength.STRONG, said, is_empty=is_empty)
        return _Finding(Sign.GOOD, Strength.STRONG, f"one token by {kind.word}", fingerprint_of(reply.body))
    said = _say(kind, reply)
    if reply.status >= 500 and reply.status not in _NOT_SERVED:
        # Nothing in this request can have made the engine say that it shuts down.
        strength = Strength.FATAL if shuts_down(words_in(reply.body)) else Strength.STRONG
        return _Finding(Sign.BAD, strength, said, is_refusal=True)
    # A unit that refuses canaries refuses clients. One that starts has never served, and proves nothing.
    reason = f"the canary was refused: {said}"
    if reply.status in _NOT_ALLOWED:
        reason += "; its key?; set `api_key_file:` to a key that the unit accepts"
    elif reply.status in _NOT_SERVED:
        reason += _advice(kind, reply)
    if context.verdict is Verdict.STARTING or reply.headers is _UNASKED or reply.headers is _UNFIT:
        return _Finding(Sign.NEUTRAL, Strength.WEAK, reason, is_refusal=True)
    return _Finding(Sign.BAD, Strength.STRONG, reason, is_refusal=True, is_refused=True)


def _advice(kind: _Kind, reply: Reply) -> str:
    """What may be wrong where a canary is not served: the model, if the unit speaks of it, else the API."""
    model = kind.model
    if reply.headers is _UNFIT:
        return "; set `canary:` to an API that the unit serves"
    if model and re.search(rb"[\s\"'`]%b[\s\"'`]" % re.escape(model.encode()), reply.body[: 8 * _EXCERPT]):
        return f"; it does not serve `{model}`: see what its engine was started with"
    if reply.body and not _CANARY_NO_PATH.search(reply.body):
        return "; see its engine's log"
    return "; set `canary:` to an API that the unit serves, if its engine was started with the right model"


def _say(kind: _Kind, reply: Reply) -> str:
    """A reply on one line, for a person to read: in the engine's own words, if its JSON has any."""
    excerpt = words_in(reply.body) or ascii(reply.body[:_EXCERPT].decode("utf-8", "replace"))
    return f"POST {at(APIS[kind.api].path, kind.model)}: HTTP {reply.status} {excerpt}"
