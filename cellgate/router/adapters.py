"""The LoRA adapters of a unit: which it lists, which are loaded, and what it costs to use another one. Pure.

An engine keeps a limited number of adapters beside its weights (vLLM: `--max-loras`). An adapter that is
not there is loaded first, which takes the place of the one that was not used for longest; when all of them
are in use, its requests wait until one is not. So a request is best served where its adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

LOAD_S = 1.0
"""What loading an adapter is assumed to take: from a disk, as most engines keep no others in memory."""
EVICT_SHARE = 0.5
"""The chance that the adapter which is replaced is needed again, and has to be loaded once more."""


class Adapters:
    """The adapters of one unit. `bases` has the model that each is for; empty: the unit lists none.

    `places` is how many the engine keeps at once; 0: unknown.
    """

    def __init__(self) -> None:
        self.bases: Mapping[str, str] = {}
        self.places = 0
        self.in_use: dict[str, int] = {}
        """How many requests of this gate use an adapter; those that none uses are left out."""
        self._loaded: dict[str, None] = {}
        """The adapters that are believed to be loaded, the one not used for longest first."""
        self._reported: frozenset[str] = frozenset()
        """The adapters that requests of others use, as the engine reported them last."""

    def set_bases(self, bases: Mapping[str, str]) -> None:
        """The unit lists these adapters now."""
        self.bases = bases
        self._loaded = {name: None for name in self._loaded if name in bases}

    def report(self, in_use: frozenset[str], places: int, *, has_foreign: bool) -> None:
        """Apply the engine's report; without requests of others it shows only what the gate knows better."""
        self.places = places
        self._reported = in_use if has_foreign else frozenset()
        for name in in_use:
            if name in self.bases:
                self._use(name)

    def open(self, model: str | None) -> None:
        """A request for `model`, an adapter or not, is sent to the unit."""
        if model in self.bases:
            assert model is not None
            self.in_use[model] = self.in_use.get(model, 0) + 1
            self._use(model)

    def close(self, model: str | None) -> None:
        """A request has ended."""
        count = self.in_use.get(model, 0) if model is not None else 0
        if model is not None and count > 1:
            self.in_use[model] = count - 1
        elif model is not None and count:
            del self.in_use[model]

    def forget(self) -> None:
        """The unit has restarted: nothing is loaded."""
        self._loaded, self._reported = {}, frozenset()

    def cost_s(self, model: str, answer_s: float) -> float:
        """The seconds that a request for `model` costs because of its adapter; 0 for one that is loaded.

        `answer_s` is how long an answer takes there: until then an adapter in use keeps its place.
        """
        if model not in self.bases or model in self._loaded or model in self._reported:
            return 0.0
        if not self.places or len(self._loaded) < self.places:
            return LOAD_S
        in_use = self._reported.union(self.in_use)
        return LOAD_S * (1.0 + EVICT_SHARE) + (answer_s if len(in_use) >= self.places else 0.0)

    def loaded(self) -> list[str]:
        """The adapters that are believed to be loaded, by name."""
        return sorted(self._loaded)

    def _use(self, name: str) -> None:
        self._loaded.pop(name, None)
        self._loaded[name] = None
        while self.places and len(self._loaded) > self.places:
            del self._loaded[next(iter(self._loaded))]
