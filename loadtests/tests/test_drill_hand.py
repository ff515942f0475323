"""Who deals the faults: in order, each when the one before has left nothing behind."""

import signal
import threading
from typing import cast

import pytest

from loadtests.drill.fleet import Fleet
from loadtests.drill.plan import Step
from loadtests.drill.run import Hand


class Place:
    """A fleet of one unit that writes down what it suffers; a restart takes until `restarted` is set."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.restarting = threading.Event()
        self.restarted = threading.Event()

    def unit(self, _: str) -> "Place":
        return self

    def signal(self, node: str, number: signal.Signals) -> None:
        self.story.append(f"{number.name} {node}")

    def command(self, fault: str, **_: float) -> None:
        self.story.append(fault)
        if fault == "drop_link":
            raise RuntimeError("no such link")

    def restart(self) -> None:
        self.restarting.set()
        self.restarted.wait(10.0)
        self.story.append("restarted")


def step(at_s: float, fault: str, target: str, heal_after_s: float | None = None) -> Step:
    return Step(at_s=at_s, fault=fault, target=target, heal_after_s=heal_after_s)


def begun(*steps: Step) -> tuple[Place, Hand]:
    place = Place()
    hand = Hand(cast("Fleet", place), steps)
    hand.begin()
    return place, hand


def wait_for(place: Place, count: int) -> None:
    for _ in range(500):
        if len(place.story) >= count:
            return
        threading.Event().wait(0.01)


def test_faults_are_dealt_and_undone_in_order() -> None:
    place, hand = begun(step(0.0, "freeze", "a1.leader", 0.02), step(0.1, "freeze", "a1.follower-1"))
    wait_for(place, 3)
    hand.finish()
    assert place.story == ["SIGSTOP leader", "SIGCONT leader", "SIGSTOP follower-1"]
    first, second = hand.dealt
    assert first.healed_at is not None
    assert second.healed_at is None


def test_a_healing_that_takes_long_delays_the_rest_of_the_plan() -> None:
    place, hand = begun(step(0.0, "kill", "a1.leader", 0.01), step(0.05, "freeze", "a1.leader"))
    assert place.restarting.wait(5.0)
    threading.Event().wait(0.1)
    assert place.story == ["SIGKILL leader"]
    place.restarted.set()
    wait_for(place, 3)
    hand.finish()
    assert place.story == ["SIGKILL leader", "restarted", "SIGSTOP leader"]


def test_a_plan_that_was_not_finished_proves_nothing() -> None:
    place, hand = begun(step(0.0, "freeze", "a1.leader"), step(60.0, "freeze", "a1.follower-1"))
    wait_for(place, 1)
    with pytest.raises(RuntimeError, match="1 faults were not dealt"):
        hand.finish()


def test_a_fault_that_cannot_be_dealt_proves_nothing() -> None:
    place, hand = begun(step(0.0, "drop_link", "a1.follower-1"))
    wait_for(place, 1)
    with pytest.raises(RuntimeError, match="no such link"):
        hand.finish()


def test_what_was_stopped_is_not_healed_any_more() -> None:
    place, hand = begun(step(0.0, "freeze", "a1.leader", 60.0))
    wait_for(place, 1)
    hand.stop()
    assert place.story == ["SIGSTOP leader"]
