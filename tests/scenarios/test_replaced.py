"""All units of a model are replaced while clients ask: nothing is refused while an old one serves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.router.nouns import Cell, Fleet, Unit
from tests.scenarios.harness import BACK_S, Stage
from tests.scenarios.visit import Visit
from tests.sim.timing import Timing
from tests.sim.world import played

PER_S, MANY_PER_S = 10, 50
NIGHTLY = pytest.mark.nightly


class Replaced(Stage):
    """A fleet of old engines o0, o1…, which new ones n0, n1… are to replace."""

    def __init__(self, size: int) -> None:
        timing, timeouts = Timing(prefill_s=0.01, step_s=0.005), Timeouts(drain_s=20.0)
        super().__init__(units=0, timing=timing, timeouts=timeouts)
        for number in range(size):
            self.add_engine(f"o{number}")
        self.size = size
        self.asked: list[asyncio.Task[Visit]] = []

    def units_at(self, engines: str, name: str = "") -> Fleet:
        """The units at engines that begin with this letter, with names that begin with it or another one."""
        units = tuple(
            Unit(f"{name or engines}{n}", "c", self.engines[f"{engines}{n}"].url, models=("tiny",))
            for n in range(self.size)
        )
        return Fleet((Cell("c"),), units)

    async def begin_with(self, fleet: Fleet) -> None:
        self.reload(fleet)
        await self.until(self.all_up, BACK_S)
        await self.load(0.5)

    def add_new(self, late_s: float | None = None) -> None:
        """The new engines; they listen so much later (None: never)."""
        for number in range(self.size):
            engine = self.add_engine(f"n{number}")
            engine.die()
            if late_s is not None:
                self.world.loop.call_later(late_s, engine.restart)

    async def load(self, seconds: float, per_s: int = PER_S) -> None:
        for _ in range(round(seconds * per_s)):
            self.asked.append(asyncio.ensure_future(self.ask(max_tokens=3)))
            await asyncio.sleep(1.0 / per_s)

    async def refused(self) -> list[str]:
        """What was not answered."""
        return [f"{v.reply.status} {v.code}" for v in await asyncio.gather(*self.asked) if not v.is_answered]

    def late_picks(self, url: str) -> list[str]:
        """Picks of engines with such URLs after a unit at another one came up."""
        picks = self.gate.router.picks
        first = min((pick.at for pick in picks if url not in pick.url), default=float("inf"))
        return [f"{pick}" for pick in picks if url in pick.url and pick.at > first]

    def lines(self, kind: str) -> list[str]:
        return [event["line"] for event in self.told(kind)]


@pytest.mark.parametrize("name", ["n", "o"], ids=["new names", "new URLs"])
@pytest.mark.parametrize(
    ("size", "late_s", "per_s"),
    [
        (2, 0.1, PER_S),
        (8, 3.0, PER_S),
        (2, 30.0, PER_S),
        pytest.param(100, 3.0, MANY_PER_S, marks=NIGHTLY),
        pytest.param(100, 30.0, MANY_PER_S, marks=NIGHTLY),
    ],
)
def test_old_units_serve_until_a_new_one_is_up_and_get_nothing_from_then_on(
    size: int, late_s: float, per_s: int, name: str
) -> None:
    stage = Replaced(size)

    async def replaced() -> None:
        await stage.begin_with(stage.units_at("o"))
        stage.add_new(late_s)
        stage.reload(stage.units_at("n", name))
        await stage.load(late_s + 3.0, per_s)
        assert await stage.refused() == []
        assert stage.late_picks("http://o") == []
        assert any("http://n" in pick.url for pick in stage.gate.router.picks)
        assert list(stage.gate.board.units) == [f"{name}{n}" for n in range(size)]

    stage.play(replaced(), until_up=False)


@pytest.mark.nightly
def test_a_hundred_old_units_serve_on_for_as_long_as_they_live_if_no_new_one_ever_comes() -> None:
    stage = Replaced(100)

    async def never() -> None:
        await stage.begin_with(stage.units_at("o"))
        stage.add_new()
        stage.reload(stage.units_at("n"))
        await stage.load(45.0, MANY_PER_S)
        assert await stage.refused() == []
        assert len(stage.asked) == 2255
        assert len(stage.gate.board.units) == 200

    stage.play(never(), until_up=False)


@played(Replaced, 2)
async def test_old_units_serve_on_if_no_new_one_ever_comes_and_everything_says_so(stage: Replaced) -> None:
    await stage.begin_with(stage.units_at("o"))
    stage.add_new()
    stage.reload(stage.units_at("n"))
    await stage.load(3.0)
    await asyncio.sleep(40.0)
    await stage.load(1.0)
    assert await stage.refused() == []
    assert stage.lines("kept") == [
        "units are not configured any more: o0 and o1 are kept until n0 or n1 are up, because nothing else "
        "serves tiny yet"
    ]
    assert stage.lines("reload")[-1].endswith("+n0, +n1, 2 no longer configured are kept")
    # An operator takes one out: it goes at once. The other one fails, and has the time of a drain.
    stage.gate.set_drain("o0", drained=True)
    await asyncio.sleep(0.0)
    assert list(stage.gate.board.units) == ["n0", "n1", "o1"]
    assert stage.lines("kept_over") == ["unit o0 is kept no longer: it is gone: drained by an operator"]
    stage.engines["o1"].die()
    await asyncio.sleep(21.0)
    assert list(stage.gate.board.units) == ["n0", "n1"]
    assert stage.lines("kept_over")[-1].endswith("not in rotation itself for 20 s")


@played(Replaced, 2)
async def test_an_address_that_has_another_name_now_is_asked_only_under_that_and_after_a_canary(
    stage: Replaced,
) -> None:
    await stage.begin_with(stage.units_at("o"))
    renamed = stage.units_at("o", "n")
    swapped = Fleet(
        renamed.cells,
        tuple(replace(u, url=v.url) for u, v in zip(renamed.units, renamed.units[::-1], strict=True)),
    )
    for fleet in (renamed, swapped):
        stage.reload(fleet)
        await stage.load(3.0)
        assert await stage.refused() == []
        assert list(stage.gate.board.units) == ["n0", "n1"]
    assert not stage.told("kept")


@played(Replaced, 2)
async def test_what_is_taken_away_without_a_successor_goes_at_once(stage: Replaced) -> None:
    await stage.begin_with(stage.units_at("o"))
    one, other = stage.units_at("o").units
    stage.reload(Fleet((Cell("c"),), (other,)))
    assert list(stage.gate.board.units) == ["o1"]
    stage.reload(Fleet((Cell("c"),), (replace(one, models=("large",)),)))
    assert list(stage.gate.board.units) == ["o0"], "nothing is to serve tiny any more"
    stage.reload(Fleet())
    assert not stage.gate.board.units
    assert not stage.told("kept")
