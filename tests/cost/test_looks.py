"""What a look of a probe costs: a plane with all its probes, before units that answer at once. In virtual
time.

Most looks bring what the one before has brought. With a thousand units of four nodes thousands are made each
second, so each bytecode of one counts, and nothing of them may be left to the collector.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import cast

import pytest

from cellgate.probes.nodes import HttpProbe
from cellgate.probes.readiness import Readiness
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.plane import Front, Plane
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.process.signals import Ticker
from cellgate.router import attention
from cellgate.router.nouns import Cell, Fleet, Node, Role, Unit, Verdict
from loadtests.kit.mock_fleet import page
from loadtests.wire.messages import whole
from tests.cost.bench import Wire, counted
from tests.sim.loop import SimLoop
from tests.sim.network import Network

UNITS, MEASURED = 60, 2_790
"""A fleet in which idle units are asked as often as others, and the bytecodes of a look in the mean, with the
clocks of its units."""
MANY, MEASURED_OF_MANY = 80, 1_400
"""The same of one where idle units may rest. Later there are ever fewer looks ..."""
A_SECOND = 1_390
"""... and these are the bytecodes of a unit a second, when they have rested for two minutes (8,444 without
rest), in the mean of one in which all is asked that is ever asked."""
SETTLE_S, BEGUN_S, RESTED_S = 40.0, 6.0, 125.0
FOR_S, A_MINUTE_S = 2.5, 60.0
PAGE = 1_030
"""Bytecodes of a look at a page of a node that rests, and says what it always says (1,822 before)."""
BUSY_PAGE, READY = 925, 1_360
"""The same of one that does not rest, and of a look at a readiness page (1,383 and 2,371 before)."""
ANSWERS_S = 0.001
MARGIN = 1.1

_OURS = re.compile("/cellgate/(probes|proxy|router)/")
_BODY = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length"}]}'
_ANSWERS = {
    b"GET /health": whole(b""),
    b"GET /node": whole(b"ok"),
    b"GET /metrics": whole(b"".join(page(50.0, busy=False)), kind=b"text/plain"),
    b"GET /v1/models": whole(b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"vllm"}]}'),
    b"GET /version": whole(b'{"version":"0.11.0"}'),
    b"POST /v1/chat/completions": whole(_BODY),
}


class AnsweringWire(Wire):
    """A connection to a unit: each request is answered a moment later."""

    def __init__(self, loop: SimLoop, conn: asyncio.Protocol, asked: Counter[bytes]) -> None:
        super().__init__()
        self._loop, self._conn, self._asked = loop, conn, asked
        self._is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        line = b" ".join(bytes(data).split(b" ", 2)[:2])
        self._asked[line] += 1
        answer = _ANSWERS.get(line) or whole(b"", status=b"404 Not Found")
        self._loop.outside(ANSWERS_S, self._conn.data_received, answer)

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.outside(0.0, self._conn.connection_lost, None)

    abort = close


class AnsweringNetwork:
    """Every address is a unit, or a node of one; `asked` counts what."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.asked: Counter[bytes] = Counter()

    async def resolve(self, _host: str) -> list[str]:
        return ["127.0.0.1"]

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], _host: str, _port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        conn = factory()
        wire = AnsweringWire(self._loop, conn, self.asked)
        conn.connection_made(wire)
        return wire, conn


def unit_of_four(number: int) -> Unit:
    """A leader, and three followers with a page each."""
    followers = [
        Node(f"n{number}-{n}", Role.FOLLOWER, probes=(HttpProbe(url=f"http://f{number}-{n}/node"),))
        for n in range(1, 4)
    ]
    return Unit(f"u{number}", "c", f"http://u{number}", nodes=(Node("n", Role.LEADER), *followers))


async def up(loop: SimLoop, units: int, settle_s: float) -> Plane:
    """A plane whose units are all up and idle."""
    fleet = Fleet((Cell("c"),), tuple(unit_of_four(number) for number in range(units)))
    ticker, events = Ticker(loop), EventLog(lambda: 0.0, 2, lambda *_: None)
    plane = Plane(Settings(fleet), loop, random.Random(1), ticker, events=events)
    nobody = SimpleNamespace(connections=dict, is_full=bool, seen_until=lambda now: now)
    plane.front = cast(Front, nobody)
    ticker.looks.append(plane.reach.tick)
    plane.begin()
    ticker.start()
    await asyncio.sleep(settle_s)
    assert {state.case.verdict for state in plane.board} == {Verdict.UP}
    return plane


