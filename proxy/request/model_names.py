"""The names of all models that units serve."""

from __future__ import annotations

from cellgate.router.board import Board


class ModelNames:
    """The models of one board. They are sorted again only when a unit has reported others: there may be
    thousands.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: list[frozenset[str]] = []
        self._names: list[str] = []

    def names(self) -> list[str]:
        """All of them. The list is the same object as before when nothing has changed."""
        told = [state.models for state in self._board]
        if told != self._told:
            self._told, self._names = told, sorted(frozenset[str]().union(*told))
        return self._names
