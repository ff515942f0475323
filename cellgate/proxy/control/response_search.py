"""The search for a stored response that this gate does not know: other gates are asked, then units.

1. Units cannot say whose it is. So they are asked only for one whose id is as good as a key
   (stored_responses.py), each once, and UNITS_ASKED at most.
2. How many searches there are at a time is bounded, in all and for each payer; what is above is not found.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from cellgate.probes.base import Fetch, FetchError
from cellgate.proxy.control.stored_responses import StoredResponse, StoredResponses
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.observe.defects import guarded
from cellgate.proxy.request.ports import Pending, Waiter
from cellgate.proxy.request.stored_objects import path_of
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Outcome, Verdict
from cellgate.router.unit_state import Lease, UnitState

UNITS_ASKED = 8
UNIT_S = 2.0
"""So long a unit's answer is awaited."""
SEARCHES, OF_A_PAYER = 1024, 128
ASKED_AT_ONCE = 32
"""Searches that ask units at the same time."""
_SEARCH_ANSWER_BYTES = 16 << 20

Acquire = Callable[[], Lease | Failure | Pending]
GiveBack = Callable[[Lease, Outcome], None]
AskGates = Callable[[str, str], Awaitable[StoredResponse | None]]
"""What other gates know of a response, by its id and its payer. Never raises."""


class ResponseSearch:
    """Of one control plane. `gates` asks other gates, where they share what they know."""

    def __init__(self, stored: StoredResponses, board: Board, fetch_of: Callable[[UnitState], Fetch]) -> None:
        self._stored = stored
        self._board = board
        self._fetch_of = fetch_of
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._of_payer: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(ASKED_AT_ONCE)
        self.gates: AskGates | None = None

    def begin(self, ask: Ask, waiter: Waiter, acquire: Acquire, give_back: GiveBack) -> Pending | None:
        """Search for what an ask follows, then `acquire` its unit for the waiter, or `give_back` it if nobody
        waits any more; None: nobody could know it.
        """
        follows, payer = ask.follows or "", ask.payer
        if self.gates is None and not self._stored.is_open(follows):
            return None
        key = self._stored.owner(follows, payer), follows
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= SEARCHES or self._of_payer[payer] >= OF_A_PAYER:
                return None
            task = self._running[key] = asyncio.get_running_loop().create_task(self._search(ask))
            self._of_payer[payer] += 1
            task.add_done_callback(lambda _: self._over(key, payer))
        return SearchingRequest(task, waiter, acquire, give_back)

    def close(self) -> None:
        for task in list(self._running.values()):
            task.cancel()

    def _over(self, key: tuple[str, str], payer: str) -> None:
        del self._running[key]
        self._of_payer[payer] -= 1
        if not self._of_payer[payer]:
            del self._of_payer[payer]

    async def _search(self, ask: Ask) -> None:
        follows, payer = ask.follows or "", ask.payer
        if self.gates is not None and (known := await self.gates(follows, payer)) is not None:
            self._stored.take(known)
            return
        if not self._stored.is_open(follows):
            return
        async with self._turns:
            states = [state for state in self._board if self._may_have(state, ask)][:UNITS_ASKED]
            for has_it in asyncio.as_completed([self._ask_unit(state, follows) for state in states]):
                if (unit := await has_it) is not None:
                    self._stored.made(follows, unit, payer)
                    return

    def _may_have(self, state: UnitState, ask: Ask) -> bool:
        if state.case.verdict is Verdict.DOWN:
            return False
        return ask.model is None or not state.models or ask.model in state.models

    async def _ask_unit(self, state: UnitState, response: str) -> str | None:
        """The unit, if it has the response."""
        try:
            reply = await self._fetch_of(state)(
                "GET", path_of(response), timeout_s=UNIT_S, max_bytes=_SEARCH_ANSWER_BYTES
            )
        except FetchError:
            return None
        return state.unit.name if reply.status == 200 else None


class SearchingRequest:
    """A request that waits for a search, and then perhaps for a unit."""

    __slots__ = ("_acquire", "_found", "_give_back", "_place", "_task", "_waiter", "queued_at")

    def __init__(
        self, task: asyncio.Task[None], waiter: Waiter, acquire: Acquire, give_back: GiveBack
    ) -> None:
        self._task = task
        self._waiter = waiter
        self._acquire = acquire
        self._give_back = give_back
        self._found: Lease | None = None
        self._place: Pending | None = None
        self.queued_at: float | None = None
        task.add_done_callback(self._over)

    def cancel(self) -> None:
        self._task.remove_done_callback(self._over)
        if self._place is not None:
            self._place.cancel()
        found, self._found = self._found, None
        if found is not None and not found.closed:
            self._give_back(found, Outcome.GATE_ERROR)

    def _over(self, _task: asyncio.Task[None]) -> None:
        guarded(self._waiter, self._search_on)

    def _search_on(self) -> None:
        found = self._acquire()
        if isinstance(found, Lease):
            self._found = found
            self._waiter.on_result(found)
        elif isinstance(found, Failure):
            self._waiter.on_result(found)
        else:
            self._place = found
