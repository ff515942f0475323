"""Descriptors: whether they are enough at start, and who comes in while they run short."""

from __future__ import annotations

import resource

import pytest

from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.process import listeners
from cellgate.proxy.process.listeners import EPISODE_S, FRESH_S, Descriptors
from cellgate.router.nouns import Cell, Fleet, Unit

SETTINGS = Settings(Fleet((Cell("c"),), tuple(Unit(name, "c", f"http://{name}") for name in "ab")))
"""Two units of 256 requests each."""


class Process:
    """One that may have 100 descriptors, of which 8 are kept. `told` is what its operator heard."""

    def __init__(self, used: int) -> None:
        self.used = used
        self.told: list[str] = []
        self.counted = 0
        self.idle = 0
        self.descriptors = Descriptors(100, self.told.append, self._make_room, self._count)

    def _make_room(self, most: int) -> int:
        freed = min(most, self.idle)
        self.idle -= freed
        self.used -= freed
        return freed

    def _count(self) -> int:
        self.counted += 1
        return self.used

    def accepted(self, now: float = 0.0, most: int = 200) -> int:
        """How many come in one after the other before nobody may; each that comes has a descriptor."""
        for number in range(most):
            if not self.descriptors.has_room(now):
                return number
            self.used += 1
        return most


def test_of_those_that_come_at_once_no_more_are_accepted_than_can_have_a_unit_each() -> None:
    process = Process(used=20)
    accepted = process.accepted()
    assert 30 <= accepted <= 36
    assert process.used + accepted <= 92


def test_clients_that_ask_nothing_need_one_descriptor_each() -> None:
    process = Process(used=20)
    accepted = sum(process.accepted(now, most=2) for now in range(1, 100))
    assert process.used == 20 + accepted
    assert process.used >= 88


def test_who_left_makes_room() -> None:
    process = Process(used=20)
    process.accepted()
    process.used = 30
    assert process.accepted(2.0 * FRESH_S) > 10


def test_the_operator_hears_once_of_one_shortage() -> None:
    process = Process(used=93)
    assert not any(process.descriptors.has_room(float(now)) for now in range(30))
    assert process.told == [
        "93 of 100 file descriptors are in use: connections without a request are closed for new ones, and "
        "no client is accepted while there are none to close"
    ]
    assert not process.descriptors.has_room(30.0 + EPISODE_S)
    assert len(process.told) == 2


def test_idle_connections_make_way_for_those_who_come() -> None:
    process = Process(used=92)
    process.idle = 50
    # Whoever comes may need one to a unit as well.
    assert 20 <= process.accepted(now=10.0) < 50
    assert process.used <= 96
    assert process.idle == 0


def test_to_count_is_rare_while_there_is_room() -> None:
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 100

    many = Descriptors(65536, lambda line: None, lambda most: 0, count)
    assert all(many.has_room(number / 1000.0) for number in range(100_000))
    assert counted < 10


def test_without_a_limit_all_may_come() -> None:
    assert Descriptors(None, lambda line: None, lambda most: 0, lambda: 1_000_000).has_room(0.0)


@pytest.mark.parametrize(
    ("most", "workers", "said"),
    [
        (1024, 1, None),
        (63, 1, "workers: 1 requires 64 file descriptors, and the limit is 63; raise it with `ulimit -n`"),
        (100, 60, "workers: 60 requires 184 file descriptors, and the limit is 100 (enough for 18); raise"),
        (resource.RLIM_INFINITY, 1000, None),
    ],
)
def test_too_few_for_the_processes_themselves_is_one_line_at_start(
    most: int, workers: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, 4096))
    if said is None:
        listeners.check(workers)
    else:
        with pytest.raises(ConfigError) as error:
            listeners.check(workers)
        assert error.value.problems[0].startswith(said)
        assert "up to 4096 without privileges" in error.value.problems[0]


def test_too_few_for_what_units_take_is_said_with_the_limit_and_how_to_raise_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    line = listeners.shortage(SETTINGS)
    assert line.startswith(
        "1024 file descriptors are enough for about 480 requests at a time, but the units take 512"
    )
    assert "`ulimit -n` (up to 4096 without privileges)" in line
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1088, 4096))
    assert not listeners.shortage(SETTINGS)
