"""How a probe is run: when it looks, what cannot stop it, and pages by callbacks. In virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from cellgate.probes.base import Fetch, FetchError, PageGet, Probe, ProbeContext, Reply, Trouble
from cellgate.probes.runner import (
    GAP_S,
    GRACE_S,
    JITTER,
    JITTER_MAX_S,
    PER_TURN,
    REST_JITTER,
    SLOTS_PER_S,
    SPARE,
    TOGETHER_S,
    Runner,
    Timer,
    Timers,
)
from cellgate.router.nouns import Evidence, Finding, Sign, Strength
from tests.patient import FakePatient, reply
from tests.sim.world import World, run

SWEEP_S = 0.25
LATENESS_S = 0.5


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
    probe: Probe, take: Callable[[Finding], None], context: LoopPatient | None = None, *, seed: int = 1
) -> Runner:
    """A runner of this probe, with an agenda of its own."""
    agenda = Timers(asyncio.get_running_loop(), TOGETHER_S)
    return Runner(probe, context or LoopPatient(lambda _: reply(200)), take, random.Random(seed), agenda)


async def sweep_for(runner: Runner, for_s: float) -> None:
    """Let time pass as in a gate, which looks at its runners now and then."""
    loop = asyncio.get_running_loop()
    end = loop.time() + for_s
    while (left_s := end - loop.time()) > 0.0:
        await asyncio.sleep(min(SWEEP_S, left_s))
        runner.sweep(loop.time())


def watch(
    probe: Probe,
    for_s: float,
    *,
    seed: int = 1,
    meanwhile: Callable[[Runner], None] = lambda runner: None,
    take: Callable[[Finding], None] | None = None,
    context: LoopPatient | None = None,
) -> list[Finding]:
    """Run a probe for a time; what it found. `meanwhile` is called when it has begun."""
    found: list[Finding] = []

    async def main() -> None:
        runner = runner_of(probe, take or found.append, context, seed=seed)
        runner.start()
        meanwhile(runner)
        await sweep_for(runner, for_s)
        runner.stop()

    run(World(seed), main())
    return found


def gaps(began: list[float]) -> list[float]:
    """The time from each look to the next."""
    return [later - earlier for earlier, later in pairwise(began)]


def test_it_looks_at_once_and_then_each_period_with_some_jitter() -> None:
    """Never late, at most a tenth early, and not always equally; at the same times with the same seed."""
    probe, again, other = Glance(), Glance(), Glance()
    found = watch(probe, for_s=100.0)
    assert probe.began[0] == 1000.0
    assert len(found) == len(probe.began)
    assert all(1.0 - JITTER - 1e-9 <= gap <= 1.0 for gap in gaps(probe.began))
    assert len(set(gaps(probe.began))) > 50
    watch(again, 20.0)
    watch(other, 20.0, seed=8)
    assert again.began == probe.began[: len(again.began)] != other.began[: len(again.began)]


def test_looks_never_overlap() -> None:
    """One that takes longer than the period is followed at once by the next."""
    probe = Glance(takes_s=3.0)
    watch(probe, for_s=29.0)
    assert gaps(probe.began) == pytest.approx([3.0] * 9)
    page = Reading(Server(reply(200), takes_s=2.0))
    assert len(watch_page(page, 10.5)) == 5


def test_a_nudge_looks_now() -> None:
    """Not at the end of the period, which begins again; during a look once more; at a rate."""
    probe = Glance(period_s=60.0)
    watch(probe, 100.0, meanwhile=lambda runner: call_later(5.0, runner.nudge))
    assert gaps(probe.began)[0] == pytest.approx(5.0)
    assert 54.0 <= gaps(probe.began)[1] <= 60.0
    probe = Glance(period_s=60.0, takes_s=2.0)

    def nudge_twice(runner: Runner) -> None:
        call_later(0.5, runner.nudge)
        call_later(1.0, runner.nudge)

    watch(probe, 50.0, meanwhile=nudge_twice)
    assert gaps(probe.began) == pytest.approx([2.0])
    page = Reading(Server(reply(200), takes_s=0.5))
    watch_page(page, 0.9, lambda runner: call_later(0.2, runner.nudge))
    assert page.began == pytest.approx([1000.0, 1000.5])
    probe = Glance(period_s=60.0)
    runners: list[Runner] = []
    watch(probe, 1.0, meanwhile=runners.append, take=lambda finding: runners[0].nudge())
    assert len(probe.began) == pytest.approx(1.0 / GAP_S, abs=2)


class LateTimers(Timers):
    """Those of a gate that is behind: each call is made `LATENESS_S` after its time."""

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        def make() -> None:
            timer.when = when
            call()

        timer = super().at(when + LATENESS_S, make)
        return timer


@dataclass
class Postponed(Glance):
    """A probe that progress postpones."""

    progress_at: float = 1000.0

    def due_at(self, _context: ProbeContext, last_at: float) -> float:
        return max(last_at, self.progress_at) + self.period_s


@pytest.mark.parametrize(("progress_at", "began"), [(1000.0, 1003.0), (1002.0, 1005.0)])
def test_where_the_gate_is_behind_a_probe_waits_for_looks_that_are_as_late(
    progress_at: float, began: float
) -> None:
    """What they show may postpone it, as it does where nothing is late."""
    probe = Postponed(name="canary")

    async def main() -> None:
        agenda = LateTimers(asyncio.get_running_loop(), TOGETHER_S)
        context = LoopPatient(lambda _: reply(200))
        runner = Runner(probe, context, lambda _: None, random.Random(1), agenda)
        runner.start()
        call_later(2.0 + 0.5 * LATENESS_S, lambda: setattr(probe, "progress_at", progress_at))
        await asyncio.sleep(6.0)
        runner.stop()

    run(World(1), main())
    assert probe.began[0] == pytest.approx(began, abs=0.2)


def test_timers_without_calls_are_late_with_nothing() -> None:
    async def main() -> list[float]:
        loop, found = asyncio.get_running_loop(), list[float]()
        agenda = Timers(loop)
        calls = [agenda.at(loop.time() + pause_s, lambda: None) for pause_s in (1.0, 60.0)]
        agenda.late_s = 3.0
        for call in calls:
            agenda.cancel(call)
            found.append(agenda.late_s)
        return found

    assert run(World(1), main()) == [3.0, 0.0]


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


@pytest.mark.parametrize("sign", [Sign.GOOD, None], ids=["of good news", "always"])
def test_a_taker_that_fails_does_not_end_a_probe(sign: Sign | None, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is told of a flip may have a bug, too. Nothing of such a look lives on."""
    closed: list[bool] = []

    @dataclass
    class Holding(Glance):
        async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
            try:
                async for finding in super().look(context):
                    yield finding
            finally:
                closed.append(True)

    def take(finding: Finding) -> None:
        if sign is None or (isinstance(finding, Evidence) and finding.sign is sign):
            raise KeyError("u")

    probe = Holding()
    watch(probe, for_s=5.0, take=take)
    assert len(probe.began) == len(closed) == 6
    assert len(caplog.records) == 6 if sign else caplog.records


