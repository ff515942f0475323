"""What the agent makes of processes that are replaced: epochs."""

from __future__ import annotations

from cellgate.probes.agent import DOUBT_S, Pattern, ProcessWatch
from tests.unit.probes.machine import API, SETTLED_S, WORKER_0, WORKER_1, Machine, pids


def test_a_restart_is_a_new_epoch(machine: Machine, watch: ProcessWatch) -> None:
    """Once all is there again and has settled; until then it is gone."""
    before = watch.look()
    machine.end(API, WORKER_0, WORKER_1)
    machine.run(watch, 5.0)
    machine.spawn("engine api")
    assert machine.run(watch, 5.0).state == "gone"
    machine.spawn("engine worker 0")
    assert machine.run(watch, 1.0).state == "gone"
    status = machine.run(watch, SETTLED_S)
    assert status.state == "ok"
    assert status.epoch != before.epoch


def test_one_worker_started_anew_is_a_new_epoch(machine: Machine, watch: ProcessWatch) -> None:
    before = watch.look()
    machine.end(WORKER_0)
    fresh = machine.spawn("engine worker 0")
    status = machine.run(watch, SETTLED_S)
    assert pids(status) == [API, WORKER_1, fresh]
    assert status.epoch != before.epoch


def test_those_left_do_not_make_up_for_one_that_is_lost(machine: Machine, watch: ProcessWatch) -> None:
    machine.end(WORKER_0)
    assert machine.run(watch, DOUBT_S - 1.0).state == "gone"


def test_what_the_others_do_without_for_a_minute_was_a_helper(machine: Machine, watch: ProcessWatch) -> None:
    """Else a unit that works would be out for ever; the new epoch makes canaries decide."""
    before = watch.look()
    machine.end(WORKER_0)
    status = machine.run(watch, DOUBT_S + SETTLED_S)
    assert (status.state, pids(status)) == ("ok", [API, WORKER_1])
    assert status.epoch != before.epoch
    machine.end(API)
    assert machine.run(watch, 10 * DOUBT_S).state == "gone"


def test_who_stood_by_does_not_take_the_place_of_one_that_is_lost(
    machine: Machine, watch: ProcessWatch
) -> None:
    """A helper that matched all the while."""
    machine.spawn("worker helper")
    machine.run(watch, 5.0)
    machine.end(WORKER_0)
    assert machine.run(watch, DOUBT_S - 1.0).state == "gone"


def test_a_zombie_is_replaced_as_one_that_is_gone(machine: Machine, watch: ProcessWatch) -> None:
    machine.set(WORKER_0, "Z")
    machine.run(watch, 1.0)
    fresh = machine.spawn("engine worker 0")
    assert pids(machine.run(watch, SETTLED_S)) == [API, WORKER_1, fresh]


def test_an_agent_started_anew_tells_the_same_epoch(machine: Machine, watch: ProcessWatch) -> None:
    """Which is why it is made of who they are, and of nothing else."""
    again = machine.watch(Pattern("api"), Pattern("worker"))
    assert machine.run(again, SETTLED_S).epoch == watch.look().epoch
    (machine.root / "sys/kernel/random/boot_id").write_text("boot-2\n")
    other = machine.watch(Pattern("api"), Pattern("worker"))
    assert machine.run(other, SETTLED_S).epoch != watch.look().epoch
