"""A writer in Redis that is no gate: what it can say of units, of limits, and where a router sends to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cellgate.extras.redis.commands import RedisCommands
from cellgate.extras.redis.fleet import FleetUnits
from cellgate.extras.redis.link import FLIPS_AT_ONCE, FLIPS_PAUSE_S, Pace
from cellgate.extras.redis.reports import BeatWriter, UnitReport, written
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.sharing import DOUBT_EVERY_S, PEERS_LIFE_S, ReportReading
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import Command
from cellgate.extras.redis_client.signing import Signer, signer_of
from cellgate.proxy.admission.limits import IMPOSSIBLE, Meter, Period
from cellgate.proxy.config.settings import RedisAccess, Settings
from cellgate.router.nouns import Fleet, Verdict
from tests.unit.extras.redis.test_sharing import Gate

NAMES, NOW = Names(), 1000.0
REPORT = UnitReport("u", "c", "evil", Verdict.UP, "http://10.6.6.6:80", gate_url="http://10.6.6.6:8000")


class Store:
    """A Redis that has one gate's documents."""

    def __init__(self, signer: Signer) -> None:
        writer = BeatWriter("evil")
        writer.take(REPORT, NOW)
        beat, unit = NAMES.beat("evil"), NAMES.unit("u", "evil")
        self._beat = signer.sign(beat, writer.beat(NOW, has_prefixes=False)[0])
        self._documents = {b"u": signer.sign(unit, written(REPORT))}

    async def exchange(self, commands: Sequence[Command], _limit_s: float = 1.0) -> list[Any]:
        """Answers to MGET of one key and HSCAN."""
        answers = {"MGET": [self._beat], "HSCAN": (0, self._documents)}
        return [answers[str(word)] for word, *_ in commands]


@pytest.mark.parametrize(
    ("settings", "secret", "expected"),
    [
        (Settings(Fleet(), fleet_secret="s"), b"", 0),
        (Settings(Fleet(), fleet_secret="s"), b"guessed", 0),
        (Settings(Fleet()), b"", 0),
        (Settings(Fleet(), admin_token="t"), b"", 0),
        (Settings(Fleet(), fleet_secret="s"), b"s", 1),
    ],
)
def test_a_router_has_no_unit_of_a_gate_that_has_not_signed(
    settings: Settings, secret: bytes, expected: int
) -> None:
    """With a secret, with an admin token or with neither; however often it looks."""
    roster, counts = Roster("router"), dict.fromkeys(("beats_read", "documents_read", "documents_refused"), 0)
    reading = ReportReading(roster, lambda: NOW, 0.75, counts, lambda *_: None)
    signer = signer_of(settings, routes=True)
    commands = RedisCommands(Store(Signer(secret, must=True)), NAMES, signer)  # type: ignore[arg-type]

    async def look() -> None:
        for _ in range(60):
            await reading.read(commands, {"evil"})

    asyncio.run(look())
    assert len(FleetUnits(roster).refresh(NOW)) == expected
    assert (counts["documents_refused"] == 0) == bool(expected)


def test_gates_without_a_secret_believe_each_other_and_with_one_only_who_has_it() -> None:
    assert RedisAccess("redis://a").prefix
    assert [
        signer_of(Settings(Fleet(), fleet_secret=secret, admin_token="t"), routes=False).must
        for secret in (None, "s")
    ] == [False, True]


def test_others_word_that_a_unit_lives_stands_in_for_an_own_canary_for_a_while() -> None:
    here = Gate()
    state = here.board.units["u1"]
    state.progress_at = -60.0
    here.hears(life_age_s=0.0)
    here.sharing.tick(10.0)
    assert state.progress_at == PEERS_LIFE_S - 60.0


def test_a_unit_that_is_called_down_a_thousand_times_gets_one_canary_a_second() -> None:
    here = Gate()
    for _ in range(1000):
        here.hears(verdict=Verdict.DOWN)
    assert len(here.consequences) == 1
    here.sharing._doubted_at["u1"] -= DOUBT_EVERY_S
    here.hears(verdict=Verdict.DOWN)
    assert len(here.consequences) == 2


def test_a_channel_that_is_flooded_is_left_alone_in_between() -> None:
    at = 0.0
    pace, read = Pace(lambda: at), 0
    while at < 1.0:
        at += pace.pause_s()
        read += 1
    assert read <= FLIPS_AT_ONCE / FLIPS_PAUSE_S + FLIPS_AT_ONCE


@pytest.mark.parametrize(("total", "left"), [(10**15, 90), (-(10**15), 90), (100, 10)])
def test_a_counter_that_cannot_be_refuses_nobody_and_lifts_no_limit(total: int, left: int) -> None:
    meter = Meter(100, Period.MINUTE, 0.0, gates=2)
    meter.spent = 10
    meter.took(20, total)
    assert meter.left <= left
    assert (total == 100) or meter.has_room(1)
    assert IMPOSSIBLE * 100 < 10**15
