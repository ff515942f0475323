"""How a probe that reads a page is run: asked and answered by callbacks, and what cannot stop it. In virtual
time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from cellgate.probes.base import Fetch, FetchError, PageGet, ProbeContext, Reply, Trouble
from cellgate.probes.runner import GRACE_S, JITTER, Agenda, Runner
from cellgate.router.nouns import Evidence, Finding, Sign, Strength
from tests.patient import reply
from tests.sim.world import World, run
from tests.unit.probes.test_runner import LoopPatient, sweep_for

LIMIT_S = 5.0


class Wait:
    """A request on its way."""

    def __init__(self, server: Server, done: Callable[[Reply | FetchError], None]) -> None:
        self._server = server
        self._timer = asyncio.get_running_loop().call_later(server.takes_s, self._tell, done)

    def _tell(self, done: Callable[[Reply | FetchError], None]) -> None:
        self._server.pending -= 1
        done(self._server.answer)

    def abandon(self) -> None:
        self._server.pending -= 1
        self._timer.cancel()


@dataclass
class Server:
    """Gives `answer` after `takes_s`."""

    answer: Reply | FetchError
    takes_s: float = 0.1
    pending: int = 0

    def get(
        self, _target: str, done: Callable[[Reply | FetchError], None], *, timeout_s: float, max_bytes: int
    ) -> Wait:
        self.pending += 1
        return Wait(self, done)


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


def watch(
    probe: Reading, for_s: float, meanwhile: Callable[[Runner], None] = lambda _: None
) -> list[Evidence]:
    """Run a probe for a time; what it found. Nothing of it may be left."""
    found: list[Evidence] = []

    async def main() -> None:
        agenda = Agenda(asyncio.get_running_loop())
        take = cast("Callable[[Finding], None]", found.append)
        runner = Runner(probe, LoopPatient(lambda _: reply(200)), take, random.Random(1), agenda)
        runner.start()
        meanwhile(runner)
        await sweep_for(runner, for_s)
        runner.stop()
        assert probe.server.pending == 0

    run(World(1), main())
    return found


@pytest.mark.parametrize(
    ("answer", "sign"), [(reply(200), Sign.GOOD), (FetchError(Trouble.TIMEOUT, "no answer"), Sign.BAD)]
)
def test_each_answer_is_read_and_the_next_is_asked_for_a_period_later(
    answer: Reply | FetchError, sign: Sign
) -> None:
    probe = Reading(Server(answer))
    found = watch(probe, 9.95)
    assert {evidence.sign for evidence in found} == {sign}
    assert len(found) == len(probe.began) == pytest.approx(10, abs=1)
    gaps = [later - earlier for earlier, later in zip(probe.began, probe.began[1:], strict=False)]
    assert all(1.0 - JITTER - 1e-3 <= gap <= 1.0 for gap in gaps)


def test_pages_are_not_asked_for_side_by_side() -> None:
    probe = Reading(Server(reply(200), takes_s=2.0))
    assert len(watch(probe, 10.5)) == 5


def test_a_nudge_while_a_page_is_awaited_is_followed_by_another_run() -> None:
    probe = Reading(Server(reply(200), takes_s=0.5))

    def nudge_later(runner: Runner) -> None:
        asyncio.get_running_loop().call_later(0.2, runner.nudge)

    watch(probe, 0.9, nudge_later)
    assert probe.began == pytest.approx([1000.0, 1000.5])


def test_who_is_stopped_leaves_no_request_behind_and_reads_nothing_more() -> None:
    probe = Reading(Server(reply(200), takes_s=3.0))
    assert watch(probe, 2.0) == []


def test_a_page_that_never_comes_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """A fetch has a timeout; if that fails, the runner does not."""
    probe = Reading(Server(reply(200), takes_s=1e6))
    with caplog.at_level(logging.ERROR):
        found = watch(probe, 2.0 * (LIMIT_S + GRACE_S) + 2.0)
    assert [evidence.sign for evidence in found] == [Sign.NEUTRAL] * 2
    assert "TimeoutError()" in caplog.records[0].getMessage()


@pytest.mark.parametrize("where", ["page_error", "read_error"])
def test_an_exception_is_neutral_evidence_and_the_next_run_comes(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    probe = Reading(Server(reply(200)))
    setattr(probe, where, KeyError("u"))
    with caplog.at_level(logging.ERROR):
        found = watch(probe, 2.5)
    assert [evidence.sign for evidence in found] == [Sign.NEUTRAL] * 3
    assert len(probe.began) == len(caplog.records) == 3


def test_a_finding_may_stop_the_probe() -> None:
    """The unit is taken out of the configuration by what follows from it."""
    probe = Reading(Server(reply(200)))
    found: list[Finding] = []

    async def main() -> None:
        agenda, runners = Agenda(asyncio.get_running_loop()), list[Runner]()

        def take(finding: Finding) -> None:
            found.append(finding)
            runners[0].stop()

        runners.append(Runner(probe, LoopPatient(lambda _: reply(200)), take, random.Random(1), agenda))
        runners[0].start()
        await asyncio.sleep(10.0)

    run(World(1), main())
    assert len(found) == len(probe.began) == 1
