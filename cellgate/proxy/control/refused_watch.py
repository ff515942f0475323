"""Units that refuse what others serve: takes them out, and back once they serve such a request.

router/opinions.py finds that a unit refuses, or seems to refuse, what it is asked for. It is asked again:
for that request, and for a plain one of each kind in use. One good answer shows that it lacks something,
and no more. If none is good it is DOWN with an open fault, which no canary can disprove: those may pass all
the time. While it is out it gets these requests one after the other, for a few tokens; a good answer ends
the fault. What a client has sent is sent to no other unit, and its headers are not kept. A unit that says
one token again and again gets a plain request alone, and so does another one: that may be their model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import orjson

from cellgate.probes.base import Fetch, FetchError, Reply
from cellgate.probes.engines import APIS, at
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.request.answer_shape import ENDLESS, REPEATS, SHAPES, loops
from cellgate.proxy.request.routes import find_route
from cellgate.router.board import Board
from cellgate.router.nouns import (
    Evidence,
    Sign,
    Strength,
    Use,
)
from cellgate.router.opinions import REFUSING_SOURCE, Refusing
from cellgate.router.unit_state import UnitState

TRY_EVERY_S = 1.0
"""How often a unit that is out is asked."""
CHECK_S = 2.0
"""So long the answers of a unit that is asked again are awaited."""
OTHERS_MAX, PEER_S = 3, 4.0
"""So many others are asked the same, where all may be alike, and that much longer."""
CHECK_EVERY_S = 5.0
"""How often a unit is asked again."""
PLAIN_MAX = 3
"""So many plain requests it is asked then."""
WITHOUT_S = 30.0
"""So long a unit is out which can be asked nothing."""
REFUSALS_MAX = 4
"""Kinds of requests that are kept of each unit which refuses them: the last ones."""
TOLD_EVERY_S = 60.0
"""What a unit refuses, while it serves other requests, is told at most so often."""
TIMEOUT_S = 60.0
SHORT_S = 3.0
"""The timeout beside one that takes long: a unit that hangs may be mended meanwhile."""
_TOKENS, _MORE_TOKENS = 24, 40
"""So many are asked for; and where they might all be the same."""
_ANSWER_BYTES = 256 << 10
_NEVER = -inf, False
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


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
        self._told: dict[str, float] = {}
        self._checked: dict[str, tuple[float, bool]] = {}
        """When a unit was last asked again, and whether it showed that it serves others."""
        self._checks: dict[str, asyncio.Task[None]] = {}

    def take(self, found: Refusing, target: str, body: bytes) -> None:
        """A unit refuses what others serve; `body` is such a request, or empty."""
        state, now = self._board.units.get(found.unit), self._now()
        if state is None or found.unit in self._out:
            return
        if not found.is_out:
            self._tell_of(state, found)
        elif not self._others(state):
            # The one that served it has left meanwhile: any answer is better than none.
            return
        elif state.meets or (found.is_sure and found.what == REPEATS):
            # Half of a pair can be asked nothing alone.
            if found.is_sure:
                self._take_out(state, found, target, body)
        elif found.unit in self._checks:
            return
        elif now - (checked := self._checked.get(found.unit, _NEVER))[0] >= CHECK_EVERY_S:
            task = asyncio.get_running_loop().create_task(self._check(state, found, target, body))
            self._checks[found.unit] = task
            task.add_done_callback(lambda _: self._checks.pop(found.unit, None))
        elif found.is_sure and checked[1]:
            self._tell_of(state, found)
        elif found.is_sure:
            self._take_out(state, found, target, body)

    def tick(self, now: float) -> None:
        """Try the units that are out."""
        for name, refused in list(self._out.items()):
            state = refused.state
            if self._board.units.get(name) is not state:
                self._drop(name)
            elif not self._others(state):
                self._clear(name, "no other unit is there that could serve what it refuses")
            elif len(refused.tasks) < 2 and now >= refused.next_at:
                refused.next_at = now + TRY_EVERY_S
                self._try_soon(name, refused, now)

    def close(self) -> None:
        """Forget all."""
        for task in self._checks.values():
            task.cancel()
        for name in list(self._out):
            self._drop(name)

    # -- asked again ---------------------------------------------------------------------------------------

    async def _check(self, state: UnitState, found: Refusing, target: str, body: bytes) -> None:
        asked = self._asked(state, found.what, target, body)
        # What it says again and again may be its model: then others do so as well.
        others = self._others(state)[:OTHERS_MAX] if found.what == REPEATS else []
        answers, theirs = await asyncio.gather(
            asyncio.gather(*(self._ask(state, each, CHECK_S) for each in asked)),
            asyncio.gather(*(self._ask(other, each, PEER_S) for other in others for each in asked)),
        )
        self._checked[found.unit] = self._now(), found.what == REPEATS or True in answers
        if found.what == REPEATS and 2 * theirs.count(True) < max(1, len(theirs)):
            return
        if self._board.units.get(found.unit) is not state or not self._others(state):
            return
        if True in answers:
            if found.is_sure:
                self._tell_of(state, found)
            return
        # An answer that never ends is what it may be out for; but it may also be waiting.
        is_endless = found.what in ENDLESS and not (state.load is not None and state.load.waiting)
        bad = len(answers) if is_endless else answers.count(False)
        if found.is_sure:
            self._take_out(state, found, target, body)
        elif bad and bad == len(answers):
            self._take_out(state, found._replace(against=bad + 1, total=bad + 1), target, body)

    def _asked(self, state: UnitState, what: str, target: str, body: bytes) -> list[_Asked]:
        """What shows whether a unit is well: the request that was kept, and plain ones of its kind and of the
        last kinds in use that the unit serves.
        """
        if state.meets:
            return []
        kept = read_object(body)
        model = kept.get("model")
        route = find_route(target.partition("?")[0].encode()).name
        own = Use(route, kept.get("stream") is True, model if isinstance(model, str) else "")
        if what == REPEATS:
            return [] if (plain := plain_request(own, _MORE_TOKENS)) is None else [plain]
        uses = [own, *(use for use in self._board.uses.of(state, self._now()) if use != own)]
        found = [plain for use in uses[:PLAIN_MAX] if (plain := plain_request(use, _TOKENS)) is not None]
        return [_Asked(target, shortened(kept)), *found] if kept else found

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
        now, reason = self._now(), found._replace(is_out=False).reason
        state.refusals.pop(found.of, None)
        state.refusals[found.of] = reason, now
        if len(state.refusals) > REFUSALS_MAX:
            del state.refusals[next(iter(state.refusals))]
        if now - self._told.get(found.unit, -TOLD_EVERY_S) >= TOLD_EVERY_S:
            self._told[found.unit] = now
            self._events.add(Action("refuses", "gate", found.unit, f"{reason}; others get these"))

    def _take_out(self, state: UnitState, found: Refusing, target: str, body: bytes) -> None:
        now = self._now()
        self._out[found.unit] = _Refused(state, found, target, body, now, now + TRY_EVERY_S)
        self._tell(state, Sign.BAD, Strength.FATAL, found.reason)

    def _try_soon(self, name: str, refused: _Refused, now: float) -> None:
        asked = self._asked(refused.state, refused.found.what, refused.target, refused.body)
        if asked:
            timeout_s = SHORT_S if refused.tasks else TIMEOUT_S
            work = self._try(name, refused, asked[refused.turn % len(asked)], timeout_s)
            refused.turn += 1
            task = asyncio.get_running_loop().create_task(work)
            refused.tasks.add(task)
            task.add_done_callback(refused.tasks.discard)
        elif now - refused.since > WITHOUT_S:
            self._clear(name, f"it is tried again after {WITHOUT_S:.0f} s")

    async def _try(self, name: str, refused: _Refused, asked: _Asked, timeout_s: float) -> None:
        is_served = await self._ask(refused.state, asked, timeout_s)
        if is_served and self._out.get(name) is refused:
            self._clear(name, "it serves what it refused")

    def _clear(self, name: str, reason: str) -> None:
        state = self._out[name].state
        self._drop(name)
        self._tell(state, Sign.GOOD, Strength.STRONG, reason)

    def _drop(self, name: str) -> None:
        for task in self._out.pop(name).tasks:
            if task is not asyncio.current_task():
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
    """A request that shows whether a unit is well. `may_loop`: even if it says one token all the time."""

    target: str
    body: bytes
    may_loop: bool = True


@dataclass(slots=True)
class _Refused:
    """A unit that is out, and what it is asked."""

    state: UnitState
    found: Refusing
    target: str
    body: bytes
    since: float
    next_at: float
    turn: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; empty: it is none."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def shortened(request: dict[str, Any]) -> bytes:
    """The request for a few tokens."""
    limits = {name: _TOKENS for name in _LIMITS if name in request}
    return orjson.dumps({name: value for name, value in request.items() if name != "min_tokens"} | limits)


def plain_request(use: Use, tokens: int) -> _Asked | None:
    """A request of this kind that any unit serves; None: there is none."""
    api = APIS.get(use.route)
    if api is None or api.is_costly or api.is_form or api.about:
        return None
    fields = api.body(use.model, "What is the capital of France?", None) or {}
    limits = {name: tokens for name in _LIMITS if name in fields}
    stream = {"stream": True} if use.stream and api.streams else {}
    return _Asked(at(api.path, use.model), orjson.dumps(fields | limits | stream), tokens == _TOKENS)


def is_good(asked: _Asked, reply: Reply) -> bool:
    """Whether this answers the request."""
    shape = SHAPES.get(find_route(asked.target.partition("?")[0].encode()).name)
    if reply.status >= 300 or shape is None:
        return reply.status < 300
    content_type = reply.headers.get("content-type", "").encode()
    is_events = content_type.startswith(b"text/event-stream")
    streams = orjson.loads(asked.body).get("stream") is True
    wrong = shape.why_doubtful(reply.body, is_events=is_events, streams=streams, content_type=content_type)
    return not wrong and (asked.may_loop or not loops(reply.body))


OTHERS_MAX, PEER_S = 3, 4.0
"""So many others are asked the same, where all may be alike, and that much longer."""
