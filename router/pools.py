"""Pools: units with common models, which can replace each other. Pure.

Requests of one pool wait in one queue, and do not wait for those of other pools.
"""

from __future__ import annotations

from collections.abc import Iterable

ANY = ""
"""The pool of requests without a model, if there are several pools."""


class Pools:
    """The pools of a fleet, named by their first unit. A unit whose models are not known may serve any."""

    __slots__ = ("_of_model", "_of_unit", "_other")

    def __init__(self, units: Iterable[tuple[str, frozenset[str]]] = ()) -> None:
        groups: list[tuple[list[str], set[str], bool]] = []
        for unit, models in units:
            joined = [g for g in groups if g[2] or not models or not models.isdisjoint(g[1])]
            names = [name for group in joined for name in group[0]]
            served = models.union(*(group[1] for group in joined))
            takes_any = not models or any(group[2] for group in joined)
            groups = [group for group in groups if group not in joined]
            groups.append(([*names, unit], set(served), takes_any))
        self._of_unit = {name: names[0] for names, _, _ in groups for name in names}
        self._of_model = {model: names[0] for names, models, _ in groups for model in models}
        alone = groups[0][0][0] if len(groups) == 1 else ANY
        self._other = next((names[0] for names, _, takes_any in groups if takes_any), alone)

    def of(self, model: str | None) -> str:
        """Where a request for `model` waits."""
        return self._of_model.get(model, self._other) if model is not None else self._other

    def has(self, pool: str, unit: str) -> bool:
        """Whether a unit is of a pool."""
        return pool == ANY or self._of_unit.get(unit) == pool
