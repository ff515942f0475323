"""The abuse suite on itself: it sees harm where harm is done, and none where a gate is well."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import uvloop

from loadtests.abuse.client import ask
from loadtests.abuse.heads import HEADS
from loadtests.abuse.nouns import Abuse, Got, Place
from loadtests.abuse.stage import Stage
from loadtests.abuse.trial import attempt
from loadtests.abuse.verdict import Try
from loadtests.wire.messages import get

STOPPED_S = 0.6
QUICK = ("long-target", "two-lengths")


async def stop_it(place: Place) -> Got:
    """What no client can do: everyone waits for so long, and one of them has no answer."""
    os.kill(place.gate.pid, signal.SIGSTOP)
    asking = asyncio.create_task(ask(place.gate.port, get("/v1/models"), patience_s=STOPPED_S / 2))
    await asyncio.sleep(STOPPED_S)
    os.kill(place.gate.pid, signal.SIGCONT)
    return Counter([await asking])


async def tries(abuses: list[Abuse]) -> list[Try]:
    async with Stage() as stage:
        return [await attempt(stage, abuse) for abuse in abuses]


def test_the_suite_tells_harm_from_none() -> None:
    quick = [abuse for abuse in HEADS if abuse.name in QUICK]
    *harmless, harmed = uvloop.run(tries([*quick, Abuse("stop", "stops the gate", stop_it)]))
    assert len(harmless) == len(QUICK)
    for each in harmless:
        assert set(each.got) <= {"431 head_too_large", "400 bad_request", "413 body_too_large"}, each.line()
        assert each.lost == 0, each.line()
        assert each.cpu_s < STOPPED_S / 2, each.line()
    assert harmed.wait_s > STOPPED_S / 2, harmed.line()
    assert harmed.got == {"hang": 1}
    problems = harmed.problems()
    assert "got 'hang' (1 times)" in problems
    assert any(problem.startswith("a neighbour waited") for problem in problems), problems
