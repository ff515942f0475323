"""What decides whether a unit is in rotation, and whether others go before it: its verdict, a hold, a drain,
a suspected restart, a slow start; and the models it serves.

These change seldom and are needed for each request. So they tell of each change, and whoever has prepared
something from them (`Board.usable`) makes it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from cellgate.router.hold_nouns import Hold
from cellgate.router.judge import nothing_to_learn
from cellgate.router.nouns import Case, Verdict

_USABLE = (Verdict.UP, Verdict.SUSPECT)


def _nobody() -> None:
    """Nothing was prepared."""


class InRotation:
    """The part of a unit's state that every request asks for. `on_change` is called when any of it has
    changed; `is_blameless`: good evidence would change nothing.
    """

    __slots__ = (
        "_case",
        "_drained",
        "_hold",
        "_models",
        "_restart_suspected_at",
        "_risen_at",
        "is_blameless",
        "on_change",
        "retired",
    )

    def __init__(self, case: Case, models: frozenset[str]) -> None:
        self._case, self._models = case, models
        self.is_blameless = nothing_to_learn(case)
        self._drained = self.retired = False
        self._hold: Hold | None = None
        self._restart_suspected_at = -1.0
        self._risen_at = 0.0
        self.on_change: Callable[[], None] = _nobody

    @property
    def case(self) -> Case:
        """What the judge knows of it."""
        return self._case

    @case.setter
    def case(self, case: Case) -> None:
        is_other = case.verdict is not self._case.verdict
        self._case = case
        self.is_blameless = nothing_to_learn(case)
        if is_other:
            self.on_change()

    @property
    def drained(self) -> bool:
        """Whether an operator has taken it out."""
        return self._drained

    @drained.setter
    def drained(self, drained: bool) -> None:
        self._drained = drained
        self.on_change()

    @property
    def hold(self) -> Hold | None:
        """Whether it stands still on purpose (see hold.py)."""
        return self._hold

    @hold.setter
    def hold(self, hold: Hold | None) -> None:
        self._hold = hold
        self.on_change()

    @property
    def restart_suspected_at(self) -> float:
        """When a restart was last suspected; below 0: never, or it was not confirmed."""
        return self._restart_suspected_at

    @restart_suspected_at.setter
    def restart_suspected_at(self, at: float) -> None:
        self._restart_suspected_at = at
        self.on_change()

    @property
    def risen_at(self) -> float:
        """When it last came up."""
        return self._risen_at

    @risen_at.setter
    def risen_at(self, at: float) -> None:
        self._risen_at = at
        self.on_change()

    @property
    def models(self) -> frozenset[str]:
        """The models that it serves; none: not known."""
        return self._models

    @models.setter
    def models(self, models: frozenset[str]) -> None:
        self._models = models
        self.on_change()

    def is_usable(self) -> bool:
        """True when the unit may get new requests: it is UP or SUSPECT, not on hold, not drained, not
        removed.
        """
        return self._case.verdict in _USABLE and self._hold is None and not self._drained and not self.retired

    def steady_at(self, slow_start_s: float) -> float:
        """From when on no other goes before it: not while it is SUSPECT, or in slow start."""
        return self._risen_at + slow_start_s if self._case.verdict is Verdict.UP else inf

    def serves_model(self, model: str | None) -> bool:
        """Whether it serves a model; one whose models are not known may serve any."""
        return model is None or not self._models or model in self._models
