"""Blocks that a prefiller holds and that no decoder is known to have fetched: fetched once more, and freed.

A prefiller takes no request to free them; it does when they are fetched, else after a while (vLLM: 30 s).
So a decoder is asked for one token with them, and the answer is thrown away. It is no attempt and no
evidence.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.http.call import Call
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.unit import Pool
from cellgate.proxy.request.ports import Reports
from cellgate.router.board import Board
from cellgate.router.nouns import ORPHANED, RELEASED, UNCLAIMED_S, SplitStep
from cellgate.router.unit_state import UnitState

AT_ONCE = 64
"""So many releases are under way at once; further blocks are left to their engine."""
HeadFor = Callable[[bytes, int], bytes]
"""The head of a request to a unit, from the lines of its pool and the length of the body."""


class UnclaimedBlocks:
    """All releases of one gate."""

    def __init__(
        self, board: Board, pool: Callable[[UnitState], Pool], reports: Reports, now: Callable[[], float]
    ) -> None:
        self._board = board
        self._pool = pool
        self._reports = reports
        self._now = now
        self._releases: set[Release] = set()

    def adopt(self, pair: tuple[str, str], tokens: int, body: bytes, head: HeadFor) -> None:
        """A request has no more use for the blocks of this pair. `body` fetches them."""
        step = SplitStep(ORPHANED, *pair, tokens)
        self._reports.send(step)
        state = self._decoder(*pair)
        if state is None or len(self._releases) >= AT_ONCE:
            return
        pool, unit = self._pool(state), state.unit.name
        step = step._replace(kind=RELEASED, decoder=unit)
        until = self._now() + UNCLAIMED_S
        release = Release(self, self._reports, step, pool, head(pool.lines, len(body)), body, until)
        self._releases.add(release)
        release.call.begin(fresh=True)

    def tick(self, now: float) -> None:
        """Give up those that take too long."""
        for release in [release for release in self._releases if now > release.until]:
            self.over(release)

    def close(self) -> None:
        for release in list(self._releases):
            self.over(release)

    def over(self, release: Release) -> None:
        self._releases.discard(release)
        release.call.abandon()

    def _decoder(self, prefiller: str, failed: str) -> UnitState | None:
        """A decoder that can fetch from the prefiller; that which did not only if there is no other."""
        units = self._board.units
        home = units.get(prefiller)
        if home is None or not home.is_usable():
            # Its blocks are gone, or nobody can fetch them.
            return None
        states = [
            state
            for name, state in self._board.pairs.decoders.items()
            if name != prefiller and state.is_usable() and state.unit.cell == home.unit.cell
        ]
        return min(states, key=lambda state: (state.unit.name == failed, state.in_flight), default=None)


class Release:
    """One release, given up at `until`."""

    __slots__ = ("_reports", "_step", "_unclaimed", "call", "until")

    def __init__(
        self,
        unclaimed: UnclaimedBlocks,
        reports: Reports,
        step: SplitStep,
        pool: Pool,
        head: bytes,
        body: bytes,
        until: float,
    ) -> None:
        self._unclaimed = unclaimed
        self._reports = reports
        self._step = step
        self.call = Call(self, pool, head, body)
        self.until = until

    def answered(self, status: int, _body: bytes) -> None:
        """A decoder has answered: it has fetched the blocks."""
        if status < 400:
            self._reports.send(self._step)
        self._unclaimed.over(self)

    def failed(self, _failure: Failure) -> None:
        self._unclaimed.over(self)