def test_a_look_that_hangs_and_a_page_that_never_comes_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """After the longest timeout of any fetch and a grace. A fetch has a timeout; if it fails, the runner does
    not.
    """
    probe = Glance(takes_s=1e6)
    found = watch(probe, for_s=150.0)
    limit_s = 60.0 + GRACE_S
    assert all(limit_s <= gap <= limit_s + 2 * SWEEP_S for gap in gaps(probe.began))
    assert len(gaps(probe.began)) == 2
    found += watch_page(Reading(Server(reply(200), takes_s=1e6)), 2.0 * (LIMIT_S + GRACE_S) + 2.0)
    assert [finding.sign for finding in found if isinstance(finding, Evidence)] == [Sign.NEUTRAL] * 4
    assert "TimeoutError()" in caplog.records[-1].getMessage()


def call_later(delay_s: float, callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, callback)


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


def test_a_probe_that_cannot_say_when_to_look_looks_every_second(caplog: pytest.LogCaptureFixture) -> None:
    class Blind(Glance):
        def due_at(self, _context: ProbeContext, last_at: float) -> float:
            raise KeyError("u")

    probe = Blind()
    found = watch(probe, for_s=4.5)
    assert len(found) == len(probe.began) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "probe glance of unit u: its schedule failed: KeyError('u'); it runs every 1 s"
    ]


# How a probe that reads a page is run: asked and answered by callbacks, and what cannot stop it. In virtual
# time.

LIMIT_S = 5.0


@dataclass
class Server:
    """Gives `answer` after `takes_s`."""

    answer: Reply | FetchError
    takes_s: float = 0.1
    pending: int = 0

    def get(self, _target: str, done: Callable[[Reply | FetchError], None], **_: object) -> object:
        def tell() -> None:
            self.pending -= 1
            done(self.answer)

        def abandon() -> None:
            self.pending -= 1
            timer.cancel()

        self.pending += 1
        timer = asyncio.get_running_loop().call_later(self.takes_s, tell)
        return SimpleNamespace(abandon=abandon)


