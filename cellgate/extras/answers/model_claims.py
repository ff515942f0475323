"""Models that a unit begins to list while it runs: believed once it answers as those do that serve them.

What a unit lists at its start is believed where nothing is configured. Later any change is an event, and a
line in `cellgate why`. A model that no other unit lists is its own affair. One that others list would get it
their requests: it is asked the known prompt for that model, beside one of them. Where both say the same, as
with an adapter that was loaded there too, it serves the model at once; where not, it is asked again, twice as
late each time. Engines that know no such prompt (Triton's) cannot be compared, and are believed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from cellgate.extras.answers.known_answer import ask_again, known_prompt_apis
from cellgate.probes.base import Fetch
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.text import one_line
from cellgate.router.board import Board
from cellgate.router.kept import listed
from cellgate.router.known_answers import AnswerTokens, is_implausible, is_same
from cellgate.router.nouns import Models
from cellgate.router.unit_state import UnitState

CLAIM_AGAIN_S, CLAIM_AGAIN_MAX_S = 1.0, 300.0
"""How soon a unit is asked again: twice as late after each answer that is another one."""
CLAIM_PAUSE_S = 0.1
"""Between two models on which it agrees: it may have loaded a hundred adapters."""
CLAIMS_EVENT_S = 60.0
"""Changes of one unit are told at most so often; `why` has the last one."""


class ModelClaims:
    """Of one control plane. `take` gets what units list."""

    def __init__(
        self, board: Board, events: EventLog, fetch_of: Callable[[UnitState], Fetch], now: Callable[[], float]
    ) -> None:
        self._board = board
        self._events = events
        self._fetch_of = fetch_of
        self._now = now
        self._claims: dict[str, _Claim] = {}
        self._event_at: dict[tuple[str, str], float] = {}

    def take(self, state: UnitState, models: Models) -> None:
        """A unit lists these models."""
        name, before, names = state.unit.name, state.models, frozenset(models.names)
        if state.unit.models or not before or not state.is_usable():
            # It starts, or its models are configured.
            self.forget(name)
            self._board.set_models(models)
            return
        claim = self._claims.get(name)
        open_before = frozenset(claim.open) if claim is not None else frozenset[str]()
        claimed = frozenset(model for model in names - before if self._others(state, model))
        gained, lost = names - before - claimed, before - names
        if claimed:
            claim = self._claims.setdefault(name, claim or _Claim(state, models))
            claim.take(models, claimed)
        else:
            self.forget(name)
        if names > claimed:
            self._board.set_models(_without(models, claimed))
        if new := claimed - open_before:
            self._tell(state, "model_claimed", f"begins to list {_names(new)}, which others serve: {_UNTIL}")
        elif gained or lost:
            words = [f"begins to list {_names(gained)}"] * bool(gained)
            words += [f"does not list {_names(lost)} any more"] * bool(lost)
            self._tell(state, "models_changed", " and ".join(words))
        if claimed and claim is not None and claim.task is None:
            claim.task = asyncio.get_running_loop().create_task(self._check(name, claim))

    def forget(self, unit: str) -> None:
        """Nothing is claimed any more."""
        claim = self._claims.pop(unit, None)
        if claim is not None and claim.task is not None:
            claim.task.cancel()

    def close(self) -> None:
        for unit in list(self._claims):
            self.forget(unit)

    # -- inside --------------------------------------------------------------------------------------------

    def _others(self, state: UnitState, model: str) -> list[UnitState]:
        """The other units that serve a model, in rotation or not."""
        return [other for other in self._board if other is not state and model in other.models]

    async def _check(self, unit: str, claim: _Claim) -> None:
        """Ask for one model after the other, until none is left."""
        wait_s = CLAIM_AGAIN_S
        while claim.open and self._board.units.get(unit) is claim.state:
            model = next(iter(claim.open))
            claim.open[model] = claim.open.pop(model)
            agrees = await self._agrees(claim.state, model)
            if agrees and model in claim.open:
                self._believe(claim, model)
                wait_s = CLAIM_AGAIN_S
            await asyncio.sleep(CLAIM_PAUSE_S if agrees else wait_s)
            if not agrees:
                wait_s = min(2.0 * wait_s, CLAIM_AGAIN_MAX_S)
        if self._claims.get(unit) is claim:
            del self._claims[unit]

    async def _agrees(self, state: UnitState, model: str) -> bool:
        """Whether a unit answers for this model as one that serves it."""
        others = self._others(state, model)
        usable = [other for other in others if other.is_usable()]
        if not usable:
            return not others
        alike = [other for other in usable if _are_alike(state, other)]
        measures = alike or usable
        other = measures[int(self._now() / CLAIM_AGAIN_S) % len(measures)]
        apis = known_prompt_apis(other.unit, other.engine)
        for api in apis:
            both = (self._ask(each, f"{api} {model}") for each in (state, other))
            said, expected = await asyncio.gather(*both)
            if expected:
                return is_same(said, expected) or (not alike and _may_be(said, expected))
        return not apis

    async def _ask(self, state: UnitState, question: str) -> AnswerTokens:
        return await ask_again(self._fetch_of(state), question, state.engine) or ()

    def _believe(self, claim: _Claim, model: str) -> None:
        state = claim.state
        since = claim.open.pop(model)
        claimed = frozenset(claim.open)
        self._board.set_models(_without(claim.models, claimed))
        words = f"serves {model} too: it answers as others do, {self._now() - since:.0f} s after it listed it"
        self._tell(state, "models_changed", words)

    def _tell(self, state: UnitState, kind: Literal["model_claimed", "models_changed"], words: str) -> None:
        name, now = state.unit.name, self._now()
        state.models_said = one_line(words), now
        if now - self._event_at.get((name, kind), -inf) >= CLAIMS_EVENT_S:
            self._event_at = {key: at for key, at in self._event_at.items() if now - at < CLAIMS_EVENT_S}
            self._event_at[name, kind] = now
            self._events.add(Action(kind, "its engine", name, f"{name} {state.models_said[0]}"))


_UNTIL = (
    "it gets their requests once it answers the known prompt as they do; "
    "name its `models` in the configuration, or restart it, if that cannot be"
)


@dataclass(slots=True)
class _Claim:
    """What one unit lists, and the models of it that are not believed yet, with the time of their coming."""

    state: UnitState
    models: Models
    open: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    def take(self, models: Models, claimed: frozenset[str]) -> None:
        self.models = models
        self.open = {model: self.open.get(model, models.at) for model in models.names if model in claimed}


def _without(models: Models, claimed: frozenset[str]) -> Models:
    names = tuple(name for name in models.names if name not in claimed)
    bases = {name: base for name, base in models.bases.items() if name not in claimed and base not in claimed}
    cards = {name: card for name, card in models.cards.items() if name not in claimed}
    return replace(models, names=names, bases=bases, cards=cards)


def _are_alike(one: UnitState, other: UnitState) -> bool:
    """Whether both compute the same model in the same way."""
    same_place = one.unit.cell == other.unit.cell and one.engine == other.engine
    return same_place and one.build.key == other.build.key


def _may_be(said: AnswerTokens, expected: AnswerTokens) -> bool:
    """Whether another build of the model could say this: both show what else was likely."""
    shown = bool(said and said[0].others and expected[0].others)
    return shown and not is_implausible(said, (expected,))


def _names(models: frozenset[str]) -> str:
    return listed(sorted(models))
