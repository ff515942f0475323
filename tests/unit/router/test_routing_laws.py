"""What holds for routers over units that compute, in virtual time, and beside other gates."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.router.cost import CostTerms
from cellgate.router.cost_model import MEAN_S, MODEL_UNSEEN_S, SURE, Line, OtherGates, RemoteLoad, expected_s
from cellgate.router.nouns import Ask, Load, Refusal, Rules, Unit
from cellgate.router.pick import Router
from cellgate.router.unit_state import Lease
from tests.unit.router.fleets import board_up, router_over

TOKENS_S = 10_000.0
UNITS = 4


@dataclass
class Engine:
    """Computes prompts one after the other; `busy_until` is when it will have done what it has."""

    busy_until: float = 0.0
    queued: int = 0
    served: int = 0


@dataclass
class World:
    """Gates before the same units. What engines say of themselves reaches each gate once a second."""

    gates: int
    policy: str

    def __post_init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.engines = {f"u{n}": Engine() for n in range(UNITS)}

        self.routers = [self._router(seed) for seed in range(self.gates)]

    def _router(self, seed: int) -> Router:
        units = (Unit(name, "c", f"http://{name}", ("m",), max_in_flight=10_000) for name in self.engines)
        board = board_up(*units, rules=Rules(slow_start_s=0.0))
        for rates in (state.costs.rates for state in board):
            rates.prefill_tokens_s.guess(TOKENS_S)
            rates.bytes_per_token.guess(4.0)
            rates.followed = SURE
        return router_over(board, self.policy, seed=seed)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def run(self, until: float) -> None:
        for gate in self.routers:
            self._tick(gate)
        self._report()
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def ask(self, gate: int, ask: Ask) -> None:
        """A prompt comes to a gate now, and waits where there is no room."""
        router = self.routers[gate]

        def settle(answer: Lease | Refusal) -> None:
            assert isinstance(answer, Lease)
            self._serve(router, answer)

        answer = router.pick(ask, self.now)
        if answer is Refusal.FULL:
            router.wait(ask, self.now, frozenset(), settle)
            router.serve_waiting(self.now)
        else:
            settle(answer)

    def _serve(self, router: Router, lease: Lease) -> None:
        engine = self.engines[lease.unit]
        engine.queued += 1
        engine.served += 1
        engine.busy_until = max(engine.busy_until, self.now) + lease.job.prompt_tokens / TOKENS_S

        def done() -> None:
            engine.queued -= 1
            lease.commit(self.now)
            router.board.close(lease, self.now)
            router.serve_waiting(self.now)

        self.at(engine.busy_until, done)

    def _tick(self, router: Router) -> None:
        router.board.tick(self.now)
        router.tick(self.now)
        self.at(self.now + 0.25, lambda: self._tick(router))

    def _report(self) -> None:
        for name, engine in self.engines.items():
            for router in self.routers:
                own, running = router.board.units[name].in_flight, min(engine.queued, 1)
                load = Load(name, self.now, running, engine.queued - running, own_in_flight=own)
                router.board.report(replace(load, progress=self.now))
        self.at(self.now + 1.0, self._report)


@pytest.mark.parametrize("policy", ["prefix_affinity", "p2c"])
def test_four_gates_with_stale_reports_do_not_herd(policy: str) -> None:
    world, rng = World(gates=4, policy=policy), random.Random(1)
    for gate in range(4):
        now, gaps = 0.0, random.Random(gate)
        # Together 80 % of what the units can do.
        while (now := now + gaps.expovariate(0.8 * UNITS * TOKENS_S / 4 / 1000)) < 60.0:
            ask = Ask("m", stream=True, prompt_bytes=rng.choice((400, 4000, 7600)))
            world.at(now, partial(world.ask, gate, ask))
    peaks = dict.fromkeys(world.engines, 0.0)
    for second in range(10, 60):
        world.at(second, lambda: peaks.update({n: peaks[n] + e.queued for n, e in world.engines.items()}))
    world.run(60.0)
    served = [engine.served for engine in world.engines.values()]
    assert max(served) <= 1.5 * sum(served) / UNITS
    assert max(peaks.values()) <= 1.5 * sum(peaks.values()) / UNITS


# What other gates have at units: what they send meanwhile goes where least is to be computed.

law = settings(derandomize=True, deadline=None, max_examples=60)
BEAT_S = 0.25
LINES = st.lists(st.builds(Line, st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=20)


def after(told: list[float]) -> float:
    """What counts when these numbers of requests were told one after the other."""
    gates, found = OtherGates(), None
    for beat, in_flight in enumerate(told):
        found = gates.hear(in_flight, beat * BEAT_S)
    assert found is not None
    return found


def test_units_with_little_look_alike_and_a_long_line_stays_apart() -> None:
    idle, other, little, long = expected_s([Line(0.0, told_s) for told_s in (0.0, 0.0, 0.2, 5.0)])
    assert idle == other == little > 0.0
    assert long == pytest.approx(5.0 - MODEL_UNSEEN_S)
    with_own, without = expected_s([Line(3.0, 0.0), Line(0.0, 1.0)])
    assert with_own == 0.0, "what this gate has there fills a unit as well"
    assert without > MODEL_UNSEEN_S
    assert expected_s([Line(3.0, 0.0), Line(0.0, 0.0)]) == [0.0, 0.0]


@law
@given(found=LINES)
def test_all_together_it_stays_what_others_have_and_in_its_order(found: list[Line]) -> None:
    """Up to what units compute meanwhile; exactly where others alone have something."""
    expected = expected_s(found)
    told_s = sum(line.reported_s for line in found)
    assert all(each >= 0.0 for each in expected)
    assert abs(sum(expected) - told_s) <= MODEL_UNSEEN_S * len(found) * (1 + 1e-9) + 1e-6 * told_s
    alone = [Line(0.0, line.reported_s) for line in found]
    for there, slack_s in ((found, MODEL_UNSEEN_S), (alone, 0.0)):
        whole = [line.own_s + each for line, each in zip(there, expected_s(there), strict=True)]
        order = sorted(range(len(there)), key=lambda place: sum(there[place]))
        for before, behind in pairwise(order):
            assert whole[before] <= whole[behind] + slack_s + 1e-6 * whole[behind]


def forecasts(told: dict[str, RemoteLoad], *units: Unit) -> list[CostTerms]:
    board = board_up(*units)
    for unit in units:
        board.report(Load(unit.name, 1.25))
        board.units[unit.name].costs.rates.prefill_tokens_s.guess(1000.0)
    board.remote_load = told
    board.tick(1.25)
    return [state.costs.cost_terms for state in board.units.values()]


def unit(name: str, model: str = "m") -> Unit:
    return Unit(name, "c", f"http://{name}", models=(model,))


def test_what_others_send_next_is_expected_at_the_idle_unit_of_the_same_model() -> None:
    told = {"a": RemoteLoad(in_flight=9, prefilling=2, uncached_tokens=3000)}
    busy, idle, other = forecasts(told, unit("a"), unit("b"), unit("n", "n"))
    assert busy.foreign_tokens == pytest.approx(3000.0 - MODEL_UNSEEN_S * 1000.0)
    assert busy.foreign_batch == 7.0, "a prompt that is to be computed decodes nothing yet"
    assert idle.foreign_tokens == pytest.approx(MODEL_UNSEEN_S * 1000.0)
    assert other.foreign_tokens == 0.0


def test_what_lasts_counts_in_full_and_a_moment_does_not() -> None:
    assert after([8.0] * 100 + [0.0]) > 7.0
    assert after([8.0] * 100 + [0.0] * int(3 * MEAN_S / BEAT_S)) < 1.0
    assert after([8.0]) == 8.0, "the first word as well"
    assert after([0.0] * 100 + [8.0] * int(4 * MEAN_S / BEAT_S)) > 7.5
    gates = OtherGates()
    assert gates.hear(None, 0.0) is None
    gates.hear(4.0, 0.0)
    found = [gates.hear(None, 1.0 + second) for second in range(60)]
    assert found[0] is not None
    assert found[-1] is None
    assert gates.hear(4.0, 100.0) == 4.0
