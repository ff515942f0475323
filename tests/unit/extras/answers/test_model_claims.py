"""A unit that lists other models while it runs: its own are believed, those of others once it agrees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from cellgate.extras.answers.model_claims import ModelClaims
from cellgate.probes.base import Fetch, Reply
from cellgate.proxy.observe.events import EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Cell, Evidence, Fleet, Models, Rules, Served, Sign, Strength, Unit
from cellgate.router.unit_state import UnitState
from tests.sim.world import World, played, run


class Scene:
    """Units a, b and c; `says` has what each says for a model, and what it does not serve it refuses."""

    def __init__(self, engine: str = "vllm") -> None:
        self.world = World(1)
        self.board, self.asked = Board(Rules(passes=1)), list[tuple[str, str]]()
        units = tuple(Unit(name, "cell", f"http://{name}") for name in "abc")
        self.board.configure(Fleet((Cell("cell"),), units), 0.0)
        self.events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)
        self.says: dict[tuple[str, str], str] = {}
        self.claims = ModelClaims(self.board, self.events, self._fetch_of, self.world.loop.time)
        for name, model in (("a", "m"), ("b", "m"), ("c", "own")):
            self.board.set_engine(Served(name, engine, 0.0))
            self.says[name, model] = model
            self.lists(name, model)
            self.board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "one token", 0.0))

    def play(self, scenario: Any) -> None:
        async def whole() -> None:
            try:
                await scenario
            finally:
                self.claims.close()

        run(self.world, whole())

    def lists(self, name: str, *models: str, length: int = 0) -> None:
        """A unit lists these models."""
        cards = {model: {"max_model_len": length} for model in models}
        found = Models(name, models, self.world.loop.time(), cards=cards)
        self.claims.take(self.board.units[name], found)

    def models(self, name: str) -> set[str]:
        return set(self.board.units[name].models)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events.last()]

    def _fetch_of(self, state: UnitState) -> Fetch:
        async def fetch(_method: str, target: str, *, body: bytes, **_rest: Any) -> Reply:
            await asyncio.sleep(0.01)
            model = orjson.loads(body)["model"]
            self.asked.append((state.unit.name, model))
            text = self.says.get((state.unit.name, model))
            if text is None or target != "/v1/completions":
                return Reply(404, {}, b"{}")
            return Reply(200, {}, orjson.dumps({"choices": [{"text": text}]}))

        return fetch  # type: ignore[return-value]


@played(Scene)
async def test_a_unit_that_claims_the_model_of_others_gets_it_never_while_it_answers_otherwise(
    scene: Scene,
) -> None:
    """Whether it says something else, or nothing; and it is asked ever more seldom."""
    scene.says["c", "m"] = "something else"
    for _ in range(60):
        scene.lists("c", "own", "m", length=7)
        await asyncio.sleep(30.0)
        assert scene.models("c") == {"own"}
        assert set(scene.board.units["c"].cards) == {"own"}
    assert scene.kinds() == ["model_claimed"]
    words, _ = scene.board.units["c"].models_said
    assert words.startswith("begins to list m, which others serve: it gets their requests once it answers ")
    assert 4 < sum(name == "c" for name, _ in scene.asked) <= 2 * 16
    # Once it does not list it any more, nobody asks.
    scene.lists("c", "own")
    asked = len(scene.asked)
    await asyncio.sleep(900.0)
    assert len(scene.asked) == asked


@played(Scene)
async def test_an_honest_unit_serves_what_it_has_loaded_within_a_second_also_if_others_have_it(
    scene: Scene,
) -> None:
    """An adapter that is loaded at all units, one after another."""
    for name in "ab":
        scene.says[name, "lora"] = "as trained"
        scene.lists(name, "m", "lora")
        await asyncio.sleep(1.0)
        assert scene.models(name) == {"m", "lora"}
    # Nobody else had it when it came to the first.
    assert scene.asked == [("b", "lora"), ("a", "lora")] or scene.asked == [("a", "lora"), ("b", "lora")]
    assert scene.kinds() == ["models_changed", "model_claimed", "models_changed"]
    scene.lists("b", "m")
    assert scene.models("b") == {"m"}


@played(Scene)
async def test_a_unit_that_answers_later_as_others_do_is_believed_then(scene: Scene) -> None:
    scene.lists("c", "own", "m")
    await asyncio.sleep(5.0)
    assert scene.models("c") == {"own"}
    scene.says["c", "m"] = "m"
    await asyncio.sleep(10.0)
    assert scene.models("c") == {"own", "m"}


def only_c(scene: Scene) -> None:
    scene.board.configure(Fleet((Cell("cell"),), (Unit("c", "cell", "http://c"),)), 1.0)


@pytest.mark.parametrize(
    ("change", "is_believed"),
    [
        (lambda scene: scene.board.drain("c", drained=True), True),
        (only_c, True),
        (lambda scene: [scene.board.drain(name, drained=True) for name in "ab"], False),
    ],
    ids=["it is out: it lists it before its return", "nobody else has it", "the others are out"],
)
@played(Scene)
async def test_what_is_listed_at_a_start_or_by_nobody_else_is_believed(
    scene: Scene, change: Callable[[Scene], object], is_believed: bool
) -> None:
    change(scene)
    scene.lists("c", "own", "m")
    await asyncio.sleep(30.0)
    assert ("m" in scene.models("c")) is is_believed


@played(lambda: Scene("triton"))
async def test_where_engines_know_no_such_prompt_nothing_can_be_compared(scene: Scene) -> None:
    scene.lists("c", "own", "m")
    await asyncio.sleep(1.0)
    assert scene.models("c") == {"own", "m"}
