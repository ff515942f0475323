"""The names of all models that units serve."""

from __future__ import annotations

from cellgate.router.board import Board


class ModelNames:
    """The models of one board. They are sorted again only when a unit has reported others: there may be
    thousands.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: list[object] = []
        self._names: list[str] = []

    def names(self) -> list[str]:
        """All of them. The list is the same object as before when nothing has changed."""
        told: list[object] = [(state.models, state.cards) for state in self._board]
        if told != self._told:
            models = [state.models for state in self._board]
            self._told, self._names = told, sorted(frozenset[str]().union(*models))
        return self._names

    def facts(self, name: str) -> dict[str, str | int]:
        """What units say of a model: where they differ, its smallest length, and else what the first says."""
        found: dict[str, str | int] = {}
        for state in self._board:
            said = state.cards.get(name, {})
            for key, value in said.items():
                known = found.setdefault(key, value)
                if key == "max_model_len":
                    found[key] = min(known, value, key=int)
        return found
