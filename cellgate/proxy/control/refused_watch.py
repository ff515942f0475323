"""Units that refuse what others serve: takes them out, and back once they answer as others do.

router/opinions.py finds that a unit refuses, or seems to refuse, what it is asked for. What clients ask for
proves nothing, for they may want a unit out, and units that are equals answer badly by the same chance. So
the gate asks by itself: a plain request of the same kind, of the unit and of others, in pairs, until chance
does not explain the difference (router/equals.py), or nothing is left of it. The first question is asked of
the unit alone: mostly it is answered, and nothing more is spent. A unit that serves other kinds of requests
lacks something, and stays. One that is worse is DOWN with an open fault, which no canary can disprove: those
may pass all the time. While it is out it gets the same questions; answers as others give them end the fault.
What clients have sent is sent to nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import orjson

from cellgate.probes.base import Fetch, FetchError, Reply
from cellgate.probes.engines import APIS, at
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.request.answer_shape import (
    ENDLESS,
    NO_TEXT,
    NONE_COUNTED,
    NOTHING,
    REPEATS,
    SHAPES,
    SHORT_LOOP,
    loops,
)
from cellgate.proxy.request.routes import find_route
from cellgate.router.board import Board
from cellgate.router.equals import PAIRS_MAX, Comparison, Mending
from cellgate.router.nouns import Evidence, Sign, Strength, Use
from cellgate.router.opinions import REFUSING_SOURCE, Refusing
from cellgate.router.unit_state import UnitState

TRY_EVERY_S = 1.0
"""How often a unit that is out is asked, if its last answer was bad."""
ASK_AGAIN_S, ASK_AGAIN_MAX_S = 1.0, 60.0
"""How soon a unit is compared again: twice as late each time that nothing was found, if it does not look
worse than others."""
FIRST_MAX, FAR_FIRST_MAX = 2, 3
"""So many first questions are asked of a unit, the second number where clients were answered far worse."""
ANSWER_S = 3.0
"""So long an answer is awaited."""
ENDLESS_S = 1.0
"""The same of a unit that sends streams without end."""
LATER_TIMES, ENDLESS_TIMES, LATER_S = 2.5, 1.5, 0.75
"""Of a pair one may take so many times as long as the other, and at least so long; fewer times where answers
do not end."""
CHEAP_ROUNDS, ROUNDS, FAR_ROUNDS, ENDLESS_ROUNDS = (6, 12), (3, 8), (3, 12), (12, 8)
"""Pairs that are asked at once; the last one again and again. Three show most equals. More where a token is
enough, or clients were answered far worse; where an answer does not end, for each round takes long then."""
ASKED_MAX = 2 * PAIRS_MAX
"""So many pairs are asked at most: those of which one has no answer count for nothing."""
OTHERS_MAX = 4
"""So many others are asked in the first round; then the one that has answered best."""
LACKS_MIN = 3
"""A unit that answers so many plain requests of another kind lacks something, and no more."""
REFUSED_KINDS_MAX = 2
"""So many other kinds in use are looked at."""
PER_REQUEST, PER_CLIENT, BUDGET, CHEAP = 0.4, 24.0, 400.0, 8.0
"""What questions may cost, in tokens: so many for each request, and so many once for each of the most that
were in flight together, but never more than the budget at once. A comparison that cannot be paid for goes on
later. It goes on to its end, on credit, with so much evidence, which equals see once in as many, and where
clients were answered so much worse that equals hardly ever are: a client may bring that about, but then the
first question is answered well."""
UNLIKELY = 0.75
"""So much of that is left to units that look worse than others."""
SUSPECT_S = 5.0
"""So long after a doubt a unit is nobody's measure, if there is another one."""
WITHOUT_S = 30.0
"""So long a unit is out which can be asked nothing."""
REFUSALS_MAX = 4
"""Kinds of requests that are kept of each unit which refuses them: the last ones."""
REPORTED_EVERY_S = 60.0
"""What a unit refuses, while it serves other requests, is told at most so often."""
_ANY_TOKENS, _TEXT_TOKENS, _LOOP_TOKENS = 1, 4, 10
"""So many are asked for: of a unit that refuses; of one that may generate nothing, whose first tokens may be
no text; and where they might all be the same."""
_ANSWER_BYTES = 256 << 10
_REFUSED_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_CAPITALS_OF = ("France", "Japan", "Italy", "Kenya", "Peru", "Norway", "Egypt", "Chile")


