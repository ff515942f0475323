"""Fleets: how many units, how fast and how large, in which cells, behind how many gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cellgate.router.nouns import Cell, ServingRole, Unit
from loadtests.gym.nouns import Change, Fleet, Place
from loadtests.gym.sequences import Model

MODEL = Model()
SLOW = replace(MODEL, prefill_tokens_s=3500.0, base_s=0.032, per_sequence_s=0.00048)
SLOW_DECODING = replace(MODEL, base_s=0.032, per_sequence_s=0.00048)
FAST = replace(MODEL, prefill_tokens_s=28_000.0, base_s=0.004, per_sequence_s=0.00006)
ROOMY = replace(MODEL, kv_tokens=1_500_000)
"""KV cache for some 15 agents: they come back after minutes, so it is never enough for all."""
LONG_CONTEXTS = replace(MODEL, per_context_token_s=2e-8, per_pair_s=2.3e-9)
"""What attention takes of a model of 8 billion parameters on one of today's accelerators."""


def fleet(name: str, models: Sequence[Model], gates: int = 1) -> Fleet:
    """Units of which each has a model of its own, all in one cell."""
    return Fleet(name, tuple(Place(model, unit_of(n)) for n, model in enumerate(models)), gates=gates)


def unit_of(number: int, cell: str = "a", weight: float = 1.0, models: tuple[str, ...] = ()) -> Unit:
    """A unit as the gate is told of it."""
    return Unit(f"u{number}", cell, f"http://u{number}", models=models, weight=weight)


def with_roles(name: str, roles: Sequence[ServingRole], model: Model, tokens_s: float) -> Fleet:
    """Units that compute prompts for each other; their links move so many tokens of KV cache a second."""
    units = (replace(unit_of(number), role=role) for number, role in enumerate(roles))
    places = tuple(Place(model, unit) for unit in units)
    return Fleet(name, places, cells=(Cell("a", transfer="nixl"),), transfer_tokens_s=tokens_s)


def _weights() -> Fleet:
    places = [Place(FAST, unit_of(n, weight=2.0)) for n in range(2)]
    return Fleet("weights", (*places, *(Place(MODEL, unit_of(n)) for n in (2, 3))))


def _wrong_weights() -> Fleet:
    """As fast as each other, whatever an operator has believed."""
    weights = enumerate((4.0, 0.5, 1.0))
    return Fleet("wrong_weights", tuple(Place(FAST, unit_of(n, weight=weight)) for n, weight in weights))


def _far() -> Fleet:
    near = [Place(MODEL, unit_of(n)) for n in range(3)]
    far = [Place(MODEL, unit_of(n, "b"), network_s=0.03) for n in (3, 4)]
    return Fleet("far_cell", (*near, *far), cells=(Cell("a"), Cell("b", spill_s=5.0)))


def _two_models() -> Fleet:
    models = (("m",), ("m",), ("n",), ("n",))
    return Fleet("two_models", tuple(Place(MODEL, unit_of(n, models=m)) for n, m in enumerate(models)))


def _short_of_kv() -> Fleet:
    units = fleet("kv_gates", [replace(MODEL, kv_tokens=45_000)] * 4, gates=2)
    return replace(units, changes=(Change(0.3, 2, False), Change(0.6, 2, True)))


_FOUR = fleet("", [MODEL] * 4)

FLEETS: dict[str, Fleet] = {
    each.name: each
    for each in (
        fleet("equal", [MODEL] * 4),
        fleet("two", [MODEL] * 2),
        fleet("forty", [MODEL] * 40),
        fleet("hundred", [MODEL] * 100),
        fleet("slow_unit", [MODEL, MODEL, MODEL, SLOW]),
        fleet("slow_decoding", [MODEL, MODEL, MODEL, SLOW_DECODING]),
        fleet("seats_8", [replace(MODEL, seats=8)] * 4),
        fleet("seats_256", [replace(MODEL, seats=256)] * 4),
        fleet("kv_bound", [replace(MODEL, kv_tokens=45_000)] * 4),
        fleet("long_contexts", [LONG_CONTEXTS] * 4),
        _weights(),
        _wrong_weights(),
        _far(),
        replace(_FOUR, name="joins", joining=frozenset({3}), changes=(Change(0.3, 3, True),)),
        replace(_FOUR, name="dies", changes=(Change(0.3, 2, False), Change(0.6, 2, True))),
        _two_models(),
        fleet("two_gates", [MODEL] * 4, gates=2),
        fleet("four_gates", [MODEL] * 4, gates=4),
        _short_of_kv(),
        fleet("four_gates_12", [MODEL] * 12, gates=4),
        fleet("agents_4", [ROOMY] * 4),
        fleet("agents_16", [ROOMY] * 16),
        fleet("agents_4_gates_4", [ROOMY] * 4, gates=4),
        fleet("agents_16_gates_4", [ROOMY] * 16, gates=4),
        replace(fleet("agents_die", [ROOMY] * 4), changes=(Change(0.3, 2, False), Change(0.6, 2, True))),
    )
}
UNEQUAL = frozenset({"slow_unit", "slow_decoding", "weights"})
"""Fleets whose units differ in speed."""
