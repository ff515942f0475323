"""Units that refuse what others serve: takes them out, and back once they serve such a request.

router/opinions.py decides that a unit refuses (nearly) all that is asked of it. It is then DOWN with an open
fault, which no canary can disprove: those may pass all the time. One request that it refused is kept while
the unit is out, and sent to it once a second, for a few tokens; a good answer ends the fault. It is sent to
no other unit, and its client's headers are not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from cellgate.probes.base import Fetch, FetchError, Reply
from cellgate.proxy.logs.events import Action, EventLog
from cellgate.proxy.request.answer_shape import SHAPES
from cellgate.proxy.request.routes import find_route
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Sign, Strength
from cellgate.router.opinions import REFUSING_SOURCE, Refusing
from cellgate.router.unit_state import UnitState

TRY_EVERY_S = 1.0
"""How often a unit that is out gets the request that was kept."""
WITHOUT_S = 30.0
"""So long a unit is out where no request could be kept."""
TOLD_EVERY_S = 60.0
"""What a unit refuses, while it serves other requests, is told at most so often."""
TIMEOUT_S = 60.0
SHORT_S = 3.0
"""The timeout beside one that takes long: a unit that hangs may be mended meanwhile."""
_TOKENS = 24
_ANSWER_BYTES = 256 << 10
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(slots=True)
class _Refused:
    """A unit that is out. `body` is the request that was kept; empty: none was."""

    state: UnitState
    target: str
    body: bytes
    since: float
    next_at: float
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


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

    def take(self, found: Refusing, target: str, body: bytes) -> None:
        """A unit refuses what others serve; `body` is such a request."""
        state, now = self._board.units.get(found.unit), self._now()
        if state is None:
            return
        if not found.is_out:
            if now - self._told.get(found.unit, -TOLD_EVERY_S) >= TOLD_EVERY_S:
                self._told[found.unit] = now
                self._events.add(Action("refuses", "gate", found.unit, f"{found.reason}; others get these"))
            return
        if not self._has_others(state):
            # The one that served it has left meanwhile: any answer is better than none.
            return
        if found.unit not in self._out:
            self._out[found.unit] = _Refused(state, target, body and shortened(body), now, now + TRY_EVERY_S)
        self._tell(state, Sign.BAD, Strength.FATAL, found.reason)

    def tick(self, now: float) -> None:
        """Try the units that are out."""
        for name, refused in list(self._out.items()):
            state = refused.state
            if self._board.units.get(name) is not state:
                self._drop(name)
            elif not self._has_others(state):
                self._clear(name, "no other unit is there that could serve what it refuses")
            elif not refused.body and now - refused.since > WITHOUT_S:
                self._clear(name, f"it is tried again after {WITHOUT_S:.0f} s")
            elif refused.body and len(refused.tasks) < 2 and now >= refused.next_at:
                refused.next_at = now + TRY_EVERY_S
                timeout_s = SHORT_S if refused.tasks else TIMEOUT_S
                task = asyncio.get_running_loop().create_task(self._try(name, refused, timeout_s))
                refused.tasks.add(task)
                task.add_done_callback(refused.tasks.discard)

    def close(self) -> None:
        """Forget all."""
        for name in list(self._out):
            self._drop(name)

    async def _try(self, name: str, refused: _Refused, timeout_s: float) -> None:
        try:
            reply = await self._fetch_of(refused.state)(
                "POST", refused.target, body=refused.body, timeout_s=timeout_s, max_bytes=_ANSWER_BYTES
            )
        except FetchError:
            return
        if self._out.get(name) is refused and is_good(refused.target, refused.body, reply):
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

    def _has_others(self, state: UnitState) -> bool:
        """Whether another unit in rotation serves one of its models."""
        return any(
            other is not state
            and other.is_usable()
            and (not state.models or not other.models or not state.models.isdisjoint(other.models))
            for other in self._board
        )


def shortened(body: bytes) -> bytes:
    """The request for a few tokens; empty: it is no JSON object."""
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return b""
    if not isinstance(data, dict):
        return b""
    data.pop("min_tokens", None)
    for name in [name for name in _LIMITS if name in data]:
        data[name] = _TOKENS
    return orjson.dumps(data)


def is_good(target: str, body: bytes, reply: Reply) -> bool:
    """Whether this answers the request."""
    shape = SHAPES.get(find_route(target.partition("?")[0].encode()).name)
    if reply.status >= 300 or shape is None:
        return reply.status < 300
    content_type = reply.headers.get("content-type", "").encode()
    is_events = content_type.startswith(b"text/event-stream")
    streams = orjson.loads(body).get("stream") is True
    return not shape.why_doubtful(reply.body, is_events=is_events, streams=streams, content_type=content_type)