class RefusedWatch:
    """Of one control plane. `observe` takes evidence."""

    def __init__(
        self,
        board: Board,
        events: EventLog,
        observe: Callable[[Evidence], object],
        fetch_of: Callable[[UnitState], Fetch],
        now: Callable[[], float],
    ) -> None:
        self._board = board
        self._events = events
        self._observe = observe
        self._fetch_of = fetch_of
        self._now = now
        self._out: dict[str, _Refused] = {}
        self._reported: dict[str, float] = {}
        self._comparisons: dict[str, asyncio.Task[None]] = {}
        self._records: dict[str, _Compared] = {}
        self._budget = self._lent = 0.0
        self._asked = 0

    def take(self, found: Refusing, use: Use) -> None:
        """A unit refuses what others serve, of this use."""
        state, now = self._board.units.get(found.unit), self._now()
        self._save(found.arrived)
        if state is None or found.unit in self._out:
            return
        record = self._records.setdefault(found.unit, _Compared())
        record.suspected_at = now
        if found.is_sure:
            self._tell_of(state, found)
        if not found.is_fault or found.unit in self._comparisons or not self._others(state):
            return
        looks_worse = found.is_sure or found.is_apart
        # As long as it looks worse, one question after the other may be answered well by chance.
        wait_s = 0.0 if found.is_far else ASK_AGAIN_S if looks_worse else record.wait_s
        least = _cost(1 if record.begun is None else 2, found.what) if looks_worse else UNLIKELY * self._lent
        if found.is_far:
            # It may go on credit, and must not wait for the price of its first question.
            least = 0.0
        if now - record.compared_at < wait_s or self._budget < least:
            return
        task = asyncio.get_running_loop().create_task(self._compare(state, found, use, record))
        self._comparisons[found.unit] = task
        task.add_done_callback(lambda _: self._comparisons.pop(found.unit, None))

    def _save(self, requests: int) -> None:
        """So many have come: what may be asked for them."""
        lent = min(BUDGET, PER_CLIENT * sum(state.in_flight for state in self._board))
        saved = PER_REQUEST * requests + max(0.0, lent - self._lent)
        self._lent = max(self._lent, lent)
        self._budget = min(BUDGET, self._budget + saved)

    def tick(self, now: float) -> None:
        """Try the units that are out."""
        for name, refused in list(self._out.items()):
            state = refused.state
            if self._board.units.get(name) is not state:
                self._drop(name)
            elif not self._others(state):
                self._clear(name, "no other unit is there that could serve what it refuses")
            elif refused.task is None and now >= refused.next_at:
                refused.next_at = now + TRY_EVERY_S
                task = asyncio.get_running_loop().create_task(self._try(name, refused))
                refused.task = task
                task.add_done_callback(refused.ended)

    def close(self) -> None:
        for task in self._comparisons.values():
            task.cancel()
        for name in list(self._out):
            self._drop(name)

    # -- compared with others ------------------------------------------------------------------------------

    async def _compare(self, state: UnitState, found: Refusing, use: Use, record: _Compared) -> None:
        record.spent = 0.0
        about = use.route, found.what
        if record.begun is None or record.begun.about != about:
            first = await self._ask_first(state, found, use)
            record.begun = None if first is None else _Begun(about, first, Comparison(), {})
        if record.begun is not None:
            comparison = await self._ask_pairs(state, found, use, record.begun)
            if comparison.is_worse and self._board.units.get(found.unit) is state and self._others(state):
                record.wait_s, record.begun = ASK_AGAIN_S, None
                # What finds something was well spent, and the next one may be as bad.
                self._budget = min(BUDGET, self._budget + record.spent)
                self._take_out(state, found, use, comparison)
                return
            if comparison.is_over or record.begun.asked >= ASKED_MAX:
                record.begun = None
        record.compared_at = self._now()
        record.wait_s = min(2.0 * record.wait_s, ASK_AGAIN_MAX_S)

    async def _ask_first(self, state: UnitState, found: Refusing, use: Use) -> _First | None:
        """A first answer that is bad, of a unit with this kind alone; None: it is not worth comparing."""
        plain = self._question(use, found.what)
        if plain is None or state.meets:
            # Half of a pair can be asked nothing alone.
            return None
        timeout_s, answer = ENDLESS_S if found.what in ENDLESS else ANSWER_S, None
        for _ in range(FAR_FIRST_MAX if found.is_far else FIRST_MAX):
            self._spend(1, found.what, self._records[found.unit])
            answer = await self._ask(state, plain, timeout_s)
            if self._is_bad(state, found.what, answer) is True:
                break
        else:
            return None
        uses = [other for other in self._board.uses.of(state, self._now()) if other.route != use.route]
        for other in uses[:REFUSED_KINDS_MAX]:
            questions = [self._question(other, NOTHING) for _ in range(LACKS_MIN)]
            answers = await asyncio.gather(*(self._ask(state, each, ANSWER_S) for each in questions if each))
            if answers and all(answers):
                return None
        return _First(is_endless=answer is None)

    async def _ask_pairs(self, state: UnitState, found: Refusing, use: Use, begun: _Begun) -> Comparison:
        """Until it is over, or costs too much: then it goes on another time."""
        comparison, shares, record = begun.comparison, begun.shares, self._records[found.unit]
        sizes = CHEAP_ROUNDS if _tokens(found.what) == _ANY_TOKENS else ROUNDS
        # Four tokens do not end: no equal does that, unless all are slow.
        is_endless = begun.first.is_endless and (found.is_sure or found.is_apart)
        sizes = ENDLESS_ROUNDS if is_endless else FAR_ROUNDS if found.is_far else sizes
        begun.on_credit |= found.is_far or (is_endless and found.what != REPEATS)
        while not comparison.is_over and begun.asked < ASKED_MAX:
            size = sizes[min(begun.rounds, len(sizes) - 1)]
            begun.on_credit = begun.on_credit or comparison.evidence >= CHEAP
            if not begun.on_credit:
                size = min(size, int(self._budget / _cost(2, found.what)))
            others = self._measures(state, found, shares, size)
            if not others:
                break
            # What is cut short for its price is no round.
            begun.rounds += size == sizes[min(begun.rounds, len(sizes) - 1)]
            begun.asked += len(others)
            self._spend(2 * len(others), found.what, record)
            questions = [self._question(use, found.what) for _ in others]
            pairs = await asyncio.gather(
                *(
                    self._ask_both(state, other, each, found.what)
                    for other, each in zip(others, questions, strict=True)
                    if each is not None
                )
            )
            for other, (bad, other_bad) in zip(others, pairs, strict=True):
                if bad is not None and other_bad is not None:
                    comparison.add(is_bad=bad, other_is_bad=other_bad)
                    shares.setdefault(other.unit.name, []).append(other_bad)
        return comparison

    def _measures(
        self, state: UnitState, found: Refusing, shares: dict[str, list[bool]], size: int
    ) -> list[UnitState]:
        """The other unit of each of so many pairs: first several, then the one that has answered best."""
        now = self._now()

        def rank(other: UnitState) -> tuple[float, bool, bool]:
            name, bad = other.unit.name, shares.get(other.unit.name, [])
            is_doubted = now - self._records.get(name, _NEVER_COMPARED).suspected_at < SUSPECT_S
            return sum(bad) / max(1, len(bad)), is_doubted, name != found.by

        others = sorted(self._others(state), key=rank)
        some = others[: 1 if shares else OTHERS_MAX]
        best = [other for other in some if rank(other)[:2] == rank(some[0])[:2]]
        return [best[number % len(best)] for number in range(size)] if best else []

    async def _ask_both(
        self, state: UnitState, other: UnitState, asked: _Asked, what: str
    ) -> tuple[bool | None, bool | None]:
        """Whether the answers of two units to one question are bad; None: one has none that could be judged.
        Neither has much more time than the other has needed.
        """
        begun = self._now()
        both = [asyncio.ensure_future(self._ask(each, asked, ANSWER_S)) for each in (state, other)]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            times = ENDLESS_TIMES if what in ENDLESS else LATER_TIMES
            await asyncio.wait(both, timeout=max(LATER_S, times * (self._now() - begun)))
        finally:
            for task in both:
                task.cancel()
        answers = [task.result() if task.done() and not task.cancelled() else None for task in both]
        return self._is_bad(state, what, answers[0]), self._is_bad(other, what, answers[1])

    def _is_bad(self, state: UnitState, what: str, answer: bool | None) -> bool | None:
        """Whether an answer is bad. One that does not end may be what it is doubted for, if none waits."""
        if answer is None and what in ENDLESS and not (state.load is not None and state.load.waiting):
            return True
        return None if answer is None else not answer

    def _spend(self, questions: int, what: str, record: _Compared) -> None:
        cost = _cost(questions, what)
        self._budget = max(-self._lent, self._budget - cost)
        record.spent += cost

    def _question(self, use: Use, what: str) -> _Asked | None:
        self._asked += 1
        return plain_request(use, _tokens(what), self._asked)

    async def _ask(self, state: UnitState, asked: _Asked, timeout_s: float) -> bool | None:
        """Whether the answer of a unit is good; None: it has none that could be judged."""
        try:
            reply = await self._fetch_of(state)(
                "POST", asked.target, body=asked.body, timeout_s=timeout_s, max_bytes=_ANSWER_BYTES
            )
        except FetchError:
            return None
        return None if reply.status == 429 or reply.status >= 500 else is_good(asked, reply)

    # -- out, and back -------------------------------------------------------------------------------------

    def _tell_of(self, state: UnitState, found: Refusing) -> None:
        now = self._now()
        state.refusals.pop(found.of, None)
        state.refusals[found.of] = found.reason, now
        if len(state.refusals) > REFUSALS_MAX:
            del state.refusals[next(iter(state.refusals))]
        if now - self._reported.get(found.unit, -REPORTED_EVERY_S) >= REPORTED_EVERY_S:
            self._reported[found.unit] = now
            self._events.add(Action("refuses", "gate", found.unit, f"{found.reason}; others get these"))

    def _take_out(self, state: UnitState, found: Refusing, use: Use, by: Comparison) -> None:
        now = self._now()
        self._out[found.unit] = _Refused(state, found, use, Mending(by), now, now + TRY_EVERY_S)
        reason = (
            f"refuses what other units serve: {found.what} ({by.bad} of {by.pairs} plain requests of the "
            f"gate, others {by.others_bad})"
        )
        self._tell(state, Sign.BAD, Strength.FATAL, reason)

    async def _try(self, name: str, refused: _Refused) -> None:
        """Ask a unit that is out as long as it answers well."""
        while self._out.get(name) is refused:
            plain = self._question(refused.use, refused.found.what)
            if plain is None:
                if self._now() - refused.since > WITHOUT_S:
                    self._clear(name, f"it is tried again after {WITHOUT_S:.0f} s")
                return
            answer = await self._ask(refused.state, plain, ANSWER_S)
            if self._out.get(name) is not refused:
                return
            if answer is not None:
                refused.mending.add(is_bad=not answer)
            if refused.mending.is_mended:
                self._clear(name, "it answers as other units do")
            elif not answer and not refused.mending.is_likely:
                return

    def _clear(self, name: str, reason: str) -> None:
        state = self._out[name].state
        self._drop(name)
        self._tell(state, Sign.GOOD, Strength.STRONG, reason)

    def _drop(self, name: str) -> None:
        task = self._out.pop(name).task
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _tell(self, state: UnitState, sign: Sign, strength: Strength, reason: str) -> None:
        self._observe(Evidence(state.unit.name, sign, strength, REFUSING_SOURCE, reason, self._now()))

    def _others(self, state: UnitState) -> list[UnitState]:
        """The other units in rotation that serve one of its models."""
        return [
            other
            for other in self._board
            if other is not state
            and other.is_usable()
            and (not state.models or not other.models or not state.models.isdisjoint(other.models))
        ]


