"""Where the router sends requests: loads that every fleet has, adapters, sampling, slow start."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf

import pytest

from cellgate.proxy.control.explain import dry_run
from cellgate.router.adapters import EVICT_SHARE, LOAD_S, Adapters
from cellgate.router.backlog import Concurrency
from cellgate.router.board import Board
from cellgate.router.cost import AGAINST_PEERS, Expected, Slots
from cellgate.router.cost_model import SURE, Usage
from cellgate.router.learning import MODELS_MAX, AnswerLengths
from cellgate.router.nouns import Ask, Cell, Load, Models, Refusal, Rules, Unit
from cellgate.router.pick import Bounds, Router, find_candidates
from cellgate.router.queue import ANY, FairRules, Pools, Ticket
from cellgate.router.sampling import LOOK_AT_ALL, RENEWED_S, SAMPLE, SHARE, Sampler
from cellgate.router.unit_state import Lease, UnitState
from tests.unit.router.fleets import board_up, picked, router_over

NOW = 100.0
TOKENS_S = 14_000.0


def unit(name: str, cell: str = "c", models: tuple[str, ...] = ("m",), **rest: float) -> Unit:
    return replace(Unit(name, cell, f"http://{name}:1", models), **rest)  # type: ignore[arg-type]


def router_of(
    *units: Unit, cells: tuple[Cell, ...] = (), rules: FairRules | None = None, is_known: bool = True
) -> Router:
    """Units that are UP, of a known speed, or of which nothing is known but their weights."""
    board = board_up(*units, rules=Rules(slow_start_s=0.001), cells=cells, at=NOW - 5.0)
    for rates in (state.costs.rates for state in board if is_known):
        rates.prefill_tokens_s.guess(TOKENS_S)
        rates.steps.guess(0.008, 0.015)
        rates.followed = SURE
    board.tick(NOW)
    return router_over(board, rules=rules)


unknown = partial(router_of, is_known=False)


def pick(router: Router, ask: Ask, now: float = NOW) -> Lease:
    return picked(router, ask, now)


def serve(router: Router, ask: Ask, now: float, *, first_s: float, took_s: float) -> str:
    """The unit that gets one, which has begun to answer and has answered so much later."""
    lease = pick(router, ask, now)
    lease.commit(now + first_s)
    router.board.close(lease, now + took_s)
    return lease.unit


def served(
    router: Router, times: int, every_s: float, took_s: float = 1.0, *, within_s: float = inf
) -> list[str]:
    """The units that requests get that come one after the other, each with so long a time."""
    units = []
    for number in range(times):
        now = NOW + every_s * number
        lease = pick(router, Ask("m", True, 1000, prompt_bytes=4000, deadline_at=now + within_s), now)
        units.append(lease.unit)
        router.board.close(lease, now + took_s)
    return units


def test_a_beginning_that_all_share_is_computed_on_every_unit_and_not_waited_for_on_one() -> None:
    """Long answers, 16 a second: who charges the beginning to each of them fills two units of four."""
    router = router_of(*(unit(f"u{n}") for n in range(4)))
    router.board.answer_lengths.learn("m", 800)
    for number in range(96):
        now = NOW + number / 16
        # 4,300 tokens that all begin with the same 4,096, and end as no other.
        ask = Ask("m", True, 4300, prompt_bytes=17_200, blocks=(*range(1, 33), 1000 + number))
        lease = pick(router, ask, now)
        lease.commit(now + 0.02)
        router.board.tick(now + 0.03)
    counts = [len(state.leases) for state in router.board]
    assert min(counts) >= 18, counts
    assert max(counts) <= 30, counts


def test_a_beginning_of_ones_own_stays_where_it_is() -> None:
    router = router_of(*(unit(f"u{n}") for n in range(4)))
    router.board.answer_lengths.learn("m", 50)
    turns = [tuple(range(100 * talk, 100 * talk + 40 + turn)) for turn in range(6) for talk in range(8)]
    homes: dict[int, set[str]] = {}
    for number, blocks in enumerate(turns):
        now = NOW + number
        ask = Ask("m", True, 5000, prompt_bytes=512 * len(blocks), blocks=blocks)
        homes.setdefault(blocks[0], set()).add(serve(router, ask, now, first_s=0.1, took_s=0.9))
    assert all(len(units) == 1 for units in homes.values()), homes
    assert len(set.union(*homes.values())) > 1, "and not all on one"


def test_the_seats_of_an_engine_are_learnt_from_what_waits_while_as_many_run() -> None:
    seats = Slots()
    for times, running, waiting, kv_use, limit in (
        # It is computing prompts, and more run each time.
        (1, 3, 9, 0.2, inf),
        (1, 9, 3, 0.2, inf),
        (1, 40, 2, 0.2, inf),
        (2, 64, 5, 0.2, 64),
        # It takes more, after all; it has had more, so those that wait are being computed, or for KV cache.
        (1, 70, 0, 0.2, inf),
        (5, 20, 5, 0.2, inf),
        (5, 64, 5, 0.99, inf),
    ):
        for _ in range(times):
            seats.learn(Load("u", 1.0, running=running, waiting=waiting, kv_use=kv_use))
        assert seats.limit == limit


def test_seats_that_others_of_its_build_have_are_believed_to_be_there_until_many_reports_deny_it() -> None:
    seats, step = Slots(), count()

    def shows(running: int, among: int, progress: float | None = None, waiting: int = 1) -> float:
        at = float(next(step)) if progress is None else progress
        seats.learn(Load("u", 1.0, running=running, waiting=waiting, progress=at), among)
        return seats.limit

    assert [shows(12, 12), shows(12, 12)] == [inf, 12], "by chance"
    assert shows(12, 90, waiting=0) == inf, "others have run more"
    assert {shows(12, 90) for _ in range(AGAINST_PEERS)} == {inf}
    assert shows(12, 90) == 12, "it has fewer, whatever others have"
    assert shows(5, 90, waiting=0) == 12
    assert shows(13, 90) == inf
    seats.reset()
    assert {shows(12, 0, progress=7.0) for _ in range(5)} == {inf}, "one step, seen five times"


def test_a_unit_that_seems_full_by_chance_is_not_while_one_of_its_build_runs_more() -> None:
    router = router_of(*(unit(name) for name in "abcd"))
    board, now = router.board, NOW
    for _ in range(2):
        now += 1.0
        for name in "abcd":
            board.report(Load(name, now, running=12, waiting=int(name == "a"), progress=10.0 * now))
    assert [state.costs.slots.limit for state in board] == [12, inf, inf, inf]
    for name, running in (("b", 20), ("a", 12)):
        board.report(Load(name, now + 1.0, running=running, progress=10.0 * now + 9.0))
    assert [state.costs.slots.limit for state in board] == [inf] * 4


def test_answers_are_as_long_as_those_of_their_model_and_no_longer_than_allowed() -> None:
    answers = AnswerLengths()
    for _ in range(50):
        answers.learn("chat", 800)
        answers.learn("embed", 0)
    assert answers.expected("chat") == 800
    assert answers.expected("chat", limit=16) == 16
    assert answers.expected("embed") == 1
    assert 300 < answers.expected("never seen") < 500
    for number in range(2 * MODELS_MAX):
        answers.learn(f"model-{number}", 10)
    assert answers.expected("chat") == 800
    assert len(answers._means) <= MODELS_MAX


def slow(router: Router, name: str, tokens_s: float, step_s: float) -> None:
    """All units are measured, and this one is slower than what was guessed of all."""
    for state in router.board:
        state.costs.rates.prefill_tokens_s.seen = state.costs.rates.steps.base.seen = 10
    rates = router.board.units[name].costs.rates
    rates.prefill_tokens_s.value = tokens_s
    rates.steps.base.value = step_s
    router.board.update_costs(NOW)


def test_trying_a_slower_unit_costs_a_small_share_of_what_all_wait() -> None:
    """At a low rate every unit is idle; by the clock alone the slow one would get as many as the others."""
    router = router_of(*(unit(f"u{n}") for n in range(4)))
    slow(router, "u3", TOKENS_S / 4, 0.032)
    assert 0 < served(router, 400, 5.0).count("u3") <= 400 * SHARE
    # The cheaper one of two does not take all of that share: the other is tried as well, in its turn.
    router = router_of(*(unit(f"u{n}") for n in range(3)))
    slow(router, "u1", TOKENS_S / 2, 0.012)
    slow(router, "u2", TOKENS_S / 4, 0.032)
    tried = Counter(served(router, 800, 5.0))
    assert tried["u1"] > tried["u2"] > 0


def test_nobody_waits_for_the_unit_that_seems_best_while_an_idle_one_is_worth_a_try() -> None:
    router = router_of(unit("a"), unit("b"))
    slow(router, "b", TOKENS_S / 20, 0.2)
    ask = Ask("m", True, 1000, prompt_bytes=4000)
    while isinstance(router.pick(ask._replace(unit="a"), NOW + 5.0), Lease):
        pass
    assert router.pick(ask, NOW + 5.01) is Refusal.FULL, "b answers later"
    router._explorer.budget_s = 60.0
    assert pick(router, ask, NOW + 5.02).unit == "b"


def test_a_slower_unit_is_tried_but_not_with_a_session_that_would_stay_if_it_were_fast() -> None:
    """To compute a long prompt again costs more than all that can be learnt by it."""
    router, went = router_of(*(unit(f"u{n}") for n in range(3))), Counter[str]()
    slow(router, "u0", TOKENS_S / 2.5, 0.012)
    for turn in range(80):
        # Of two sessions that were begun on u1 and u2, while u0 has nothing to do.
        for number in (1, 2):
            now = NOW + 3.0 * turn + number
            blocks = tuple(range(1000 * number, 1000 * number + 16 + turn // 8))
            ask = Ask("m", True, 128 * len(blocks), prompt_bytes=512 * len(blocks), blocks=blocks)
            ask = ask if turn else ask._replace(unit=f"u{number}")
            went[serve(router, ask, now, first_s=0.1, took_s=0.5)] += 1
    assert went == {"u1": 80, "u2": 80}
    assert router._explorer.budget_s > 2.0, "more than a prompt is worth"
    assert pick(router, Ask("m", True, 1000, prompt_bytes=4000), NOW + 300.0).unit == "u0"


def test_a_cold_unit_gets_one_that_begins_as_many_do_and_then_its_share_of_them() -> None:
    """The others hold that beginning, and would serve all of them a little sooner."""
    router, went, common = router_of(*(unit(f"u{n}") for n in range(3))), [], tuple(range(20))
    router._explorer.budget_s = 1.0
    for number in range(60):
        now = NOW + 3.0 * number
        blocks = (*common, 1000 * number + 1000)
        ask = Ask("m", True, 2688, prompt_bytes=512 * 21, blocks=blocks)
        ask = ask if number > 40 else ask._replace(unit=f"u{number % 2}")
        went.append(serve(router, ask, now, first_s=0.02, took_s=0.5))
    assert went[41] == "u2"
    assert 3 <= went[42:].count("u2") <= 12


def test_a_cold_unit_gets_the_next_one_however_soon_it_comes_after_another_prompt() -> None:
    router, common = router_of(*(unit(f"u{n}") for n in range(3))), tuple(range(20))
    router._explorer.budget_s = 1.0

    def goes_to(own: int, now: float, unit: str | None = None) -> str:
        ask = Ask("m", True, 2688, prompt_bytes=512 * 21, blocks=(*common, own), unit=unit)
        return serve(router, ask, now, first_s=0.02, took_s=0.5)

    for number in range(40):
        goes_to(1000 * number + 1000, NOW + 3.0 * number, f"u{number % 2}")
    assert goes_to(1000, NOW + 120.0) == "u0", "it holds all of it"
    assert goes_to(99_999, NOW + 120.01) == "u2"


@pytest.mark.parametrize(("shared", "budget_s"), [(20, 0.0), (19, 1.0)])
def test_a_cold_unit_gets_nothing_that_is_dearer_than_what_was_saved_or_that_nobody_will_ask_for_again(
    shared: int, budget_s: float
) -> None:
    router = router_of(*(unit(f"u{n}") for n in range(3)))
    for number in range(20):
        blocks = (
            (*range(20), 1000 + number) if shared == 20 else tuple(range(100 * number, 100 * number + 21))
        )
        ask = Ask("m", True, 2688, prompt_bytes=512 * 21, blocks=blocks)
        serve(router, ask._replace(unit=f"u{number % 2}"), NOW + 3.0 * number, first_s=0.02, took_s=0.5)
    router._explorer.budget_s = budget_s
    again = blocks if shared == 19 else (*range(20), 9)
    assert pick(router, ask._replace(blocks=again), NOW + 63.0).unit != "u2"


def test_a_unit_that_seems_slow_for_its_weight_is_tried_at_once_and_once_unless_it_is_known_to_be() -> None:
    """The budget would allow it after some hundred requests."""
    tried = served(unknown(unit("a", weight=4.0), unit("b", weight=0.25)), 100, 0.5, 0.1)
    assert tried.count("b") == 1
    assert "b" in tried[:2]
    router = unknown(unit("a", weight=4.0), unit("b", weight=0.25))
    slow(router, "b", TOKENS_S / 20, 0.2)
    router.board.units["b"].last_lease_at = NOW - 3.0
    assert "b" not in served(router, 50, 0.5, 0.1)


def test_equal_units_of_whatever_weight_get_equal_shares_once_they_were_measured() -> None:
    router = unknown(*(unit(f"u{n}", weight=weight) for n, weight in enumerate((4.0, 0.5, 1.0))))
    for state in router.board:
        for _ in range(20):
            state.costs.rates.prefilled(4096, 4096 / TOKENS_S)
            state.costs.rates.steps.learn(0.008, 8.0)
    router.board.tick(NOW + 2.0)
    for number in range(60):
        pick(router, Ask("m", True, 100, prompt_bytes=400), NOW + 2.0 + 0.001 * number)
    assert all(18 <= state.in_flight <= 22 for state in router.board), [s.in_flight for s in router.board]


def test_steps_are_learnt_from_gaps_before_the_first_answers_end() -> None:
    router = unknown(unit("a", weight=4.0), unit("b"))
    a, b = flowing(router)
    assert a.costs.rates.steps.seen == b.costs.rates.steps.seen == 1
    assert a.costs.cost_terms.step_s == b.costs.cost_terms.step_s
    router.board.tick(NOW + 3.0)
    assert a.costs.rates.steps.seen == 1, "only the last look counts"
    a.costs.streamed(100, 1.0, Concurrency(1.0))
    assert a.costs.rates.steps.at(1.0) == pytest.approx(0.01), "streams that end say it better"


def test_events_of_several_tokens_are_not_taken_for_tokens_once_one_stream_has_told_its_usage() -> None:
    """One of two equal units seemed eight times slower: its streams were the longer ones."""
    router = unknown(unit("a"), unit("b"))
    a, b = flowing(router)
    a.costs.streamed(800, 800 * 0.0195 / 8, Concurrency(1.0))
    a.costs.rates.streamed(100, 800)
    router.board.tick(NOW + 3.0)
    router.board.tick(NOW + 4.5)
    assert b.costs.rates.steps.at(1.0) == pytest.approx(0.0195 / 8, rel=0.05)
    assert a.costs.cost_terms.step_s == pytest.approx(b.costs.cost_terms.step_s, rel=0.01)


def flowing(router: Router) -> list[UnitState]:
    """The units, each with a stream that flows, an event in 19.5 ms."""
    for state in router.board:
        lease = router.board.open(state.unit.name, Ask("m", True, 100, prompt_bytes=400), NOW, retry=False)
        lease.commit(NOW + 0.01)
    router.board.tick(NOW + 0.5)
    for state in router.board:
        state.gaps_ms[19] += 200
        state.batch = 1.0
    router.board.tick(NOW + 1.5)
    return list(router.board)


def plain_answers(router: Router, name: str, took_s: float, tokens: int, count: int = 30) -> None:
    """Plain answers of a unit, one after the other."""
    state = router.board.units[name]
    for number in range(count):
        now = NOW + 10.0 * number
        ask = Ask("m", False, 1000, prompt_bytes=4000, max_tokens=max(tokens, 1))
        lease = router.board.open(name, ask, now, retry=False)
        router.board.tick(now + 0.5 * took_s)
        lease.commit(now + took_s)
        router.board.close(lease, now + took_s)
        state.costs.last_plain = lease, Usage(1000, tokens), now + took_s
        other = router.board.open(name, ask, now + took_s, retry=False)
        router.board.tick(now + took_s + 0.01)
        router.board.close(other, now + took_s + 0.01)


def test_plain_answers_of_one_token_show_that_a_weight_is_wrong() -> None:
    router = unknown(unit("a", weight=4.0), unit("b"))
    a, b = router.board.units.values()
    assert a.costs.cost_terms.tokens_s == 4.0 * b.costs.cost_terms.tokens_s
    for name in ("a", "b"):
        plain_answers(router, name, took_s=0.08, tokens=0)
    router.board.update_costs(NOW + 1000.0)
    assert a.costs.cost_terms.tokens_s == b.costs.cost_terms.tokens_s
    assert a.costs.cost_terms.step_s == b.costs.cost_terms.step_s


def test_plain_answers_teach_steps_as_long_as_no_stream_does_and_few_tokens_teach_nothing() -> None:
    router = unknown(unit("a"), unit("b"), unit("c"))
    a, b, c = router.board.units.values()
    a.costs.rates.followed = SURE
    for name in ("a", "b"):
        plain_answers(router, name, took_s=10.0, tokens=200)
    assert not a.costs.rates.steps.seen
    assert b.costs.rates.steps.at(1.0) == pytest.approx(10.0 / 200, rel=0.1)
    for usage in (None, Usage(1000, 3)):
        lease = router.board.open("c", Ask("m", False, 1000, prompt_bytes=4000), NOW, retry=False)
        lease.commit(NOW + 1.0)
        router.board.close(lease, NOW + 1.0)
        c.costs.last_plain = lease, usage, NOW + 1.0
        c.costs.learn_plain()
        assert c.costs.last_plain is None
    assert not c.costs.rates.steps.seen
    assert not c.costs.rates.plain_tokens_s.seen


def test_long_plain_answers_are_no_queue_of_prompts_while_nobody_knows_how_fast_these_are_computed() -> None:
    router = unknown(unit("a"), unit("b"))
    _, b = router.board.units.values()
    for name in ("a", "b"):
        plain_answers(router, name, took_s=10.0, tokens=1000)
    ask, now = Ask("m", False, 1000, prompt_bytes=4000), NOW + 1000.0

    def queued_at(name: str, ask: Ask, answer_tokens: float) -> int:
        backlog = router.board.units[name].costs.backlog
        before = backlog.queued
        router.board.open(name, ask, now, retry=False, expected=Expected(answer_tokens))
        return backlog.queued - before

    assert queued_at("a", ask, 1000.0) == 0
    assert queued_at("a", ask, 1.0) == 1, "a queue of prompts is all that a unit of embeddings has"
    assert queued_at("a", ask._replace(stream=True), 1000.0) == 1
    b.costs.rates.followed = SURE
    router.board.update_costs(now)
    assert queued_at("b", ask, 1000.0) == 1


def test_no_unit_of_another_cell_is_tried_nor_one_that_cannot_make_a_deadline() -> None:
    cells = (Cell("near"), Cell("far", spill_s=5.0))
    assert set(served(router_of(unit("a", "near"), unit("b", "far"), cells=cells), 100, 10.0)) == {"a"}
    router = router_of(unit("fast"), unit("slow"))
    slow(router, "slow", TOKENS_S / 400, 0.008)
    assert set(served(router, 240, 5.0, 0.5, within_s=1.0)) == {"fast"}


def test_the_few_idle_units_of_a_hundred_are_found_before_anybody_is_refused() -> None:
    router = router_of(*(unit(f"u{n}", max_in_flight=64) for n in range(100)))
    for number in range(94):
        for _ in range(6):
            router.board.open(f"u{number}", Ask("m", True, 20_000, prompt_bytes=80_000), NOW, retry=False)
    router.board.tick(NOW + 0.1)
    for _ in range(50):
        ask = Ask("m", True, 1000, prompt_bytes=4000, deadline_at=NOW + 2.1)
        lease = pick(router, ask, NOW + 0.1)
        assert int(lease.unit[1:]) >= 94
        router.board.close(lease, NOW + 0.1)


def test_what_waits_for_one_model_keeps_nobody_waiting_for_another() -> None:
    rules = FairRules(limit=4, max_wait_s=5.0)
    router = router_of(unit("a", max_in_flight=1), unit("b", models=("n",)), rules=rules)
    pick(router, Ask("m"))
    for _ in range(4):
        assert router.pick(Ask("m"), NOW) is Refusal.FULL
        assert not isinstance(router.wait(Ask("m", prompt_tokens=10**6), NOW, frozenset(), print), Lease)
    assert router.drain_s("m") > router.drain_s("n") == 0.0
    assert {pick(router, Ask("n")).unit for _ in range(20)} == {"b"}
    # Nor is anybody turned away for whom there is room while nobody may wait.
    router = router_of(unit("a"), unit("b", max_in_flight=1), rules=FairRules(limit=0))
    assert isinstance(router.wait(Ask("m"), NOW, frozenset(), print), Lease)
    assert isinstance(router.wait(Ask("m"), NOW, frozenset(), print, must_wait=True), Refusal)


def test_what_a_unit_has_refused_as_full_waits_no_longer_in_all_than_any_other() -> None:
    router = router_of(unit("a", max_in_flight=1), rules=FairRules(max_wait_s=60.0))
    pick(router, Ask("m"))
    first = router.wait(Ask("m"), NOW, frozenset(), print)
    again = router.wait(Ask("m"), NOW + 50.0, frozenset(), print, must_wait=True, waited_s=45.0)
    assert isinstance(first, Ticket)
    assert isinstance(again, Ticket)
    assert first.expires_at == NOW + 60.0
    assert again.expires_at == NOW + 65.0


def test_pools_are_units_that_serve_models_in_common() -> None:
    pools = Pools([("a", frozenset("xy")), ("b", frozenset("z")), ("c", frozenset("y"))])
    assert pools.of("x") == pools.of("y") == "a"
    assert pools.of("z") == "b"
    assert (pools.of(None), pools.of("?")) == (ANY, ANY)
    assert (pools.has("a", "c"), pools.has("a", "b"), pools.has(ANY, "b")) == (True, False, True)
    joined = Pools([("a", frozenset("x")), ("b", frozenset("z")), ("c", frozenset())])
    assert joined.of("x") == joined.of("z") == joined.of("?") == joined.of(None)


def test_the_pools_of_a_fleet_are_found_when_one_is_asked_for() -> None:
    units = iter([("a", frozenset("x")), ("b", frozenset("z"))])
    pools = Pools(units)
    assert next(units)[0] == "a"
    assert (pools.of("z"), pools.of_unit("a")) == ("b", ANY)


def test_retries_that_wait_draw_on_the_budget() -> None:
    router = router_of(unit("a", max_in_flight=1))
    lease = pick(router, Ask("m"))
    told: list[Lease | Refusal] = []
    tickets = [router.wait(Ask("m"), NOW, frozenset(), told.append, retry=True) for _ in range(3)]
    assert router.queue.retries == 3
    assert isinstance(tickets[0], Ticket)
    router.queue.remove(tickets[0])
    assert router.queue.retries == 2
    router.board.close(lease, NOW + 0.1)
    router.serve_waiting(NOW + 0.1)
    assert (router.queue.retries, router.board.retries_in_flight) == (1, 1)


# LoRA adapters: which unit a request for one goes to, and what loading it costs.

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


def adapter_router(*listed: tuple[str, ...]) -> Router:
    """Units that are UP and list the base model and these adapters."""
    units = (Unit(f"u{n}", "c", f"http://u{n}:1") for n in range(len(listed)))
    board = board_up(*units, rules=Rules(slow_start_s=0.001), at=NOW - 5.0)
    for name, names in zip(board.units, listed, strict=True):
        board.set_models(Models(name, ("base", *names), NOW, dict.fromkeys(names, "base")))
        board.report(Load(name, NOW, adapter_places=2))
    board.tick(NOW)
    return router_over(board)


def pick_for(router: Router, model: str) -> Lease:
    return pick(router, Ask(model, True, 100, prompt_bytes=400))


@pytest.mark.parametrize(
    ("used", "model", "seconds"),
    [
        ("", "base", 0.0),
        ("", "poet", LOAD_S),
        ("poet", "poet", 0.0),
        ("poet", "clerk", LOAD_S),
        ("poet clerk", "poet", 0.0),
        ("poet clerk", "cook", LOAD_S * (1 + EVICT_SHARE)),
        # The one that was not used for longest has made room for the last.
        ("poet clerk cook", "poet", LOAD_S * (1 + EVICT_SHARE)),
        ("poet clerk poet cook", "poet", 0.0),
    ],
)
def test_loading_an_adapter_costs_and_replacing_one_costs_more(used: str, model: str, seconds: float) -> None:
    assert adapters(*used.split()).cost_s(model, ANSWER_S) == seconds


def test_adapters_that_requests_of_others_use_are_loaded() -> None:
    """A report without requests of others shows only what the gate knows better."""
    for has_foreign in (True, False):
        unit = adapters("poet", "clerk")
        unit.report(frozenset({"poet", "clerk"}), 2, has_foreign=has_foreign)
        assert unit.cost_s("poet", ANSWER_S) == 0.0
        assert unit.cost_s("cook", ANSWER_S) == LOAD_S * (1 + EVICT_SHARE) + ANSWER_S * has_foreign


def test_who_needs_a_place_that_requests_keep_waits_as_long_as_an_answer_takes() -> None:
    unit = adapters()
    for name in ("poet", "poet", "clerk"):
        unit.open(name)
    for wait_s in (ANSWER_S, ANSWER_S, 0.0):
        assert unit.cost_s("cook", ANSWER_S) == LOAD_S * (1 + EVICT_SHARE) + wait_s
        unit.close("poet")


def test_an_adapter_that_is_not_listed_any_more_is_not_loaded_and_none_is_after_a_restart() -> None:
    unit = adapters("poet", "clerk")
    unit.set_bases({"clerk": "base", "cook": "base"})
    assert unit.loaded() == ["clerk"]
    unit.forget()
    assert unit.cost_s("clerk", ANSWER_S) == LOAD_S


def test_requests_of_one_adapter_stay_together_until_the_queue_is_worth_a_load() -> None:
    router = adapter_router(("poet", "clerk"), ("poet", "clerk"))
    first = pick_for(router, "poet").unit
    other = ({"u0", "u1"} - {first}).pop()
    assert {pick_for(router, "poet").unit for _ in range(8)} == {first}
    assert router.board.units[first].adapters.loaded() == ["poet"]
    found = dry_run(router, Ask("poet", True, 100, prompt_bytes=400), NOW, random.Random(1))
    assert {each.unit_state.unit.name: each.adapter_s for each in found.units} == {first: 0.0, other: LOAD_S}
    router.board.answer_lengths.learn("poet", 400)
    assert other in {pick_for(router, "poet").unit for _ in range(64)}


def test_an_adapter_is_asked_of_the_units_that_list_it_only_and_all_of_one_base_are_peers() -> None:
    router = adapter_router((), ("poet",))
    assert {pick_for(router, "poet").unit for _ in range(4)} == {"u1"}
    assert {pick_for(router, "base").unit for _ in range(8)} == {"u0", "u1"}
    assert router.pick(Ask("singer"), NOW) is Refusal.UNKNOWN_MODEL
    assert {state.base_models() for state in router.board} == {frozenset({"base"})}


# Which units are looked at where there are many, and what that costs.


def board_of(count: int) -> Board:
    """Units that are UP and serve m; every fifth serves rare as well."""
    units = (unit(f"u{n}", models=("m", "rare") if n % 5 == 0 else ("m",)) for n in range(count))
    return board_up(*units, rules=Rules(slow_start_s=0.001))


def test_of_many_units_a_few_are_drawn_and_never_the_same() -> None:
    def drawn(ask: Ask, times: int) -> Counter[str]:
        return Counter(name for _ in range(times) for name in sampler.of(ask, NOW) or ())

    few = board_of(LOOK_AT_ALL)
    assert Sampler(few, random.Random(1)).of(Ask("m"), NOW) is None
    sampler = Sampler(board_of(500), random.Random(1))
    found = drawn(Ask("m"), 500)
    assert sum(found.values()) == 500 * SAMPLE
    assert len(found) == 500
    assert max(found.values()) < 5 * SAMPLE
    assert all(int(name[1:]) % 5 == 0 for name in drawn(Ask("rare"), 50))
    assert sampler.of(Ask("m", unit="u7"), NOW) == ("u7",)
    sampler.record(Ask("m", blocks=(1, 2, 3)), "u77")
    sampler.record(Ask("m", blocks=(1, 9)), "u78")
    assert drawn(Ask("m", blocks=(1, 2, 3, 4, 5)), 20)["u77"] == 20


def test_units_that_come_up_are_drawn_soon() -> None:
    board = board_of(500)
    sampler = Sampler(board, random.Random(1))
    for now, drained, least, most in ((NOW, True, 1, 30), (NOW + RENEWED_S, False, 401, 500)):
        for number in range(30, 500):
            board.drain(f"u{number}", drained=drained)
        drawn = {name for _ in range(99) for name in sampler.of(Ask("m"), now) or ()}
        assert least <= len(drawn) <= most


@pytest.mark.alone
def test_load_spreads_over_five_hundred_units_and_a_pick_is_cheap() -> None:
    board = board_of(500)
    router = router_over(board)
    asks = [Ask("m", stream=True, prompt_bytes=2000, blocks=(n, n + 1)) for n in range(1000)]
    began_s = time.process_time()
    leases = [router.pick(ask, NOW) for ask in asks]
    pick_us = 1e6 * (time.process_time() - began_s) / len(asks)
    print(f"a pick among 500 units: {pick_us:.0f} us of CPU")
    assert all(isinstance(lease, Lease) for lease in leases)
    # By chance alone the fullest of 500 units would have 8 or 9 of 1000 requests.
    assert max(state.in_flight for state in board) <= 4
    # The budget is 150 us on a machine of its own.
    assert pick_us < 1000.0


# Which requests a unit gets that has just come up.


def test_one_that_has_just_come_up_gets_one_request_at_a_time_and_more_by_chance() -> None:
    """While it cools off, by chance only."""
    board, ask = board_up(*map(unit, "abc")), Ask("m", stream=True, prompt_tokens=100, prompt_bytes=400)
    board.units["c"].up_since = 1000.0
    board.tick(1000.0)

    def considered(sent: str = "") -> set[str]:
        """Who is a candidate then for an ask to which chance gives no unit in slow start."""
        if sent:
            board.open(sent, ask, 1000.0, retry=False)
        found = find_candidates(board, ask, 1000.0, (), Bounds(backlog_s=10.0), chance=0.99)
        return {row.unit for row in found.rows}

    assert considered() == {"a", "b", "c"}
    board.units["c"].cool_until = 1001.0
    assert considered() == {"a", "b"}
    board.units["c"].cool_until = 0.0
    assert considered("c") == {"a", "b"}
