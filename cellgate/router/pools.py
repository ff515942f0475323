"""Pools: units with common models, which can replace each other. Pure.

Requests of one pool wait in one queue, and do not wait for those of other pools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ANY = ""
"""The pool of requests without a model, if there are several pools."""


@dataclass(slots=True, eq=False)
class _Group:
    """Units that share models with each other, as far as all units have been looked at."""

    names: list[str] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    takes_any: bool = False

    def shares(self, models: frozenset[str]) -> bool:
        """Whether a unit of these models belongs to it; none are any."""
        return self.takes_any or not models or not models.isdisjoint(self.models)


class Pools:
    """The pools of a fleet, named by their first unit. A unit whose models are not known may serve any."""

    __slots__ = ("_of_model", "_of_unit", "_other")

    def __init__(self, units: Iterable[tuple[str, frozenset[str]]] = ()) -> None:
        groups: list[_Group] = []
        for unit, models in units:
            joined = [group for group in groups if group.shares(models)]
            if not joined:
                joined = [_Group()]
                groups += joined
            first, *others = joined
            for group in others:
                first.names += group.names
                first.models |= group.models
                first.takes_any |= group.takes_any
                groups.remove(group)
            first.names.append(unit)
            first.models |= models
            first.takes_any |= not models
        self._of_unit = {name: group.names[0] for group in groups for name in group.names}
        self._of_model = {model: group.names[0] for group in groups for model in group.models}
        alone = groups[0].names[0] if len(groups) == 1 else ANY
        self._other = next((group.names[0] for group in groups if group.takes_any), alone)

    def of(self, model: str | None) -> str:
        """Where a request for `model` waits."""
        return self._of_model.get(model, self._other) if model is not None else self._other

    def of_unit(self, unit: str) -> str:
        """The pool of a unit."""
        return self._of_unit.get(unit, ANY)

    def has(self, pool: str, unit: str) -> bool:
        """Whether a unit is of a pool."""
        return pool == ANY or self._of_unit.get(unit) == pool