class _Asked(NamedTuple):
    """A request of so many `tokens` that shows whether a unit is well."""

    target: str
    body: bytes
    tokens: int


class _First(NamedTuple):
    """A first answer that is bad. `is_endless`: it did not end."""

    is_endless: bool


@dataclass(slots=True)
class _Begun:
    """A comparison that is not over, `about` a kind of requests and of answers. `shares`: which answers of
    other units were bad.
    """

    about: tuple[str, str]
    first: _First
    comparison: Comparison
    shares: dict[str, list[bool]]
    rounds: int = 0
    asked: int = 0
    on_credit: bool = False


@dataclass(slots=True)
class _Compared:
    """When a unit was last suspected and compared, how long it is left alone then, and what that cost."""

    suspected_at: float = -inf
    compared_at: float = -inf
    wait_s: float = ASK_AGAIN_S
    spent: float = 0.0
    begun: _Begun | None = None


_NEVER_COMPARED = _Compared()


@dataclass(slots=True)
class _Refused:
    """A unit that is out, and what it is asked."""

    state: UnitState
    found: Refusing
    use: Use
    mending: Mending
    since: float
    next_at: float
    task: asyncio.Task[None] | None = None

    def ended(self, _task: asyncio.Task[None]) -> None:
        self.task = None


def _tokens(what: str) -> int:
    """How many tokens show whether a unit answers this."""
    if what == REPEATS:
        return _LOOP_TOKENS
    return _ANY_TOKENS if what[:1].isdigit() or "error" in what else _TEXT_TOKENS


