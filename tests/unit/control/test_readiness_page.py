"""When /readyz is rewritten, and when what was written is published again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from cellgate.proxy.control.plane import RENDER_S, ReadinessPage
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Fleet, Rules, Sign, Strength, Unit

AT = 100.0


class Shown:
    """A page before one unit that is UP; `pages` are those that were published."""

    def __init__(self) -> None:
        self.board = Board(Rules())
        self.board.configure(Fleet(units=(Unit("u", "c", "http://u"),)), AT)
        self.observe(Sign.GOOD, Strength.STRONG)
        self.full = False
        self.later: list[Callable[[], None]] = []
        self.pages: list[tuple[bool, bytes, bytes]] = []
        self.page = ReadinessPage(
            self.board, lambda *page: self.pages.append(page), self.later.append, lambda: self.full
        )
        self.page.tick(AT)

    def observe(self, sign: Sign, strength: Strength) -> None:
        self.board.observe(Evidence("u", sign, strength, "canary", "seen", AT))

    @property
    def is_ready(self) -> bool:
        ready: bool = self.pages[-1][0]
        assert self.body == self.body | {"ready": ready}
        return ready

    @property
    def body(self) -> Any:
        return orjson.loads(self.pages[-1][1])


def test_each_tick_publishes_and_the_page_is_written_once_a_second() -> None:
    shown = Shown()
    shown.observe(Sign.BAD, Strength.FATAL)
    shown.page.tick(AT + 0.25)
    assert len(shown.pages) == 2
    assert shown.is_ready
    shown.page.tick(AT + RENDER_S)
    assert len(shown.pages) == 3
    assert not shown.is_ready


def test_a_change_is_published_once_at_the_end_of_the_turn() -> None:
    shown = Shown()
    shown.observe(Sign.BAD, Strength.FATAL)
    shown.page.changed()
    shown.page.changed()
    assert len(shown.later) == 1
    shown.later[0]()
    assert not shown.is_ready
    shown.page.changed()
    assert len(shown.later) == 2


def test_what_changes_without_units_is_seen_on_the_next_tick() -> None:
    shown = Shown()
    shown.full = True
    shown.page.tick(AT + 0.25)
    assert not shown.is_ready
    shown.board.panic_at = AT
    shown.page.tick(AT + 0.5)
    assert shown.body["panic"]


def test_a_stopping_gate_is_not_ready() -> None:
    shown = Shown()
    shown.page.stopping = True
    shown.page.publish()
    assert not shown.is_ready
