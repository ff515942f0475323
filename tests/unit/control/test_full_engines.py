"""Engines that are full are named, with the reason; bursts are not."""

from __future__ import annotations

from cellgate.proxy.control.full_engines import FullEngines
from cellgate.proxy.ingress.reasons import shortcomings
from cellgate.proxy.observe.events import Action
from cellgate.router.nouns import Case, Cell, Load, Unit, Verdict
from cellgate.router.unit_state import UnitState


def state() -> UnitState:
    return UnitState(Unit("a1", "a", "http://a:1", max_in_flight=64), Cell("a"), Case(Verdict.UP, 0.0))


def test_a_full_cache_is_an_event_once_and_its_end_another() -> None:
    told: list[Action] = []
    engines, a1 = FullEngines(told.append), state()
    uses = [1.0] * 4 + [0.5] + [0.99] * 20 + [0.96, 0.99, 0.96] + [0.9] * 3
    for second, use in enumerate(uses):
        engines.look(a1, Load("a1", float(second), running=8, waiting=3, kv_use=use))
    assert [(each.kind, each.detail) for each in told] == [
        ("kv_full", "a1, 99% for 10 s; 8 requests run and 3 wait inside"),
        ("kv_full_over", "a1"),
    ]


def test_requests_that_wait_inside_are_a_reason_where_the_gate_could_hold_them() -> None:
    engines, a1 = FullEngines(lambda _action: None), state()
    for second in range(12):
        engines.look(a1, Load("a1", float(second), running=4, waiting=6))
    (only,) = shortcomings(a1)
    assert only.sentence == "6 requests wait inside its engine, which runs 4 at once; its max_in_flight is 64"
    engines.look(a1, Load("a1", 12.0, running=4, waiting=0))
    assert not shortcomings(a1)


def test_a_burst_and_requests_that_the_gate_cannot_hold_are_none() -> None:
    engines, burst, others = FullEngines(lambda _action: None), state(), state()
    for second in range(40):
        engines.look(burst, Load("a1", float(second), running=4, waiting=int(second % 10 < 8)))
        engines.look(others, Load("b1", float(second), running=64, waiting=9))
    assert not shortcomings(burst)
    assert not shortcomings(others)
