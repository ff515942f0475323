"""The gym with roles: what one unit computes for another, and what that must bring."""

from __future__ import annotations

import random

import pytest

from loadtests.gym.cells import GATE, run
from loadtests.gym.counting import AlwaysSplit
from loadtests.gym.disaggregated import LOADS, MODEL, Case, Figure, figures, problems
from loadtests.gym.engine import Engine
from loadtests.gym.fleets import with_roles
from loadtests.gym.sequences import Sequence
from loadtests.gym.world import World

PAIR = with_roles("pair", ("prefill", "decode"), MODEL, 200_000.0)
FIGURE = Figure(ttft_s=1.0, p99_s=2.0, itl_s=0.1, whole_s=5.0, split=0.0, refused=0.0)


def first_token_s(fetched: int) -> float:
    engine, sequence = Engine(MODEL), Sequence(8000, 2, ())
    sequence.fetched = fetched
    engine.expect(sequence)
    engine.take(sequence, 0.0)
    shown = [one.at for one in engine.advance(10.0) if sequence in one.first]
    assert (engine.pending, engine.kv.used) == (0, 0)
    return shown[0]


def test_what_was_fetched_is_not_computed_again() -> None:
    assert first_token_s(7999) == pytest.approx(MODEL.base_s, rel=0.05)
    assert first_token_s(0) > 0.5


@pytest.mark.parametrize("rival", [GATE, "always split"])
def test_with_roles_every_call_ends_and_the_same_seed_gives_the_same_run(rival: str) -> None:
    requests = LOADS["mixed"].make(random.Random(1), 2.0, 120)

    def play() -> list[tuple[float, float]]:
        world = World(PAIR)
        rivals = [AlwaysSplit(world, random.Random(1))]
        played = run(PAIR, requests, rival, 1) if rival == GATE else world.run(requests, [*rivals])
        assert played.transfers > 20
        assert played.per_unit == (0, 120)
        return [(call.first_at, call.ended_at) for call in played.calls]

    assert play() == play()
    assert all(ended >= first > 0.0 for first, ended in play())


def test_a_transfer_takes_as_long_as_the_link_is_slow() -> None:
    requests = LOADS["long"].make(random.Random(1), 0.01, 4)
    slow = with_roles("slow", ("prefill", "decode"), MODEL, 2000.0)
    ttfts = []
    for units in (PAIR, slow):
        world = World(units)
        calls = world.run(requests, [AlwaysSplit(world, random.Random(1))]).calls
        ttfts.append(sum(call.first_at - call.came_at for call in calls))
    moved = sum(request.prompt.tokens for request in requests)
    assert ttfts[1] - ttfts[0] == pytest.approx(moved / 2000.0 - moved / 200_000.0, rel=0.05)


def test_roles_keep_long_prompts_from_delaying_answers() -> None:
    case = Case("mixed", 3.6, "ppdd")
    found = figures(case, seeds=1)
    assert not list(problems(case, found))
    assert found["roles, gate"].itl_s < 0.3 * found["alike, gate"].itl_s
    assert found["roles, gate"].ttft_s < found["roles, always split"].ttft_s


def test_what_does_not_hold_is_said() -> None:
    pays, harmless = Case("mixed", 3.6, "ppdd"), Case("short", 10.0, "bbbb")
    found = dict.fromkeys(("alike, gate", "alike, leastconn", "alike, leastconn again"), FIGURE)
    worse = FIGURE._replace(ttft_s=1.1, whole_s=5.5)
    assert len(list(problems(pays, found | {"roles, gate": worse}))) == 3
    assert len(list(problems(harmless, found | {"roles, gate": worse}))) == 2
    assert not list(problems(harmless, found | {"roles, gate": FIGURE}))
