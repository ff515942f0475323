"""How a probe is run: when it looks, and what cannot stop it. In virtual time."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest

from cellgate.probes.base import ProbeContext
from cellgate.probes.runner import GAP_S, GRACE_S, JITTER, TOGETHER_S, Agenda, Runner
from cellgate.router.nouns import Evidence, Finding, Sign, Strength
from tests.patient import FakePatient, reply
from tests.sim.world import World, run

SWEEP_S = 0.25


@dataclass
class Glance:
    """A probe whose look takes `takes_s`, notes its time and brings one finding; or fails."""

    name: str = "glance"
    period_s: float = 1.0
    takes_s: float = 0.0
    error: Exception | None = None
    began: list[float] = field(default_factory=list)
    looking: int = 0

    def limit_s(self, _context: ProbeContext) -> float:
        return 60.0

    def due_at(self, _context: ProbeContext, last_at: float) -> float:
        return last_at + self.period_s

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        self.began.append(context.now())
        self.looking += 1
        try:
            assert self.looking == 1, "looks overlap"
            await asyncio.sleep(self.takes_s)
            if self.error is not None:
                raise self.error
        finally:
            self.looking -= 1
        yield Evidence("u", Sign.GOOD, Strength.WEAK, self.name, "seen", context.now())


@dataclass
class LoopPatient(FakePatient):
    """A patient on the loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def runner_of(
    probe: Glance, take: Callable[[Finding], None], context: LoopPatient | None = None, *, seed: int = 1
) -> Runner:
    """A runner of this probe, with an agenda of its own."""
    agenda = Agenda(asyncio.get_running_loop(), TOGETHER_S)
    return Runner(probe, context or LoopPatient(lambda _: reply(200)), take, random.Random(seed), agenda)


async def sweep_for(runner: Runner, for_s: float) -> None:
    """Let time pass as in a gate, which looks at its runners now and then."""
    loop = asyncio.get_running_loop()
    end = loop.time() + for_s
    while (left_s := end - loop.time()) > 0.0:
        await asyncio.sleep(min(SWEEP_S, left_s))
        runner.sweep(loop.time())


