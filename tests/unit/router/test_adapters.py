"""LoRA adapters: which unit a request for one goes to, and what loading it costs."""

from __future__ import annotations

import random

import pytest

from cellgate.policies import POLICIES
from cellgate.proxy.control.explain import dry_run
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Evidence, Fleet, Load, Models, Refusal, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.queue import FairRules, Queue
from cellgate.router.unit_state import EVICT_SHARE, LOAD_S, Adapters, Lease

NOW = 100.0
ANSWER_S = 4.0
BASES = {"poet": "base", "clerk": "base", "cook": "base"}


def adapters(*used: str, places: int = 2) -> Adapters:
    """A unit that has served requests for these adapters, one after another."""
    made = Adapters()
    made.set_bases(BASES)
    made.report(frozenset(), places, has_foreign=False)
    for name in used:
        made.open(name)
        made.close(name)
    return made


def router_of(*listed: tuple[str, ...]) -> Router:
    """Units that are UP and list the base model and these adapters."""
    board = Board(Rules(slow_start_s=0.001))
    units = tuple(Unit(f"u{n}", "c", f"http://u{n}:1") for n in range(len(listed)))
    board.configure(Fleet(units=units), NOW - 10.0)
    for unit, names in zip(units, listed, strict=True):
        board.observe(Evidence(unit.name, Sign.GOOD, Strength.STRONG, "canary", "", NOW - 5.0))
        board.set_models(Models(unit.name, ("base", *names), NOW, dict.fromkeys(names, "base")))
        board.report(Load(unit.name, NOW, adapter_places=2))
    board.tick(NOW)
    return Router(board, POLICIES["prefix_affinity"](), random.Random(1), Queue(FairRules()))


def pick(router: Router, model: str) -> Lease:
    lease = router.pick(Ask(model, True, 100, prompt_bytes=400), NOW)
    assert isinstance(lease, Lease), lease
    return lease


@pytest.mark.parametrize(
    ("used", "model", "seconds"),
    [
        ((), "base", 0.0),
        ((), "poet", LOAD_S),
        (("poet",), "poet", 0.0),
        (("poet",), "clerk", LOAD_S),
        (("poet", "clerk"), "poet", 0.0),
        (("poet", "clerk"), "cook", LOAD_S * (1 + EVICT_SHARE)),
        # The one that was not used for longest has made room for the last.
        (("poet", "clerk", "cook"), "poet", LOAD_S * (1 + EVICT_SHARE)),
        (("poet", "clerk", "poet", "cook"), "poet", 0.0),
    ],
)
def test_loading_an_adapter_costs_and_replacing_another_costs_more(
    used: tuple[str, ...], model: str, seconds: float
) -> None:
    assert adapters(*used).cost_s(model, ANSWER_S) == seconds


def test_who_needs_a_place_that_requests_keep_waits_as_long_as_an_answer_takes() -> None:
    unit = adapters()
    for name in ("poet", "poet", "clerk"):
        unit.open(name)
    assert unit.cost_s("cook", ANSWER_S) == LOAD_S * (1 + EVICT_SHARE) + ANSWER_S
    unit.close("poet")
    assert unit.cost_s("cook", ANSWER_S) == LOAD_S * (1 + EVICT_SHARE) + ANSWER_S
    unit.close("poet")
    assert unit.cost_s("cook", ANSWER_S) == LOAD_S * (1 + EVICT_SHARE)


def test_adapters_that_requests_of_others_use_are_loaded() -> None:
    unit = adapters()
    unit.report(frozenset({"poet", "clerk"}), 2, has_foreign=True)
    assert unit.cost_s("poet", ANSWER_S) == 0.0
    assert unit.cost_s("cook", ANSWER_S) == LOAD_S * (1 + EVICT_SHARE) + ANSWER_S


def test_a_report_without_requests_of_others_shows_only_what_the_gate_knows_better() -> None:
    unit = adapters("poet", "clerk")
    unit.report(frozenset({"poet", "clerk"}), 2, has_foreign=False)
    assert unit.cost_s("cook", ANSWER_S) == LOAD_S * (1 + EVICT_SHARE)


def test_nothing_is_loaded_after_a_restart() -> None:
    unit = adapters("poet")
    unit.forget()
    assert unit.cost_s("poet", ANSWER_S) == LOAD_S


def test_an_adapter_that_is_not_listed_any_more_is_not_loaded() -> None:
    unit = adapters("poet", "clerk")
    unit.set_bases({"clerk": "base", "cook": "base"})
    assert unit.loaded() == ["clerk"]


def test_requests_of_one_adapter_stay_together_and_those_of_another_go_elsewhere() -> None:
    router = router_of(("poet", "clerk"), ("poet", "clerk"))
    first = pick(router, "poet")
    assert {pick(router, "poet").unit for _ in range(8)} == {first.unit}
    assert router.board.units[first.unit].adapters.loaded() == ["poet"]


def test_a_load_is_worth_it_where_the_queue_is_long() -> None:
    """The adapter is loaded on one unit, which has many requests: the other one loads it, too."""
    router = router_of(("poet",), ("poet",))
    router.board.answer_lengths.learn("poet", 400)
    assert {pick(router, "poet").unit for _ in range(64)} == {"u0", "u1"}


def test_an_adapter_is_asked_of_the_units_that_list_it_only() -> None:
    router = router_of((), ("poet",))
    assert {pick(router, "poet").unit for _ in range(4)} == {"u1"}
    assert {pick(router, "base").unit for _ in range(8)} == {"u0", "u1"}
    assert router.pick(Ask("singer"), NOW) is Refusal.UNKNOWN_MODEL


def test_an_explanation_says_what_the_adapter_costs() -> None:
    router = router_of(("poet",), ("poet",))
    loaded = pick(router, "poet").unit
    found = dry_run(router, Ask("poet", True, 100, prompt_bytes=400), NOW, random.Random(1))
    assert {each.unit_state.unit.name: each.adapter_s for each in found.units} == {
        loaded: 0.0,
        ({"u0", "u1"} - {loaded}).pop(): LOAD_S,
    }


def test_units_of_one_base_model_are_peers_whatever_adapters_they_list() -> None:
    router = router_of(("poet",), ("clerk",))
    assert {state.base_models() for state in router.board} == {frozenset({"base"})}
