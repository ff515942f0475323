"""Which processes are killed because they stand still, and which are not."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.workers.supervisor import (
    CONTROL,
    CONTROL_STILL_S,
    LATE_S,
    WORKER_STILL_S,
    Child,
    ControlStart,
    Supervisor,
)
from cellgate.router.nouns import Fleet

NOW = 1000.0


async def never(_: ControlStart) -> int:
    raise AssertionError("nothing is started here")


class Scene:
    """A supervisor with a control process and two workers that began at 0 and were alive at NOW."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[int] = []
        monkeypatch.setattr(os, "kill", self._kill)
        settings = Settings(Fleet(), workers=2)
        self.supervisor: Any = Supervisor(settings, lambda: settings, {}, None, never)
        self.page = self.supervisor._page
        for number in (CONTROL, 0, 1):
            line = socket.socket()
            line.close()
            self.supervisor._children[number] = Child(number, 100 + number, line, 0.0)
            self.page.beat(number, NOW)

    def _kill(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(pid - 100)

    def look(self, now: float) -> list[int]:
        """Who is killed at that time."""
        self.supervisor._replace_still(now)
        killed, self.killed = self.killed, []
        return killed


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    yield scene
    for each in (scene.supervisor._selector, scene.supervisor._woken, scene.supervisor._waker):
        each.close()


def test_the_control_process_is_given_less_time_than_a_worker_and_each_is_killed_once(scene: Scene) -> None:
    assert scene.look(NOW + CONTROL_STILL_S) == []
    assert scene.look(NOW + CONTROL_STILL_S + 0.1) == [CONTROL]
    assert scene.look(NOW + CONTROL_STILL_S + 0.2) == []
    scene.page.beat(CONTROL, NOW + WORKER_STILL_S)
    scene.page.beat(1, NOW + 1.0)
    assert scene.look(NOW + WORKER_STILL_S + 0.1) == [0]


def test_who_has_only_begun_has_time_to_begin(scene: Scene) -> None:
    scene.page.await_beat(CONTROL)
    for worker in (0, 1):
        scene.page.beat(worker, NOW + 1.0)
    scene.supervisor._children[CONTROL].began_at = NOW
    assert scene.look(NOW + LATE_S) == []
    assert scene.look(NOW + LATE_S + 0.1) == [CONTROL]


def test_after_the_supervisor_was_held_up_itself_all_have_their_time_anew(scene: Scene) -> None:
    scene.supervisor._judges_from = NOW + 10.0
    assert scene.look(NOW + 9.9) == []
    assert scene.look(NOW + 10.0) == [CONTROL]


def test_who_is_ending_is_not_looked_at(scene: Scene) -> None:
    scene.supervisor._end_by = NOW + 100.0
    assert scene.look(NOW + 99.0) == []