def watched(
    for_s: float = FOR_S, units: int = UNITS, settle_s: float = SETTLE_S, *, only: str = ""
) -> tuple[Counter[CodeType], int, list[object]]:
    """What an idle fleet costs in so many seconds: bytecodes, looks, and what is left to the collector.
    `only`: of looks of this probe alone.
    """
    loop = SimLoop()
    network = AnsweringNetwork(loop)
    loop.network = cast(Network, network)
    garbage: list[object] = []

    async def main() -> tuple[Counter[CodeType], int]:
        plane = await up(loop, units, settle_s)
        if only:
            _leave(plane, only)
        gc.collect()
        network.asked.clear()
        with counted() as counts:
            await asyncio.sleep(for_s)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            garbage.extend(gc.garbage)
            gc.garbage.clear()
        plane.ticker.stop()
        await plane.close()
        return counts, network.asked.total()

    try:
        return (*loop.run_until_complete(main()), garbage)
    finally:
        loop.close()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the budget is in bytecodes of CPython 3.11")
def test_a_look_costs_no_more_than_it_did_and_leaves_nothing_to_the_collector() -> None:
    counts, looks, garbage = watched()
    assert looks > 4.0 * UNITS * FOR_S
    ours = [(n, code) for code, n in counts.items() if _OURS.search(code.co_filename)]
    dear = "\n".join(f"{n / looks:8.1f}  {c.co_qualname}" for n, c in sorted(ours, key=lambda x: -x[0])[:15])
    each = sum(n for n, _ in ours) / looks
    print(f"{each:.0f} bytecodes a look")
    assert each <= MARGIN * MEASURED, f"{each:.0f} bytecodes, most of them here:\n{dear}"
    assert not garbage, Counter(type(thing).__name__ for thing in garbage).most_common(5)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the budget is in bytecodes of CPython 3.11")
def test_a_look_at_many_units_costs_less_and_an_idle_unit_costs_ever_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        # They may rest, and do not yet: the same looks as in a small fleet.
        patch.setattr(attention, "REST_AFTER_S", 8.0)
        counts, looks, _ = watched(units=MANY, settle_s=BEGUN_S)
    each = _of_ours(counts) / looks
    assert looks > 3.5 * MANY * FOR_S
    counts, _, _ = watched(A_MINUTE_S, MANY, RESTED_S)
    a_second = _of_ours(counts) / MANY / A_MINUTE_S
    print(f"{each:.0f} bytecodes a look at first; later {a_second:.0f} a unit a second")
    assert each <= MARGIN * MEASURED_OF_MANY
    assert a_second <= MARGIN * A_SECOND


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the budget is in bytecodes of CPython 3.11")
def test_a_page_of_a_node_that_rests_and_says_what_it_always_says_costs_little() -> None:
    counts, looks, _ = watched(10.0, MANY, SETTLE_S, only=HttpProbe.kind)
    print(f"{_of_ours(counts) / looks:.0f} bytecodes a look at a page")
    assert looks > 1.5 * MANY
    assert _of_ours(counts) / looks <= MARGIN * PAGE


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the budget is in bytecodes of CPython 3.11")
@pytest.mark.parametrize(("probe", "most"), [(HttpProbe.kind, BUSY_PAGE), (Readiness.name, READY)])
def test_a_page_that_says_what_it_said_before_costs_little_on_any_kept_connection(
    probe: str, most: int
) -> None:
    counts, looks, _ = watched(4.0, UNITS, 10.0, only=probe)
    print(f"{_of_ours(counts) / looks:.0f} bytecodes a look")
    assert looks > 3.0 * UNITS
    assert _of_ours(counts) / looks <= MARGIN * most


def _leave(plane: Plane, probe: str) -> None:
    """End all other probes: those of another name, or kind."""
    plane.ticker.stop()
    for runner in (runner for runners in plane.prober._all.values() for runner in runners):
        if runner.probe_name.partition(" ")[0] != probe:
            runner.stop()


def _of_ours(counts: Counter[CodeType]) -> int:
    return sum(n for code, n in counts.items() if _OURS.search(code.co_filename))