def watch(
    probe: Glance,
    for_s: float,
    *,
    seed: int = 1,
    meanwhile: Callable[[Runner], None] = lambda runner: None,
    take: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """Run a probe for a time; what it found. `meanwhile` is called when it has begun."""
    world = World(seed)
    found: list[Finding] = []

    async def main() -> None:
        runner = runner_of(probe, take or found.append, seed=seed)
        runner.start()
        meanwhile(runner)
        await sweep_for(runner, for_s)
        runner.stop()

    run(world, main())
    return found


def gaps(probe: Glance) -> list[float]:
    """The time from each look to the next."""
    return [later - earlier for earlier, later in zip(probe.began, probe.began[1:], strict=False)]


def test_it_looks_at_once_and_then_each_period_with_some_jitter() -> None:
    """Never late, at most a tenth early, and not always equally."""
    probe = Glance()
    found = watch(probe, for_s=100.0)
    assert probe.began[0] == 1000.0
    assert len(found) == len(probe.began)
    assert all(1.0 - JITTER - 1e-9 <= gap <= 1.0 for gap in gaps(probe))
    assert len(set(gaps(probe))) > 50


def test_the_same_seed_looks_at_the_same_times() -> None:
    """Randomness is injected."""
    first, second, other = Glance(), Glance(), Glance()
    watch(first, 20.0, seed=7)
    watch(second, 20.0, seed=7)
    watch(other, 20.0, seed=8)
    assert first.began == second.began != other.began


def test_looks_never_overlap() -> None:
    """One that takes longer than the period is followed at once by the next."""
    probe = Glance(takes_s=3.0)
    watch(probe, for_s=29.0)
    assert gaps(probe) == pytest.approx([3.0] * 9)


def test_a_nudge_looks_now() -> None:
    """Not at the end of the period; and the period begins again."""
    probe = Glance(period_s=60.0)
    watch(probe, 100.0, meanwhile=lambda runner: call_later(5.0, runner.nudge))
    assert gaps(probe)[0] == pytest.approx(5.0)
    assert 54.0 <= gaps(probe)[1] <= 60.0


def test_a_nudge_during_a_look_is_followed_by_another() -> None:
    """Several count as one."""
    probe = Glance(period_s=60.0, takes_s=2.0)

    def nudge_twice(runner: Runner) -> None:
        call_later(0.5, runner.nudge)
        call_later(1.0, runner.nudge)

    watch(probe, 50.0, meanwhile=nudge_twice)
    assert gaps(probe) == pytest.approx([2.0])


def test_nudges_without_end_are_held_to_a_rate() -> None:
    """Each finding of an instant look wishes for the next one."""
    probe = Glance(period_s=60.0)
    runners: list[Runner] = []
    watch(probe, 1.0, meanwhile=runners.append, take=lambda finding: runners[0].nudge())
    assert len(probe.began) == pytest.approx(1.0 / GAP_S, abs=2)


def test_what_is_due_is_asked_again_after_each_pause() -> None:
    """Life shown meanwhile puts the look off."""

    @dataclass
    class Patience(Glance):
        def due_at(self, context: ProbeContext, last_at: float) -> float:
            return max(last_at + 1.0, context.progress_at + 2.0)

    probe = Patience()
    context = LoopPatient(lambda _: reply(200))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        context.progress_at = loop.time()
        runner = runner_of(probe, lambda finding: None, context)
        runner.start()
        for _ in range(10):
            await asyncio.sleep(1.0)
            context.progress_at = loop.time()
        assert probe.began == []
        await asyncio.sleep(2.5)
        runner.stop()

    run(World(1), main())
    assert context.progress_at + 2.0 * (1.0 - JITTER) <= probe.began[0] <= context.progress_at + 2.0


def test_what_is_not_due_before_a_nudge_waits_for_one() -> None:
    """And tells so to whoever asks when it looks."""

    @dataclass
    class Held(Glance):
        def due_at(self, context: ProbeContext, last_at: float) -> float:
            return math.inf

    probe = Held()
    due: list[float] = []

    def nudge_later(runner: Runner) -> None:
        due.append(runner.due_at())
        call_later(5.0, runner.nudge)

    watch(probe, for_s=100.0, meanwhile=nudge_later)
    assert due == [math.inf]
    assert probe.began == [1005.0]


def test_while_it_looks_it_is_due_since_the_look_began() -> None:
    """Whoever asks what comes next is told that it is on its way, even when the look takes long."""
    probe = Glance(period_s=10.0, takes_s=5.0)
    due: list[float] = []

    def ask(runner: Runner) -> None:
        for at_s in (1.0, 4.0, 6.0):
            call_later(at_s, lambda: due.append(runner.due_at()))

    watch(probe, for_s=8.0, meanwhile=ask)
    assert due == [probe.began[0], probe.began[0], probe.began[0] + 10.0]


def test_an_exception_is_one_line_and_neutral_evidence(caplog: pytest.LogCaptureFixture) -> None:
    """And the next look comes as if nothing had happened."""
    probe = Glance(error=ZeroDivisionError("by\nzero"))
    with caplog.at_level(logging.ERROR):
        found = watch(probe, for_s=2.5)
    assert len(found) == len(probe.began) == len(caplog.records) == 3
    assert {(finding.sign, finding.source) for finding in found if isinstance(finding, Evidence)} == {
        (Sign.NEUTRAL, "glance")
    }
    assert caplog.records[0].getMessage() == (
        "probe glance of unit u: the probe failed: ZeroDivisionError('by\\nzero'); this run is not counted"
    )


def test_a_taker_that_fails_does_not_end_the_probe(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is told of a flip may have a bug, too."""
    probe = Glance()

    def take(finding: Finding) -> None:
        if isinstance(finding, Evidence) and finding.sign is Sign.GOOD:
            raise KeyError("u")

    with caplog.at_level(logging.ERROR):
        watch(probe, for_s=5.0, take=take)
    assert len(probe.began) == len(caplog.records) == 6


def test_a_look_that_hangs_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    """After the longest timeout of any fetch and a grace."""
    probe = Glance(takes_s=1e6)
    with caplog.at_level(logging.ERROR):
        found = watch(probe, for_s=150.0)
    limit_s = 60.0 + GRACE_S
    assert all(limit_s <= gap <= limit_s + 2 * SWEEP_S for gap in gaps(probe))
    assert len(gaps(probe)) == 2
    assert [finding.sign for finding in found if isinstance(finding, Evidence)] == [Sign.NEUTRAL] * 2


def call_later(delay_s: float, callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, callback)


def test_a_probe_whose_taker_failed_is_closed() -> None:
    """Nothing of it lives on."""
    closed: list[bool] = []

    @dataclass
    class Holding(Glance):
        async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
            try:
                yield Evidence("u", Sign.GOOD, Strength.WEAK, self.name, "seen", context.now())
            finally:
                closed.append(True)

    def take(finding: Finding) -> None:
        if isinstance(finding, Evidence) and finding.sign is Sign.GOOD:
            raise KeyError("u")

    watch(Holding(period_s=60.0), for_s=1.0, take=take)
    assert closed == [True]


def test_who_stops_watching_ends_a_look_that_is_overdue_as_well() -> None:
    """The limit and the end at the same moment: the end counts."""

    async def main() -> None:
        probe, found = Glance(takes_s=1e6), list[Finding]()
        runner = runner_of(probe, found.append)
        runner.start()
        await sweep_for(runner, 60.0 + GRACE_S)
        assert runner.looks_since < asyncio.get_running_loop().time()
        runner.stop()
        runner.sweep(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)
        assert (probe.looking, found) == (0, [])

    run(World(1), main())


def test_a_probe_that_cannot_say_when_it_looks_next_looks_every_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Blind(Glance):
        def due_at(self, _context: ProbeContext, last_at: float) -> float:
            raise KeyError("u")

    probe = Blind()
    with caplog.at_level(logging.ERROR):
        found = watch(probe, for_s=4.5)
    assert len(found) == len(probe.began) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "probe glance of unit u: its schedule failed: KeyError('u'); it runs every 1 s"
    ]


def test_a_taker_that_fails_always_does_not_end_the_probe() -> None:
    def take(finding: Finding) -> None:
        raise KeyError("u")

    probe = Glance()
    watch(probe, for_s=5.0, take=take)
    assert len(probe.began) == 6
