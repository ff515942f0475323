"""The queue of requests that lost their unit, and how the router serves it."""

from __future__ import annotations

import random

from policies import POLICIES
from router.board import Board
from router.lease import Lease
from router.nouns import Ask, Evidence, Fleet, Refusal, Rules, Sign, Strength, Unit
from router.router import Router
from router.waiting import Ticket, Waiting

NOW = 100.0
NOTHING_TRIED: frozenset[str] = frozenset()


class Scene:
    """A router over the units `a` and `b`, both UP, two places each; `settled` is who was told what."""

    def __init__(self, limit: int = 8) -> None:
        self.board = Board(Rules(evict_overcommit=0.5))
        self.router = Router(
            self.board, POLICIES["least_load"](), random.Random(1), Waiting(limit, max_wait_s=30.0)
        )
        self.settled: list[tuple[str, Lease | Refusal]] = []
        units = tuple(Unit(name, "c", f"http://{name}", ("m",), max_in_flight=2) for name in "ab")
        self.board.configure(Fleet((), units), NOW)
        for name in "ab":
            self.board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "", NOW))

    def wait(self, who: str, tried: frozenset[str] = NOTHING_TRIED, model: str = "m") -> Ticket | None:
        return self.router.wait(Ask(model), NOW, tried, lambda answer: self.settled.append((who, answer)))

    def fill(self, *names: str) -> list[Lease]:
        """Take every place there is, the overcommitted ones as well."""
        return [self.board.open(name, Ask("m"), NOW, retry=False) for name in names for _ in range(3)]

    @property
    def told(self) -> list[tuple[str, str]]:
        """Who got which unit, or which refusal."""
        return [(who, a.unit if isinstance(a, Lease) else a.value) for who, a in self.settled]


def test_those_who_wait_are_served_in_their_order_when_room_appears() -> None:
    scene = Scene()
    leases = scene.fill("a", "b")
    for who in "xyz":
        scene.wait(who)
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == []
    scene.board.close(leases[0])
    scene.board.close(leases[3])
    scene.router.serve_waiting(NOW + 2)
    assert sorted(unit for _, unit in scene.told) == ["a", "b"]
    assert [who for who, _ in scene.told] == ["x", "y"]
    assert len(scene.router.waiting) == 1


def test_nobody_is_given_a_unit_that_failed_it_before() -> None:
    scene = Scene()
    leases = scene.fill("b")
    scene.wait("x", tried=frozenset({"a"}))
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == []
    scene.board.close(leases[0])
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("x", "b")]


def test_one_who_cannot_be_served_does_not_hold_up_those_behind() -> None:
    scene = Scene()
    scene.fill("b")
    scene.wait("x", tried=frozenset({"a"}))
    scene.wait("y")
    scene.router.serve_waiting(NOW + 1)
    assert scene.told == [("y", "a")]


def test_waiting_ends_with_a_refusal_when_its_time_is_up() -> None:
    scene = Scene()
    scene.fill("a", "b")
    scene.wait("x")
    scene.router.serve_waiting(NOW + 29.9)
    assert scene.told == []
    scene.router.serve_waiting(NOW + 30.0)
    assert scene.told == [("x", "full")]
    assert len(scene.router.waiting) == 0


def test_a_model_that_is_gone_from_the_configuration_is_not_waited_for() -> None:
    scene = Scene()
    scene.wait("x", model="gone")
    scene.router.serve_waiting(NOW)
    assert scene.told == [("x", "unknown_model")]


def test_the_queue_is_bounded() -> None:
    scene = Scene(limit=2)
    scene.fill("a", "b")
    first = scene.wait("x")
    assert first is not None
    assert scene.wait("y") is not None
    assert scene.wait("z") is None
    scene.router.waiting.remove(first)
    assert scene.wait("z") is not None


def test_a_ticket_that_was_taken_out_is_never_called() -> None:
    scene = Scene()
    ticket = scene.wait("x")
    assert ticket is not None
    scene.router.waiting.remove(ticket)
    scene.router.waiting.remove(ticket)
    scene.router.serve_waiting(NOW + 60.0)
    assert scene.told == []


def test_those_who_are_served_may_queue_again_at_once() -> None:
    scene = Scene()
    answers: list[Lease | Refusal] = []

    def again(answer: Lease | Refusal) -> None:
        answers.append(answer)
        if len(answers) == 1:
            scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, again)

    scene.router.wait(Ask("m"), NOW, NOTHING_TRIED, again)
    scene.router.serve_waiting(NOW)
    assert len(answers) == 1
    scene.router.serve_waiting(NOW)
    assert len(answers) == 2
