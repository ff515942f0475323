"""An admin port with a Board that a test moves by hand, and a browser before it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from cellgate.proxy.admin.http import AdminServer
from cellgate.proxy.admin.pages import AdminView, admin_server
from cellgate.proxy.config.settings import Peers
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Cell, Evidence, Fleet, Node, Role, Rules, Sign, Strength, Unit
from tests.browser.chromium import Page, tab

TOKEN = "open sesame"
PHOTOS = os.environ.get("CELLGATE_PHOTOS")
"""A folder, when somebody wants to look at the photographs."""


@dataclass
class Stage:
    """What a test has: the page, the Board behind it, and the port's address."""

    page: Page
    board: Board
    events: EventLog
    url: str
    server: AdminServer
    listening: asyncio.Server
    now: float = 1000.0
    history: dict[str, Any] = field(default_factory=dict)
    roll: dict[str, Any] | None = None

    def say(
        self, unit: str, sign: Sign, strength: Strength, source: str, reason: str, node: str | None = None
    ) -> None:
        """One piece of evidence, and the event if it flips the unit."""
        said = self.board.observe(Evidence(unit, sign, strength, source, reason, self.now, node=node))
        if said.flip is not None:
            self.events.add(said.flip, said.evicted)

    def bring_up(self, units: Iterable[str]) -> None:
        """Canaries pass, and agents are content."""
        for name in units:
            self.say(name, Sign.GOOD, Strength.STRONG, "canary", "one token in 40 ms")
            for node in self.board.units[name].unit.nodes:
                self.say(name, Sign.GOOD, Strength.WEAK, "agent", "all processes run", node.name)

    def kill_node(self, unit: str, node: str) -> None:
        """An agent sees a process gone."""
        self.say(unit, Sign.BAD, Strength.FATAL, "agent", "gone: process 4711 (VLLM::Worker_TP1)", node)

    def drain(self, unit: str) -> None:
        """As an operator does."""
        self.board.drain(unit, drained=True)
        self.events.add(Action("drain", "127.0.0.1", unit))

    async def photograph(self, name: str) -> None:
        """Take a photograph, which must not be of nothing."""
        photo = await self.page.photograph()
        assert len(photo) > 8000
        if PHOTOS:
            (Path(PHOTOS) / f"{name}.png").write_bytes(photo)


def fleet(cells: int, units: int, nodes: int = 2) -> Fleet:
    """Cells a, b, … of so many units each, of so many nodes each."""
    names = [chr(ord("a") + number) for number in range(cells)]
    ports = count(8000)
    return Fleet(
        tuple(Cell(name) for name in names),
        tuple(
            Unit(
                f"{cell}{number}",
                cell,
                f"http://127.0.0.1:{next(ports)}",
                models=("tiny",),
                nodes=tuple(
                    Node(f"{cell}{number}-{rank}", Role.FOLLOWER if rank else Role.LEADER)
                    for rank in range(nodes)
                ),
            )
            for cell in names
            for number in range(1, units + 1)
        ),
    )


def failed_roll(**keys: Any) -> dict[str, Any]:
    """A roll to 2.0 of four units, which failed at the second one. Without the extra there is none."""
    from cellgate.extras.operator.roll_plan import Phase, Roll, RollStatus, UnitRoll, roll_view

    units = (
        UnitRoll("a1", "a", Phase.DONE, 60_000),
        UnitRoll("a2", "a", Phase.PROVING, 240_000, back=True, reason="it has not restarted"),
        UnitRoll("b1", "b", Phase.FAILED, 200_000, reason="it went DOWN while it was watched"),
        UnitRoll("b2", "b"),
    )
    said = "unit a2: it has not restarted 100 s after its command"
    roll = Roll("5f3c", "op", 1_000, units, RollStatus.STOPPED, said, version="2.0")
    shown: dict[str, Any] = orjson.loads(orjson.dumps(roll_view(roll, "gate-7", 252_000)))
    return shown | keys


async def leave(server: AdminServer, listening: asyncio.Server) -> None:
    """Answer no more."""
    listening.close()
    await server.close()


def before(units: Fleet) -> Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], Callable[[int], None]]:
    """Run an async test with a page of these units, all of them up, in a tab of its own."""

    def bound(test: Callable[[Stage], Coroutine[Any, Any, None]]) -> Callable[[int], None]:
        def run(browser: int) -> None:
            asyncio.run(_show(browser, units, test))

        return run

    return bound


async def _show(browser: int, units: Fleet, test: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    board = Board(Rules())
    board.configure(units, 900.0)
    events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)

    def shown() -> dict[str, Any] | None:
        return stage.roll

    view = AdminView(
        board=board,
        events=events,
        metrics=Metrics(board),
        now=lambda: stage.now,
        stopping=lambda: False,
        set_drain=lambda name, drained: board.drain(name, drained=drained),
        token=lambda: TOKEN,
        peers=Peers(()),
        explain=lambda *_: {},
        queue_size=lambda: 3,
        history=lambda: stage.history,
        roll=shown,
    )
    server = admin_server(view)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
    try:
        async with tab(browser) as page:
            stage = Stage(page, board, events, url, server, listening)
            stage.bring_up(unit.name for unit in units.units)
            await test(stage)
            assert page.problems == []
    finally:
        await leave(server, listening)
