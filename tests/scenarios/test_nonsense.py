"""A unit that answers fast and wrong does not win: its requests go to others, it goes, and it comes back.

And the other side: requests that are themselves at fault take nobody out, and cost next to nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cellgate.router.nouns import Verdict
from loadtests.simunit.nonsense import KINDS
from tests.scenarios.harness import GATE_PORT, Stage
from tests.scenarios.seeds import crossed, seeds
from tests.scenarios.visit import Visit, chat, encode
from tests.sim.behaviour import Behaviour
from tests.sim.client import Client, Manner
from tests.sim.world import played

CLIENTS = 6
FIRST_S, LATER_S = 20.0, 10.0
OUT_S = BACK_S = 5.0
PATIENCE_S = 2.5
"""A client gives up on an answer after this: then it was not served."""


def is_served(visit: Visit) -> bool:
    """Whether the answer is the one that any healthy unit gives."""
    return visit.is_answered and visit.dishonesty() is None


class Load:
    """Closed-loop clients, each with one request at a time; what they got, by when they asked."""

    def __init__(self, stage: Stage, clients: int = CLIENTS, **fields: Any) -> None:
        self.stage = stage
        self.visits: list[tuple[float, Visit]] = []
        self._fields = fields
        self._goes_on = True
        self._clients = [asyncio.ensure_future(self._use()) for _ in range(clients)]

    async def _use(self) -> None:
        while self._goes_on:
            begun = self.stage.now
            patient = Manner(timeout_s=PATIENCE_S)
            visit = await self.stage.ask(**{"max_tokens": 8, "manner": patient, **self._fields})
            self.visits.append((begun, visit))
            if not is_served(visit):
                # As SDKs do: they wait a moment before they ask again.
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """No more requests; those that are open are awaited."""
        self._goes_on = False
        await asyncio.gather(*self._clients)

    def share(self, since: float, until: float) -> float:
        """The share of the requests of that time that were served."""
        found = [is_served(visit) for at, visit in self.visits if since <= at < until]
        assert found
        return sum(found) / len(found)


def hurt(stage: Stage, names: str, kind: str, *, spares_canaries: bool = True) -> None:
    """These units answer with nonsense from now on."""
    stage.liars.update(names)
    for name in names:
        stage.engines[name].behaviour = Behaviour(answers=kind, spares_canaries=spares_canaries)


def mend(stage: Stage, names: str) -> None:
    for name in names:
        stage.engines[name].behaviour = Behaviour()


def reasons(stage: Stage, name: str) -> list[str]:
    """Why a unit went down, each time."""
    return [
        e["reason"] for e in stage.gate.events.last() if e.get("unit") == name and e.get("after") == "down"
    ]


def are_out(stage: Stage, names: str) -> list[str]:
    """Which of these units are out. Of several, some may get no requests that they could refuse."""
    return [name for name in names if stage.verdict(name) is Verdict.DOWN]


def are_up(stage: Stage, names: str) -> bool:
    return all(stage.verdict(name) is Verdict.UP for name in names)


FLEETS = [(2, "b"), (3, "a"), (8, "h"), (8, "abcd")]
"""How many units, and which of them answer nonsense: one bad unit, a bad half."""
IN_EVERY_RUN = (
    "status_401",
    "html",
    "nothing_said",
    "comments_only",
    "empty_deltas",
    "same_token",
    "no_path",
)
CELLS = [
    pytest.param(kind, stream, *fleet, marks=() if is_usual else pytest.mark.nightly)
    for kind in KINDS
    for number, fleet in enumerate(FLEETS)
    for stream in (False, True)
    for is_usual in [kind in IN_EVERY_RUN and number == 1]
]
"""Each kind of nonsense, whole and streamed, on each fleet. A few are played in every run."""
NO_FAULT = ("no_path",)
"""Units of a mixed fleet say so: their requests go to others, and they stay."""


def play(kind: str, stream: bool, units: int, bad: str, seed: int = 1) -> None:
    """One cell of the table."""
    stage = Stage(seed, units)

    async def scenario() -> None:
        hurt(stage, bad, kind)
        begun = stage.now
        load = Load(stage, stream=stream)
        if kind not in NO_FAULT:
            await stage.until(lambda: bool(are_out(stage, bad)), OUT_S)
            name = are_out(stage, bad)[0]
            assert reasons(stage, name)[0].startswith("refuses what other units serve: ")
        await asyncio.sleep(begun + FIRST_S + LATER_S - stage.now)
        mend(stage, bad)
        await stage.until(lambda: are_up(stage, bad), BACK_S)
        await load.end()
        assert load.share(begun, begun + FIRST_S) >= 0.9
        assert load.share(begun + FIRST_S, begun + FIRST_S + LATER_S) >= 0.99

    stage.play(scenario())
    assert all(set(stage.flips(name)) <= {"up"} for name in stage.engines if name not in bad)


@pytest.mark.parametrize(("kind", "stream", "units", "bad"), CELLS)
def test_a_unit_that_answers_nonsense_goes_and_returns_and_its_requests_are_served(
    kind: str, stream: bool, units: int, bad: str
) -> None:
    play(kind, stream, units, bad)


BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "too long": {"prompt_tokens": 2000},
    "a tool that is unknown": {"tools": [{"type": "function", "function": {"name": "nobody"}}]},
    "a schema that is broken": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "an image": {"images": "image_url"},
}
GOOD: dict[str, Any] = {}
BAD: dict[str, Any] = {"user": "nobody"}


@pytest.mark.parametrize(("share", "status"), crossed([0.05, 0.5, 1.0], [400, 401, 404, 422]))
@pytest.mark.parametrize("seed", seeds(range(4)))
@played(Stage, given=("seed",), units=3)
async def test_clients_that_send_bad_requests_take_nobody_out_and_cost_next_to_nothing(
    stage: Stage, share: float, status: int
) -> None:
    for engine in stage.engines.values():
        engine.behaviour = Behaviour(lacks=b"nobody", lacks_status=status)
    stage.liars.update(stage.engines)
    asked: list[bool] = []

    async def client(number: int) -> None:
        for _ in range(120):
            is_bad = stage.rng.random() < share
            visit = await stage.ask(max_tokens=4, **(BAD if is_bad else GOOD))
            asked.append(is_bad)
            assert is_served(visit) is not is_bad
            assert visit.reply.status == (status if is_bad else 200)
            assert not is_bad or b"is not supported" in visit.reply.body
            await asyncio.sleep(0.01)

    await asyncio.gather(*(client(number) for number in range(4)))
    for name in stage.engines:
        assert set(stage.flips(name)) <= {"up"}, stage.flips(name)
    extra = sum(engine.refused for engine in stage.engines.values()) - sum(asked)
    assert extra <= 0.03 * len(asked)


@pytest.mark.parametrize("masks_per_s", [0, 100])
@played(Stage, units=4)
async def test_who_sends_bad_requests_does_not_hide_a_unit_that_begins_to_refuse_what_others_ask(
    stage: Stage, masks_per_s: int
) -> None:
    """What is known of the requests of one client says nothing about those of another."""
    for engine in stage.engines.values():
        engine.behaviour = Behaviour(lacks=b"nobody")
    stage.liars.update(stage.engines)
    masking, is_over = Client(stage.world, f"gate:{GATE_PORT}", "10.0.0.99"), False

    async def mask() -> None:
        while not is_over:
            visit = stage._visit("/v1/chat/completions", body := chat("nobody", max_tokens=8))
            coming.append(asyncio.ensure_future(masking.request("POST", visit.path, encode(body))))
            stage.visits.remove(visit)
            await asyncio.sleep(1.0 / masks_per_s)

    coming: list[asyncio.Future[Any]] = []
    masks = [asyncio.ensure_future(mask())] if masks_per_s else []
    load = Load(stage)
    await asyncio.sleep(5.0)
    asked = [len(stage.picks(name)) for name in stage.engines]
    await asyncio.sleep(1.0)
    # Nothing can be known of a unit before somebody is sent there.
    used = [len(stage.picks(name)) - so_far for name, so_far in zip(stage.engines, asked, strict=True)]
    hurt_one = max(zip(used, stage.engines, strict=True))[1]
    stage.engines[hurt_one].behaviour = Behaviour(lacks=b'"role"')
    begun = stage.now
    await stage.until(lambda: bool(are_out(stage, hurt_one)), OUT_S)
    out_s = stage.now - begun
    await asyncio.sleep(1.0)
    is_over = True
    await asyncio.gather(*masks, *coming)
    await load.end()
    lost = [visit for at, visit in load.visits if not is_served(visit)]
    assert out_s <= 1.0
    assert len(lost) <= 2


@pytest.mark.parametrize(
    ("lacking", "special"),
    [
        (Behaviour(lacks=b"image_url"), {"images": "image_url"}),
        (Behaviour(max_prompt=4000), {"prompt_tokens": 2000}),
        (Behaviour(lacks=b"json_schema"), BAD_REQUESTS["a schema that is broken"]),
    ],
    ids=["no vision", "a shorter context", "no schemas"],
)
@pytest.mark.parametrize("share", [0.6, pytest.param(0.2, marks=pytest.mark.nightly)])
@played(Stage, units=3)
async def test_a_unit_that_lacks_a_feature_gets_all_requests_that_do_not_need_it(
    stage: Stage, lacking: Behaviour, special: dict[str, Any], share: float
) -> None:
    stage.engines["b"].behaviour = lacking
    plain: list[str | None] = []
    refused: list[int] = []

    async def client() -> None:
        for _ in range(60):
            is_special = stage.rng.random() < share
            visit = await stage.ask(max_tokens=4, **(special if is_special else GOOD))
            assert is_served(visit)
            if not is_special:
                plain.append(visit.unit)

    # All have had their slow start.
    await asyncio.sleep(15.0)
    for _ in range(2):
        before = stage.engines["b"].refused
        await asyncio.gather(*(client() for _ in range(6)))
        refused.append(stage.engines["b"].refused - before)
    assert set(stage.flips("b")) <= {"up"}
    assert plain.count("b") > 0
    # After a few it gets only a trial now and then.
    assert refused[0] <= 24
    assert refused[1] <= 16


@played(Stage, units=4)
async def test_three_units_of_four_that_answer_nonsense_get_next_to_nothing(stage: Stage) -> None:
    hurt(stage, "abc", "null")
    begun = stage.now
    load = Load(stage, stream=False)
    await asyncio.sleep(3.0)
    assert len(are_out(stage, "abc")) == 3
    await load.end()
    assert load.share(begun, stage.now) >= 0.95


@pytest.mark.parametrize(("kind", "stream"), [("status_401", False), ("html", True), ("empty_deltas", True)])
@played(Stage, units=3)
async def test_at_one_request_in_a_second_a_unit_that_answers_nonsense_is_out_as_soon(
    stage: Stage, kind: str, stream: bool
) -> None:
    hurt(stage, "b", kind)
    begun = stage.now
    while not are_out(stage, "b"):
        assert stage.now - begun < OUT_S
        visit = await stage.ask(stream=stream, max_tokens=4)
        assert is_served(visit)
        await asyncio.sleep(1.0)
    assert stage.engines["b"].behaviour.answers == kind


@played(Stage, units=3)
async def test_a_unit_that_cannot_serve_any_of_the_present_requests_stays_for_all_others(
    stage: Stage,
) -> None:
    stage.engines["b"].behaviour = Behaviour(lacks=b"image_url")
    units: list[str | None] = []
    # All have had their slow start, and nobody has asked for anything else.
    await asyncio.sleep(15.0)
    for _ in range(40):
        visits = await stage.crowd(6, max_tokens=4, images="image_url")
        assert all(map(is_served, visits))
    units.extend(visit.unit for visit in await stage.crowd(12, max_tokens=4))
    ((reason, _),) = stage.gate.board.units["b"].refusals.values()
    assert " of /v1/chat/completions of tiny with a stream, images: 400 (" in reason
    assert set(stage.flips("b")) <= {"up"}
    assert "b" in units


@played(Stage, units=1)
async def test_one_unit_alone_says_what_it_says(stage: Stage) -> None:
    hurt(stage, "a", "status_401")
    visit = await stage.ask()
    assert (visit.reply.status, visit.unit) == (401, "a")
    hurt(stage, "a", "html")
    visit = await stage.ask(stream=False)
    assert b"It works!" in visit.reply.body
    assert set(stage.flips("a")) <= {"up"}