@dataclass
class Reading:
    """A probe that reads a page each second."""

    server: Server
    name: str = "reading"
    page_error: Exception | None = None
    read_error: Exception | None = None
    began: list[float] = field(default_factory=list)

    def limit_s(self, _context: ProbeContext) -> float:
        return LIMIT_S

    def due_at(self, _context: ProbeContext, last_at: float) -> float:
        return last_at + 1.0

    def page(self, context: ProbeContext) -> PageGet:
        self.began.append(context.now())
        if self.page_error is not None:
            raise self.page_error
        return PageGet(cast("Fetch", self.server), "/page", 1.0)

    def read(self, context: ProbeContext, answer: Reply | FetchError) -> list[Finding]:
        if self.read_error is not None:
            raise self.read_error
        sign = Sign.BAD if isinstance(answer, FetchError) else Sign.GOOD
        return [Evidence("u", sign, Strength.WEAK, self.name, "seen", context.now())]


def watch_page(
    probe: Reading, for_s: float, meanwhile: Callable[[Runner], None] = lambda _: None
) -> list[Finding]:
    """Run a probe for a time; what it found. Nothing of it may be left."""
    found = watch(probe, for_s, meanwhile=meanwhile)
    assert probe.server.pending == 0
    return found


def test_long_pauses_of_many_units_drift_apart_and_those_of_few_keep_their_turns() -> None:
    shortest = []
    for is_of_many in (False, True):
        probe, context = Glance(period_s=14.0), LoopPatient(lambda _: reply(200), is_of_many=is_of_many)
        watch(probe, for_s=1000.0, context=context)
        shortest.append(min(gaps(probe.began)))
    few, many = shortest
    assert few >= 14.0 - JITTER_MAX_S - 1e-9
    assert 14.0 * (1.0 - REST_JITTER) - 1e-9 <= many < 12.0


@pytest.mark.parametrize(
    ("answer", "sign"), [(reply(200), Sign.GOOD), (FetchError(Trouble.TIMEOUT, "no answer"), Sign.BAD)]
)
def test_an_answer_is_read_and_the_next_is_due_a_period_later(answer: Reply | FetchError, sign: Sign) -> None:
    probe = Reading(Server(answer))
    found = watch_page(probe, 9.95)
    assert {evidence.sign for evidence in found if isinstance(evidence, Evidence)} == {sign}
    assert len(found) == len(probe.began) == pytest.approx(10, abs=1)
    assert all(1.0 - JITTER - 1e-3 <= gap <= 1.0 for gap in gaps(probe.began))
    assert watch_page(Reading(Server(answer, takes_s=3.0)), 2.0) == [], "who is stopped reads nothing more"


ERROR = KeyError("a\nb")


@pytest.mark.parametrize(
    "probe",
    [
        Glance(error=ERROR),
        Reading(Server(reply(200)), page_error=ERROR),
        Reading(Server(reply(200)), read_error=ERROR),
    ],
    ids=["look", "page", "read"],
)
def test_an_exception_is_one_line_and_neutral_evidence_and_the_next_run_comes(
    probe: Glance | Reading, caplog: pytest.LogCaptureFixture
) -> None:
    found = watch(probe, for_s=2.5)
    weights = [(each.sign, each.source) for each in found if isinstance(each, Evidence)]
    assert weights == [(Sign.NEUTRAL, probe.name)] * 3
    assert len(probe.began) == len(caplog.records) == 3
    assert caplog.records[0].getMessage() == (
        f"probe {probe.name} of unit u: the probe failed: KeyError('a\\nb'); this run is not counted"
    )


def test_a_finding_may_stop_the_probe() -> None:
    """The unit is taken out of the configuration by what follows from it."""
    probe, found, runners = Reading(Server(reply(200))), list[Finding](), list[Runner]()

    def take(finding: Finding) -> None:
        found.append(finding)
        runners[0].stop()

    watch(probe, 10.0, meanwhile=runners.append, take=take)
    assert len(found) == len(probe.began) == 1


# One timer for many calls: when they are made, and in which order.

EARLY_S = 0.01
SOON_S, LATER_S = 1.0 + 0.9 * EARLY_S, 1.0 + 1.1 * EARLY_S


Calls = list[tuple[str, float]]


