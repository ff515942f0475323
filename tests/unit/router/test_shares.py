"""Slots are shared by those who pay: alone all of them, beside others a share, by whatever names."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.router.backlog import Abandoned
from cellgate.router.cost_model import BLOCK_BYTES, SURE
from cellgate.router.nouns import Ask, Refusal, Rules, Unit
from cellgate.router.queue import FairQueue, FairRules
from cellgate.router.shares import LONG_BYTES, PLAIN_S, UNREAD_BYTES, left_to_read
from cellgate.router.unit_state import Lease
from tests.unit.router.fleets import board_up, router_over

SLOTS = 8
HOG, OTHER, THIRD = "address 192.0.2.1", "address 192.0.2.2", "address 192.0.2.3"


class World:
    """Two units of `SLOTS` slots; `log` has who was served, in order."""

    def __init__(self, limit: int = 1024, policy: str = "least_load") -> None:
        units = (Unit(name, "c", f"http://{name}", max_in_flight=SLOTS) for name in "ab")
        self.board = board_up(*units, rules=Rules(slow_start_s=0.0))
        self.router = router_over(self.board, policy, FairRules(limit=limit))
        self.now = 1.0
        self.open: list[Lease] = []
        self.log: list[str] = []
        self.refused: list[tuple[str, Refusal]] = []

    def ask(self, payer: str, *, tokens: int = 25, **more: Any) -> None:
        ask = Ask(stream=True, payer=payer, prompt_bytes=4 * tokens, prompt_tokens=tokens)._replace(**more)

        def told(found: Lease | Refusal) -> None:
            if isinstance(found, Lease):
                self.log.append(payer)
                self.open.append(found)
            else:
                self.refused.append((payer, found))

        found: object = self.router.pick(ask, self.now)
        if found is Refusal.FULL:
            found = self.router.wait(ask, self.now, frozenset(), told, must_wait=True)
        if isinstance(found, Lease | Refusal):
            told(found)

    def asked(self, payer: str, *, tokens: int = 25) -> Lease:
        """The lease that it gets in this turn."""
        before = len(self.open)
        self.ask(payer, tokens=tokens)
        self.router.serve_waiting(self.now)
        (found,) = self.open[before:]
        assert found.ask.payer == payer
        return found

    def leave(self, lease: Lease) -> None:
        """The client of a prompt that was not answered leaves."""
        self.open.remove(lease)
        left = Abandoned(lease.opened_at, self.now, lease.ask.payer, left_to_read(lease))
        lease.unit_state.unread.leave(left)
        self.board.close(lease, self.now)

    def end_one(self, payer: str) -> None:
        """One of its leases ends, and is used for whoever waits."""
        self.now += 0.1
        lease = next(lease for lease in self.open if lease.ask.payer == payer)
        self.open.remove(lease)
        self.board.close(lease, self.now)
        self.router.serve_waiting(self.now)

    def held(self, payer: str) -> int:
        return sum(lease.ask.payer == payer for lease in self.open)


def test_alone_anybody_may_have_everything_and_beside_it_others_go_above_the_limits_up_to_a_bound() -> None:
    here = World()
    for _ in range(3 * SLOTS):
        here.ask(HOG)
    assert here.held(HOG) == 2 * SLOTS
    here.end_one(HOG)
    assert here.held(HOG) == 2 * SLOTS
    for _ in range(SLOTS):
        here.now += 0.1
        here.ask(OTHER)
    assert (here.held(HOG), here.held(OTHER)) == (2 * SLOTS, SLOTS // 2)


def test_while_others_wait_a_hog_gets_nothing_more_whatever_it_calls_itself() -> None:
    here = World()
    for number in range(4 * SLOTS):
        here.ask(HOG, tenant=f"t{number}", priority=-100)
    for _ in range(2 * SLOTS):
        here.now += 0.1
        here.ask(OTHER)
    before = len(here.log)
    # What it holds beyond its share is not given to it again, until both hold as much.
    for _ in range(SLOTS):
        here.end_one(HOG)
    assert set(here.log[before:]) <= {OTHER}
    assert here.held(HOG) == SLOTS
    for _ in range(10):
        here.end_one(HOG)
        here.end_one(OTHER)
    assert abs(here.held(HOG) - here.held(OTHER)) <= SLOTS


def measured(tokens_s: float = 10_000.0) -> World:
    """A world whose units have shown how fast they compute prompts."""
    here = World()
    for state in here.board:
        state.costs.rates.prefill_tokens_s.learn(tokens_s)
        state.costs.rates.followed = SURE
    here.board.tick(2.0)
    return here


def test_nobody_waits_for_what_the_prompts_of_another_one_claim_up_to_a_share() -> None:
    here = measured()
    for tokens in [100_000] * 8 + [25]:
        here.ask(HOG, tokens=tokens)
    assert here.held(HOG) == 2, "alone one's own prompts wait for one's own"
    for _ in range(4):
        here.now += 0.1
        here.ask(OTHER)
    assert here.held(OTHER) == 4
    # Who claims as much waits, as the one that was first does for more.
    here.ask(THIRD, tokens=100_000)
    assert (here.held(HOG), here.held(THIRD)) == (2, 0)
    here = measured()
    for _ in range(2):
        here.ask(HOG, tokens=10_000)
    here.ask(OTHER, tokens=15_000)
    assert here.held(OTHER) == 0
    here.ask(THIRD, tokens=5_000)
    assert here.held(THIRD) == 1


@pytest.mark.parametrize("payer", ["address 192.0.2.{}", ""])
def test_neither_many_who_hold_little_nor_those_nobody_knows_make_units_overfull(payer: str) -> None:
    here = World()
    for number in range(6 * SLOTS):
        here.ask(payer.format(number))
    assert len(here.open) == 2 * SLOTS


def test_the_priority_of_a_key_counts_before_shares() -> None:
    here = World()
    for _ in range(3 * SLOTS):
        here.ask("gold", priority=-1)
    for _ in range(2 * SLOTS):
        here.ask("brass", priority=1)
    here.log.clear()
    here.end_one("gold")
    assert here.log == ["gold"]


def test_in_a_full_queue_a_flood_of_names_gives_way_to_others() -> None:
    here = World(limit=20)
    for number in range(2 * SLOTS + 20):
        here.ask(HOG, tenant=f"t{number}", priority=-5)
    for _ in range(SLOTS // 2 + 4):
        here.now += 0.1
        here.ask(OTHER)
    assert OTHER not in {payer for payer, _ in here.refused}
    assert here.refused == [(HOG, Refusal.FULL)] * 4


def test_names_of_one_payer_share_a_turn() -> None:
    waiting: FairQueue[int] = FairQueue(FairRules())
    for number in range(100):
        waiting.add(number, 0.0, tokens_s=1e9, tenant=f"t{number}", tokens=64, payer=HOG)
    for number in range(5):
        waiting.add(number, 0.0, tokens_s=1e9, tokens=64, payer=OTHER)
    served = []
    for _ in range(10):
        entry = waiting.first()
        assert entry is not None
        waiting.take(entry)
        served.append(entry.payer)
    assert served.count(OTHER) >= 4


LARGE = UNREAD_BYTES // 4 // 2
"""Tokens of a prompt of which a unit is to read one at a time of a payer, while others ask as well."""


def unread(policy: str = "least_load") -> World:
    """A world in which two have asked not long ago, and all have been answered."""
    here = World(policy=policy)
    for payer in (OTHER, HOG, OTHER):
        here.ask(payer)
        here.open[-1].commit(here.now)
    return here


def test_beside_others_a_unit_gets_no_more_of_one_than_it_reads_in_a_moment() -> None:
    here, alone, small = unread(), World(), unread()
    for _ in range(SLOTS):
        here.ask(HOG, tokens=LARGE)
        alone.ask(HOG, tokens=LARGE)
        small.ask(HOG)
    assert (here.held(HOG), alone.held(HOG), small.held(HOG)) == (1 + 2, SLOTS, 1 + SLOTS)
    here.ask(OTHER)
    here.router.serve_waiting(here.now)
    assert here.held(OTHER) == 3
    next(lease for lease in here.open if not lease.committed).commit(here.now)
    here.router.serve_waiting(here.now)
    assert here.held(HOG) == 1 + 3


def test_a_prompt_whose_client_left_counts_and_what_is_answered_as_a_whole_is_read_before_that() -> None:
    here, silent = unread(), unread()
    here.now += 0.01
    for world in (here, silent):
        for lease in [world.asked(HOG, tokens=LARGE), world.asked(HOG, tokens=LARGE)]:
            world.leave(lease)
        world.ask(HOG, tokens=LARGE)
        assert world.held(HOG) == 1
    here.now += 0.01
    here.asked(OTHER).commit(here.now)
    here.router.serve_waiting(here.now)
    assert here.held(HOG) == 2
    silent.now += 0.5
    silent.ask(OTHER)
    assert silent.held(HOG) == 1
    silent.now += 0.5
    silent.router.serve_waiting(silent.now)
    assert silent.held(HOG) == 2
    here = unread()
    for _ in range(4):
        here.ask(HOG, tokens=LARGE, stream=False)
    assert here.held(HOG) == 1 + 2
    here.now += PLAIN_S
    here.router.serve_waiting(here.now)
    assert here.held(HOG) == 1 + 4


def test_a_long_prompt_comes_after_those_that_others_have_sent_for_half_a_second_at_most() -> None:
    here = unread()
    here.now += 0.01
    others = [here.asked(OTHER), here.asked(OTHER)]
    here.ask(HOG, tokens=LONG_BYTES)
    here.router.serve_waiting(here.now)
    assert here.held(HOG) == 1
    here.asked(OTHER)
    others[0].commit(here.now)
    others[1].commit(here.now)
    here.open[-1].commit(here.now)
    here.router.serve_waiting(here.now)
    assert here.held(HOG) == 2
    here = unread()
    here.ask(OTHER)
    here.ask(OTHER)
    here.ask(HOG, tokens=LONG_BYTES)
    assert here.held(HOG) == 1
    for _ in range(6):
        here.now += 0.1
        here.ask(OTHER)
        here.router.serve_waiting(here.now)
    assert here.held(HOG) == 2


def test_the_turns_of_agents_are_nearly_all_cached_and_do_not_wait_for_each_other_or_for_others() -> None:
    here, blocks = unread("prefix_affinity"), tuple(range(500))
    for _ in range(2):
        here.ask(HOG, tokens=500 * BLOCK_BYTES // 4, blocks=blocks)
        here.now += 1.0
        for lease in here.open:
            if not lease.committed:
                lease.commit(here.now)
                here.board.prove(lease)
    before = here.held(HOG)
    here.ask(OTHER)
    for _ in range(4):
        here.ask(HOG, tokens=500 * BLOCK_BYTES // 4, blocks=blocks)
    assert here.held(HOG) == before + 4


def test_what_a_unit_is_only_about_to_compute_is_not_cached_yet() -> None:
    here, blocks = unread("prefix_affinity"), tuple(range(4 * LARGE // BLOCK_BYTES))
    for _ in range(SLOTS):
        here.ask(HOG, tokens=LARGE, blocks=blocks)
    assert here.held(HOG) == 1 + 2
    for lease in here.open:
        if not lease.committed:
            lease.commit(here.now)
    here.router.serve_waiting(here.now)
    assert here.held(HOG) == 1 + SLOTS
