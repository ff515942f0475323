"""One cell of the gym (`loadtests.gym.look LOAD FLEET AT`) through the gate, what it believes beside what is.

Every few seconds one line a unit: what is there, what was learnt of it and what is true, and what the request
that came last would cost there now, term by term.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial

from cellgate.router.cost import Cost, Expected
from loadtests.gym.cells import Cell, rate_of, requests_for
from loadtests.gym.fleets import FLEETS
from loadtests.gym.gate import Gate, ask_of, make_gates
from loadtests.gym.loads import LOADS
from loadtests.gym.nouns import Run
from loadtests.gym.world import World

HEAD = (
    f"{'s':>6} unit {'leases':>6} {'running':>7} {'waiting':>7} {'kv':>4} {'sent':>5} | learnt (true): "
    "tokens/s, step s, latency s, bytes/token, followed, trust | cost"
)


def main() -> int:
    """Runs the cell and prints."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.gym.look", description=__doc__)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("fleet", choices=FLEETS)
    parser.add_argument("at", type=float, help="utilisation; below 0: requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5.0, metavar="S")
    parser.add_argument("--until", type=float, default=100.0, metavar="S")
    options = parser.parse_args()
    cell, fleet = Cell(options.load, options.fleet, options.at), FLEETS[options.fleet]
    world = World(fleet)
    gates = make_gates(world, options.seed)
    rng = random.Random(f"{cell.load} {options.seed}")
    requests = LOADS[cell.load].make(rng, rate_of(cell), requests_for(cell, fleet))
    print(f"{cell}, {rate_of(cell):.3g}/s\n{HEAD}")
    world.at(world.begins_at + options.every, partial(_show, world, gates[0], options.every, options.until))
    _end(world.run(requests, [*gates]), gates[0])
    return 0


def _show(world: World, gate: Gate, every_s: float, until_s: float, now: float) -> None:
    world.settle()
    for number, state in enumerate(gate.board):
        print(
            f"{now - world.begins_at:6.1f} {_there(world, gate, number)} | {_learnt(world, gate, number)}",
            end="",
        )
        call = next((call for call in reversed(world.calls)), None)
        if call is not None:
            ask = ask_of(call, now)
            expected = Expected(gate.board.answer_lengths.expected(ask.model, ask.max_tokens))
            held = state.costs.prefixes.match(ask.blocks)
            cost = Cost(*state.costs.estimate(ask, held, expected, now).terms)
            terms = (f"{name[:-2]} {value:.3f}" for name, value in cost._asdict().items() if value)
            print(" | " + " ".join(terms), end="")
        print()
    if now - world.begins_at < until_s:
        world.at(now + every_s, partial(_show, world, gate, every_s, until_s))


def _there(world: World, gate: Gate, number: int) -> str:
    state, engine = list(gate.board)[number], world.engines[number]
    return (
        f"{state.unit.name:4} {state.in_flight:6} {len(engine.running):7} {len(engine.waiting):7} "
        f"{engine.kv_use:4.0%} {world.per_unit[number]:5}"
    )


def _learnt(world: World, gate: Gate, number: int) -> str:
    engine = world.engines[number]
    costs = list(gate.board)[number].costs
    rates, model = costs.rates, engine.model
    step_s = model.step_s(0, engine.decoding, engine.context)
    return (
        f"{rates.prefill_tokens_s.value:.0f} ({model.prefill_tokens_s:.0f}) "
        f"{rates.steps.at(costs.backlog.batch):.4f} ({step_s:.4f}) {rates.latency.value:.3f} "
        f"({model.front_end_s:g}) {rates.bytes_per_token.value:.2f} "
        f"{rates.followed} {costs.prefixes.trust:.2f}"
    )


def _end(run: Run, gate: Gate) -> None:
    calls = [call for call in run.calls if not call.refused]
    ttfts = sorted(call.first_at - call.came_at for call in calls)
    waits = sorted(call.waited_s for call in calls)
    at = int(0.99 * len(calls))
    refusals = sorted({call.refused for call in run.calls if call.refused})
    print(
        f"TTFT {sum(ttfts) / len(ttfts):.3f} s, p99 {ttfts[at]:.3f}; of that in the gate's queue "
        f"{sum(waits) / len(waits):.3f}, p99 {waits[at]:.3f}; "
        f"refused {len(run.calls) - len(calls)} {refusals}; idle beside a queue "
        f"{run.idle_beside_queue_s:.2f} s; per unit {run.per_unit}; verdicts {', '.join(gate.flips)}"
    )


if __name__ == "__main__":
    sys.exit(main())
