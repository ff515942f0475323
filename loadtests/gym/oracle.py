"""The oracle: what could be had by who knows all that is, and decides one request after the other."""

from __future__ import annotations

from loadtests.gym.counting import Counting
from loadtests.gym.engine import Engine
from loadtests.gym.nouns import Request


class Oracle(Counting):
    """Knows each engine's speed, cache and queue, and how long each answer will be: greedy on the seconds
    that the request and those beside it will wait because it goes there.
    """

    def choose(self, request: Request, units: list[int]) -> int:
        self.world.settle()
        places, engines = self.world.fleet.places, self.world.engines
        costs = {unit: waits_s(engines[unit], request) + places[unit].network_s for unit in units}
        fewest = min(costs.values())
        return self.rng.choice([unit for unit in units if costs[unit] <= fewest + 1e-4])


PREFILL_BESIDE = 0.3
"""A second of computing prompts delays those that decode by so much of it: some were prompts as well."""


def waits_s(engine: Engine, request: Request) -> float:
    """The seconds that a request and those beside it will wait because it goes to this engine."""
    model, prompt, answer = engine.model, request.prompt, request.answer_tokens
    uncached = prompt.tokens - engine.cached(prompt.names, prompt.tokens)
    others = engine.count
    first_s = (engine.pending + uncached) / model.prefill_tokens_s
    step_s = model.step_s(0, min(others + 1, model.seats), engine.context + prompt.tokens)
    more_s = model.per_sequence_s + model.per_context_token_s * (prompt.tokens + answer / 2)
    beside_s = PREFILL_BESIDE * others * uncached / model.prefill_tokens_s + answer * more_s * min(
        others, model.seats
    )
    return first_s + answer * step_s + beside_s + _seat_s(engine, request, step_s)


def _seat_s(engine: Engine, request: Request, step_s: float) -> float:
    """How long until there are a seat and KV cache for it, if those that decode leave when they are due."""
    model = engine.model
    ahead = len(engine.waiting) + engine.coming
    leaving = ahead + 1 + len(engine.running) - model.seats
    needed = engine.kv.used + request.context.tokens
    needed += sum(sequence.goal for sequence in engine.waiting)
    lacking = needed - model.kv_tokens
    if lacking > 0 and engine.running:
        leaving = max(leaving, round(lacking * len(engine.running) / max(engine.kv.used, 1) + 0.5))
    if leaving <= 0:
        return 0.0
    dues = sorted(engine.dues()) or [1]
    rounds, rest = divmod(leaving - 1, len(dues))
    return step_s * (dues[rest] + rounds * dues[-1])