def _cost(questions: int, what: str) -> float:
    return float(questions * _tokens(what))


def plain_request(use: Use, tokens: int, number: int = 0) -> _Asked | None:
    """A request of this kind that any unit serves; None: there is none."""
    api = APIS.get(use.route)
    if api is None or api.is_costly or api.is_form or api.about:
        return None
    text = f"What is the capital of {_CAPITALS_OF[number % len(_CAPITALS_OF)]}?"
    fields = api.body(use.model, text, None) or {}
    limits = {name: tokens for name in _REFUSED_LIMITS if name in fields}
    stream = {"stream": True} if use.stream and api.streams else {}
    return _Asked(at(api.path, use.model), orjson.dumps(fields | limits | stream), tokens)


def is_good(asked: _Asked, reply: Reply) -> bool:
    """Whether this answers the request."""
    shape = SHAPES.get(find_route(asked.target.partition("?")[0].encode()).name)
    if reply.status >= 300 or shape is None:
        return reply.status < 300
    content_type = reply.headers.get("content-type", "").encode()
    is_events = content_type.startswith(b"text/event-stream")
    streams = orjson.loads(asked.body).get("stream") is True
    wrong = shape.why_doubtful(reply.body, is_events=is_events, streams=streams, content_type=content_type)
    if asked.tokens == _ANY_TOKENS and wrong in (NOTHING, NONE_COUNTED, NO_TEXT):
        # The first token of a model that thinks is no text.
        return True
    return not wrong and not (asked.tokens == _LOOP_TOKENS and loops(reply.body, *SHORT_LOOP))
