"""What /readyz shows, for the health process: made anew when units have changed, and once a second.

It is published on every tick all the same, because an old status shows that the loop is blocked.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.ingress.envoy_health import lines, readyz_headers
from cellgate.proxy.ingress.ready import as_json, readiness
from cellgate.router.board import Board

Publish = Callable[[bool, bytes, bytes], None]

RENDER_S = 1.0
"""So old are the remarks about units at most: with a thousand of them they take milliseconds to write."""


class ReadinessPage:
    """The page of one gate. `soon` calls something at the end of this turn of the loop, `is_full` says that
    no client can be accepted.
    """

    def __init__(
        self,
        board: Board,
        publish: Publish,
        soon: Callable[[Callable[[], None]], object],
        is_full: Callable[[], bool],
    ) -> None:
        self._board = board
        self._publish = publish
        self._soon = soon
        self._is_full = is_full
        self._is_due = False
        self._render_at = 0.0
        self._made_for: tuple[bool, bool] = (False, False)
        self._made: tuple[bool, bytes, bytes] = (False, b"", b"")
        self.stopping = False
        """True once the gate has begun to stop."""

    def changed(self) -> None:
        """Units have changed: publish it once, at the end of this turn of the loop."""
        if not self._is_due:
            self._is_due = True
            self._soon(self.publish)

    def publish(self) -> None:
        """Publish what is so now."""
        self._is_due = False
        board, stopping = self._board, self.stopping
        self._made_for = full, _ = self._facts()
        ready, detail = readiness(board, stopping, full=full)
        self._made = ready, as_json(detail), lines(readyz_headers(board, stopping=stopping))
        self._publish(*self._made)

    def tick(self, now: float) -> None:
        """Publish it again."""
        if now >= self._render_at or self._facts() != self._made_for:
            self._render_at = now + RENDER_S
            self.publish()
        else:
            self._publish(*self._made)

    def _facts(self) -> tuple[bool, bool]:
        """What changes without units: whether the gate is full, and whether it is in panic."""
        return self._is_full(), self._board.panic_at is not None
