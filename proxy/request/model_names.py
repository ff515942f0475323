"""The names of all models that units serve."""

from __future__ import annotations

from cellgate.router.board import Board


class ModelNames:
    """Of the units of one board. Sorted anew when a unit has told others: a fleet may have thousands."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: list[frozenset[str]] = []
        self._names: list[str] = []

    def names(self) -> list[str]:
        """All of them. The same list as before, when nothing has changed."""
        told = [state.models for state in self._board]
        if told != self._told:
            self._told, self._names = told, sorted(frozenset[str]().union(*told))
        return self._names