def play(scenario: Callable[[Timers, Calls], None], for_s: float = 10.0) -> Calls:
    """What was called when, in seconds from the beginning; no timer may be left."""
    made: Calls = []

    async def main() -> None:
        began_at = now()
        scenario(Timers(asyncio.get_running_loop(), EARLY_S), made)
        await asyncio.sleep(for_s)
        made[:] = [(name, round(at - began_at, 6)) for name, at in made]

    run(World(1), main())
    return made


@pytest.mark.parametrize(
    ("asked_s", "made_s"),
    [
        ((3.0, 1.0, 2.0, 1.0), [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]),
        ((1.0, SOON_S, LATER_S), [(1.0, 1.0), (SOON_S, 1.0), (LATER_S, LATER_S)]),
    ],
    ids=["in the order of their times", "what is due soon is made with one that is due now"],
)
def test_when_calls_are_made(asked_s: tuple[float, ...], made_s: list[tuple[float, float]]) -> None:
    def scenario(agenda: Timers, made: Calls) -> None:
        for at_s in asked_s:
            agenda.at(now() + at_s, noted(f"{at_s:g}", made))

    assert play(scenario) == [(f"{name:g}", at_s) for name, at_s in made_s]


def test_who_has_time_until_then_is_not_given_up_before_it_with_another_call() -> None:
    def scenario(agenda: Timers, made: Calls) -> None:
        agenda.at(now() + 1.0, noted("other", made))
        agenda.not_before(now() + SOON_S, noted("given up", made))

    (_, other_s), (_, given_up_s) = play(scenario)
    assert other_s == 1.0
    assert SOON_S <= given_up_s <= SOON_S + EARLY_S


def noted(name: str, made: Calls) -> Callable[[], None]:
    """A call that takes down when it was made."""
    return lambda: made.append((name, now()))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_call_that_was_cancelled_is_not_made() -> None:
    def scenario(agenda: Timers, made: Calls) -> None:
        first = agenda.at(now() + 1.0, noted("first", made))
        second = agenda.at(now() + 2.0, noted("second", made))
        agenda.at(now() + 1.0, lambda: agenda.cancel(second))
        agenda.cancel(first)
        agenda.cancel(first)

    def many(agenda: Timers, made: Calls) -> None:
        agenda.at(now() + 5.0, noted("kept", made))
        for number in range(10 * SPARE):
            agenda.cancel(agenda.at(now() + 3600.0 + number / SLOTS_PER_S, noted("cancelled", made)))
            assert sum(map(len, agenda._slots.values())) == 1
            assert len(agenda._slots) == len(agenda._order) <= SPARE + 3

    assert play(scenario) == []
    assert play(many) == [("kept", 5.0)]


def test_calls_may_add_others() -> None:
    def scenario(agenda: Timers, made: Calls) -> None:
        def again() -> None:
            noted("again", made)()
            if len(made) < 3:
                agenda.at(now() + 1.0, again)

        agenda.at(now(), again)

    assert play(scenario) == [("again", 0.0), ("again", 1.0), ("again", 2.0)]


def test_the_loop_turns_between_many_calls() -> None:
    turns: list[int] = []

    def scenario(agenda: Timers, made: Calls) -> None:
        def turn() -> None:
            turns.append(len(made))
            if len(made) < 3 * PER_TURN:
                asyncio.get_running_loop().call_soon(turn)

        for _ in range(3 * PER_TURN):
            agenda.at(now(), noted("x", made))
        turn()

    assert len(play(scenario)) == 3 * PER_TURN
    assert all(later - earlier <= PER_TURN for earlier, later in pairwise(turns))


def test_a_call_that_fails_does_not_stop_the_others_which_are_told_in_order_in_a_later_turn() -> None:
    world, made, told = World(1), list[str](), list[int]()

    async def main() -> None:
        agenda = Timers(asyncio.get_running_loop(), EARLY_S)
        agenda.at(now() + 1.0, lambda: made.append(str(1 // 0)))
        agenda.at(now() + 1.0, lambda: made.append("at"))
        agenda.soon(lambda _: made.append(str(1 // 0)), None)
        agenda.soon(made.append, "soon")
        for number in range(2 * PER_TURN):
            agenda.soon(told.append, number)
        assert told == []
        await asyncio.sleep(2.0)
        assert len(world.loop.problems) == 2
        world.loop.forgive()

    run(world, main())
    assert (made, told) == (["soon", "at"], [*range(2 * PER_TURN)])
