"""The gym: the same seed gives the same run, books are closed at the end, and what the gate must keep to."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean, median

import pytest

from cellgate.proxy.request.prompt import block_hashes, read_prompt
from cellgate.router.cost_model import BLOCK_BYTES
from loadtests.gym.__main__ import main
from loadtests.gym.cells import AGAIN, EVENTS, GATE, Cell, Outcome, play, rate_of, run
from loadtests.gym.counting import Counting
from loadtests.gym.figures import row
from loadtests.gym.fleets import FLEETS, SLOW, UNEQUAL
from loadtests.gym.gate import ask_of, make_gates
from loadtests.gym.loads import LOADS, missing
from loadtests.gym.loads_traces import Mooncake
from loadtests.gym.nouns import Call, Change, Fleet, Request
from loadtests.gym.plan import FOR_EVENTS, UNEVEN, cells
from loadtests.gym.prompts import Text
from loadtests.gym.world import World

SAMPLE = Path(__file__).parents[2] / "loadtests" / "replay" / "sample.jsonl"
MAKEABLE = [load for load in LOADS if load != "mooncake"]
"""That one needs a file from elsewhere."""


def requests_of(load: str, rate: float, count: int, seed: int = 1) -> list[Request]:
    return LOADS[load].make(random.Random(seed), rate, count)


@pytest.mark.parametrize("rival", [GATE, "leastconn", "oracle"])
def test_the_same_seed_gives_the_same_run(rival: str) -> None:
    cell = Cell("agents", "two_gates", -5.0)
    one, other = (play(cell, 1, (rival,), 150).runs[rival][0] for _ in range(2))
    assert [(c.came_at, c.first_at, c.ended_at) for c in one.calls] == [
        (c.came_at, c.first_at, c.ended_at) for c in other.calls
    ]


@pytest.mark.parametrize("load", MAKEABLE)
def test_every_load_comes_at_its_rate(load: str) -> None:
    requests = requests_of(load, 20.0, 2000)
    everything = follow(requests)
    assert sorted(r.number for r in everything) == list(range(2000))
    # Those that follow up come when the ones before them have ended, and up to four sub-agents of a session
    # stand behind it and begin later.
    assert 2000 / min(r.at for r in requests[-5:]) == pytest.approx(20.0, rel=0.4)
    assert all(r.prompt.size // BLOCK_BYTES == len(r.prompt.blocks) for r in everything)


def test_a_trace_is_read_as_it_is() -> None:
    requests = Mooncake(SAMPLE).make(random.Random(1), 4.0, 250)
    assert len(requests) == 250
    assert 250 / requests[-1].at == pytest.approx(4.0, rel=0.1)
    blocks = {block for r in requests for block in r.prompt.blocks}
    assert len(blocks) < sum(len(r.prompt.blocks) for r in requests)
    assert Mooncake(Path("nowhere.jsonl")).missing.startswith("nowhere.jsonl is not there")


def follow(requests: list[Request]) -> list[Request]:
    found = []
    for request in requests:
        one: Request | None = request
        while one is not None:
            found.append(one)
            one = one.then
    return found


def test_an_ask_is_what_the_product_makes_of_such_a_prompt() -> None:
    text = Text().extend(900, 4.4)
    ask = ask_of(Call(Request(0, 0.0, text, text.extend(5)), 0.0), 0.0)
    read = read_prompt({"model": "m", "prompt": "x" * text.size})
    assert (ask.prompt_bytes, len(ask.blocks)) == (read.size, len(read.blocks))
    # What two prompts have in common ends in the middle of a block, which is then not in common.
    one, other = text.extend(300, 4.2), text.extend(300, 4.2)
    same = sum(a == b for a, b in zip(one.blocks, other.blocks, strict=True))
    bytes_of = b"x" * text.size, b"a" * 1260, b"b" * 1260
    hashes = [block_hashes(bytes_of[0] + own, 0) for own in bytes_of[1:]]
    assert same == sum(a == b for a, b in zip(*hashes, strict=True))
    assert len(set(one.blocks + other.blocks)) == 2 * len(one.blocks) - same


@pytest.mark.parametrize("fleet", ["equal", "dies", "joins", "four_gates", "kv_bound", "seats_8", "far_cell"])
def test_the_gates_books_are_closed_at_the_end(fleet: str) -> None:
    world = World(FLEETS[fleet])
    gates = make_gates(world, 1)
    requests = requests_of("shared_prompt", 10.0, 250)
    made = world.run(requests, [*gates])
    assert len(made.calls) == 250
    assert all(call.refused or call.ended_at >= call.first_at >= call.came_at for call in made.calls)
    for gate in gates:
        board = gate.board
        assert (board.in_flight, board.retries_in_flight, len(gate.router.queue)) == (0, 0, 0)
        for state in board:
            backlog = state.costs.backlog
            assert (backlog.batch, backlog.queued_tokens, backlog.kv_tokens) == (0, 0, 0)


def test_a_unit_that_dies_is_taken_out_and_comes_back() -> None:
    world = World(FLEETS["dies"])
    gates = make_gates(world, 1)
    world.run(requests_of("shared_prompt", 10.0, 300), [*gates])
    flips = [flip.split()[1:] for flip in gates[0].flips if " u2 " in flip]
    assert flips[0] == ["u2", "up"]
    assert ["u2", "down"] in flips
    assert flips[-1] == ["u2", "up"]


class First(Counting):
    """Everything goes to one unit."""

    def choose(self, request: Request, units: list[int]) -> int:
        return units[0]


def test_a_gate_that_follows_events_finds_more_where_blocks_are_evicted() -> None:
    [by_belief], [by_events] = play(Cell("chat", "kv_bound", 0.8), 1, (GATE, EVENTS)).runs.values()
    assert by_events.hits > by_belief.hits + 0.01


def test_a_unit_that_is_idle_beside_a_queue_is_seen() -> None:
    requests = requests_of("shared_prompt", 30.0, 300)
    world = World(FLEETS["equal"])
    lopsided = world.run(requests, [First(world, random.Random(1))])
    even = run(FLEETS["equal"], requests, "leastconn", 1)
    assert even.idle_beside_queue_s < 0.5 < 5.0 < lopsided.idle_beside_queue_s
    runs = {GATE: [lopsided], "leastconn": [even], AGAIN: [even]}
    judged = row(Outcome(Cell("shared_prompt", "equal", -30.0), 30.0, runs), uneven=False, unequal=False)
    assert set(judged.fails) == {"ttft", "p99", "whole", "idle"}


def test_all_planned_cells_are_there() -> None:
    planned = cells()
    assert len(set(planned)) == len(planned)
    assert {cell.load for cell in planned} == {load for load in LOADS if not missing(load)}
    assert {cell.fleet for cell in planned} == set(FLEETS) - {FOR_EVENTS}
    assert LOADS.keys() >= UNEVEN
    assert FLEETS.keys() >= UNEQUAL


# What holds today; the table in docs/evidence/gym.md has all.
@pytest.mark.parametrize(
    "cell",
    [
        Cell("shared_prompt", "equal", -16.0),
        Cell("shared_ramp", "equal", -16.0),
        Cell("agents", "equal", 0.8),
        Cell("zipf", "equal", 0.8),
        Cell("mooncake_like", "equal", 0.8),
        Cell("bursts", "equal", 0.5),
    ],
    ids=str,
)
def test_it_is_never_worse_than_a_simple_rule(cell: Cell) -> None:
    outcome = play(cell, 3, (GATE, AGAIN, "leastconn", "p2c", "round_robin"), 1000)
    judged = row(outcome, uneven=cell.load in UNEVEN, unequal=cell.fleet in UNEQUAL)
    assert judged.fails == ()


@pytest.mark.parametrize("load", ["embeddings", "classify"])
@pytest.mark.parametrize("fleet", ["four_gates", "four_gates_12"])
def test_gates_do_not_all_choose_the_unit_that_was_idle_a_moment_ago(load: str, fleet: str) -> None:
    runs = play(Cell(load, fleet, 0.8), 3, (GATE, "leastconn"), 600).runs
    ttft_s = {name: [fmean(c.first_at - c.came_at for c in one.calls) for one in runs[name]] for name in runs}
    # Where all choose the same unit it is 1.7 to 2.8 times.
    assert median(ttft_s[GATE]) < 1.3 * median(ttft_s["leastconn"])


def test_equals_get_as_many_requests_where_answers_come_whole() -> None:
    """Nobody sees when their prompts are computed. One long answer is no queue of prompts."""
    for one in play(Cell("plain_short", "equal", 0.8), 3, (GATE,), 1500).runs[GATE]:
        assert max(one.per_unit) < 1.8 * min(one.per_unit)


@pytest.mark.parametrize(
    ("load", "at"), [("shared_ramp", 0.9), ("decode_heavy", 0.5), ("rag", 0.5), ("classify", 0.7)]
)
def test_weights_that_are_wrong_are_believed_for_a_moment_only(load: str, at: float) -> None:
    """Least connections goes by them for ever; believed as long, they cost the gate more."""
    [run] = play(Cell(load, "wrong_weights", at), 1, (GATE,), 1200).runs[GATE]
    [even] = play(Cell(load, "wrong_weights", at), 1, ("leastconn",), 1200).runs["leastconn"]
    mean_s = [fmean(c.ended_at - c.came_at for c in one.calls) for one in (run, even)]
    assert mean_s[0] < 0.95 * mean_s[1]
    assert max(run.per_unit) < 1.35 * min(run.per_unit)


class SlowAtFirst(World):
    """The unit that comes back is five times as slow for SLOW_S seconds: it compiles, or its disk is cold."""

    back_at = fast_at = inf

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.sent: list[tuple[float, int]] = []

    def send(self, call: Call, unit: int, prompt_from: int | None = None) -> None:
        self.sent.append((self.now, unit))
        super().send(call, unit, prompt_from)

    def _change(self, change: Change, now: float) -> None:
        super()._change(change, now)
        if change.is_up:
            self.back_at, self.fast_at = now, now + SLOW_S
            self.engines[change.unit].model = replace(SLOW, base_s=0.04, per_sequence_s=0.0006)
            self.at(self.fast_at, partial(self._warm, change.unit))

    def _warm(self, unit: int, now: float) -> None:
        self.engines[unit].advance(now)
        self.engines[unit].model = self.fleet.places[unit].model


SLOW_S, SOON_S = 30.0, 30.0


@pytest.mark.parametrize("load", ["chat", "decode_heavy"])
def test_a_unit_that_is_slow_at_first_gets_its_share_soon_after(load: str) -> None:
    """One request at a time showed its speed so slowly that it stood idle for five minutes."""
    world, rate = SlowAtFirst(FLEETS["dies"]), rate_of(Cell(load, "equal", 0.5))
    made = LOADS[load].make(random.Random(1), rate, int(240.0 * rate))
    world.run(made, [*make_gates(world, 1)])
    slow = [unit for at, unit in world.sent if world.back_at + 10.0 < at < world.fast_at]
    soon = [unit for at, unit in world.sent if world.fast_at + SOON_S < at < world.fast_at + SOON_S + 30.0]
    assert slow.count(2) < 0.1 * len(slow), "it is avoided while it is slow"
    assert soon.count(2) > 0.2 * len(soon), f"{soon.count(2)} of {len(soon)}"


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--loads", "agents", "--at=0.8", "--seeds", "1", "--requests", "300", "--jobs", "1"]
    code = main([*options, "--markdown", "--detail"])
    printed = capsys.readouterr().out
    assert code == 0
    assert "| agents 0.8 equal |" in printed
    assert "| lmetric |" in printed
