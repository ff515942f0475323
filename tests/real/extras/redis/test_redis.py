"""Gates that share a real Redis: what they hear of each other, and that nothing it suffers harms them."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from cellgate.extras.redis.link import LinkState, RedisLink
from cellgate.extras.redis.reports import (
    DOCUMENT_BEATS,
    EXPIRY_HEARTBEATS,
    HEARTBEAT_S,
    Seen,
    UnitReport,
    written,
)
from cellgate.extras.redis.roster import Roster
from cellgate.extras.redis.sharing import UnitChanges
from cellgate.extras.redis_client.connect import connector, in_words
from cellgate.extras.redis_client.redis_names import Names
from cellgate.proxy.config.settings import RedisAccess, Tls
from cellgate.router.nouns import Verdict
from tests.real.programs import ROOT
from tests.real.redis_server import RedisServer
from tests.wire.stage import NO_TLS, live, live_for

pytestmark = pytest.mark.alone

PAGE = ROOT / "docs" / "redis.md"
BEAT_S = 0.1
EXPIRY_S = BEAT_S * EXPIRY_HEARTBEATS
PATIENCE_S = 30.0
STALL_S = 0.5
"""What a busy machine may add to a time; the drills measure on a quiet one."""
LOOK_S = 1.5
"""Longer than an exchange with Redis may take."""
LONG_TURN_S = 0.02


class Gate:
    """One gate's side: what it tells of two units, what it hears, and what it says to its operator."""

    def __init__(
        self, name: str, url: str, *, beat_s: float = BEAT_S, tls: Tls = NO_TLS, **credentials: str
    ) -> None:
        self.name = name
        self.views = [
            UnitReport(unit, "a", name, Verdict.UP, f"http://{unit}:8000", in_flight=5)
            for unit in ("u1", "u2")
        ]
        self.now = asyncio.get_running_loop().time
        self.roster = Roster(name, beat_s)
        self.lines: list[str] = []
        self.flips: list[tuple[float, Seen]] = []
        self.link = RedisLink(
            connector(RedisAccess(url, **credentials), tls),
            name,
            self.changes,
            self.roster,
            now=self.now,
            rng=random.Random(1),
            on_flip=lambda seen: self.flips.append((time.perf_counter(), seen)),
            tell=self.lines.append,
            names=Names(),
            heartbeat_s=beat_s,
        )

    def changes(self) -> UnitChanges:
        """What it publishes."""
        views = [replace(view, at_s=self.now()) for view in self.views]
        return UnitChanges(views, cells={"a"})

    def flip(self, verdict: Verdict) -> None:
        """A verdict of its own changes."""
        number = self.views[0].number + 1
        self.views[0] = replace(self.views[0], verdict=verdict, number=number, at_s=self.now())
        self.link.flipped(self.views[0])

    def others(self) -> int:
        """How many requests the others have on u1."""
        return self.roster.remote_load("u1", self.now()).in_flight


LATE = "no answer within"
"""The reason when the machine was too busy for an exchange; it says nothing of Redis."""


def faults(*gates: Gate) -> list[str]:
    """What these gates have said against Redis, but that it was late."""
    said = [line for gate in gates for line in gate.lines]
    return [line for line in said if "Redis answers" not in line and LATE not in line]


async def until(is_so: object, within_s: float = PATIENCE_S) -> float:
    """Wait for what must come to be; returns how long that took."""
    assert callable(is_so)
    began_at = time.perf_counter()
    while not is_so():
        assert time.perf_counter() - began_at < within_s
        await asyncio.sleep(0.002)
    return time.perf_counter() - began_at


@asynccontextmanager
async def linked(*gates: Gate) -> AsyncIterator[None]:
    """Gates whose links run."""
    for gate in gates:
        gate.link.start()
    try:
        yield
    finally:
        for gate in gates:
            await gate.link.close()


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[RedisServer, Gate, Gate]]:
    """A Redis and two gates, once they hear of each other."""
    with RedisServer(folder) as server:
        one, other = Gate("g1", server.url), Gate("g2", server.url)
        async with linked(one, other):
            await until(lambda: one.others() == 5 and other.others() == 5)
            yield server, one, other


@live
async def test_gates_hear_of_each_others_units(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, one, other):
        report = one.roster.said("u1", "g2")
        assert report is not None
        assert replace(report, at_s=None) == other.views[0]
        assert one.lines == ["Redis answers: this gate shares evidence with other gates"]
        # As docs/redis.md shows it.
        assert server.do("SMEMBERS", "cellgate:cells") == {b"a"}
        assert server.do("SMEMBERS", "cellgate:cell:a") == {b"g1", b"g2"}
        document = server.do("HGET", "cellgate:units:g1", "u1")
        assert document.startswith(b'{"v":1,"unit":"u1","cell":"a","gate":"g1"')
        assert 0 < server.do("PTTL", "cellgate:units:g1") <= 1000 * EXPIRY_S * DOCUMENT_BEATS
        assert server.do("GET", "cellgate:{beat}:g1").startswith(b'{"v":1,"gate":"g1","beat":')
        assert 0 < server.do("PTTL", "cellgate:{beat}:g1") <= 1000 * EXPIRY_S


@live
async def test_a_flip_is_heard_at_once_and_once(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        one, other = Gate("g1", server.url, beat_s=HEARTBEAT_S), Gate("g2", server.url, beat_s=HEARTBEAT_S)
        async with linked(one, other):
            await until(lambda: one.others() and len(other.flips) >= 2)
            await asyncio.sleep(2 * HEARTBEAT_S)
            other.flips.clear()
            took_s = []
            for number in range(30):
                verdict = Verdict.SUSPECT if number % 2 else Verdict.DOWN
                at = time.perf_counter()
                one.flip(verdict)
                await until(lambda n=number: len(other.flips) > n)
                took_s.append(other.flips[-1][0] - at)
                assert other.flips[-1][1].report.verdict is verdict
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * HEARTBEAT_S)
    assert len(other.flips) == 30
    took_s.sort()
    print(f"a flip: median {1000 * took_s[15]:.1f} ms, p97 {1000 * took_s[28]:.1f} ms")
    # Told by the beats alone, half of them would take longer than half a heartbeat.
    assert took_s[15] < 0.05


@live
async def test_a_gate_that_dies_stops_counting_within_one_expiry(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, one, other):
        await other.link.close()
        assert await until(lambda: one.others() == 0) <= EXPIRY_S + BEAT_S + STALL_S
        # What it said of its units' health holds until somebody has asked it.
        await until(lambda: one.roster.missed(one.now()) == {"g2"})
        assert one.roster.units() == {"u1", "u2"}
        one.roster.not_ready({"g2"}, one.now())
        assert one.roster.units() == set()


@live
async def test_killed_and_back_empty_it_empties_no_fleet_and_views_heal_in_two_heartbeats(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (server, one, other):
        server.kill()
        await until(lambda: one.link.state is other.link.state is LinkState.AWAY)
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert one.roster.units() == {"u1", "u2"}
            assert one.roster.missed(one.now()) == set()
        server.start()
        healed_s = await until(lambda: one.others() == 5 and other.others() == 5)
        assert one.roster.missed(one.now()) == set()
        assert len(one.lines) == 3
    print(f"healed {1000 * healed_s:.0f} ms after the first answer of a Redis that came back")
    assert healed_s < 2 * BEAT_S + STALL_S


@live_for(30.0)
async def test_frozen_it_delays_nothing(tmp_path: Path) -> None:
    """Whoever waited for it would lose a second each time. What a busy machine takes from the loop, it takes
    beside a Redis that is well, too: the best of three looks at both counts.
    """
    added_s: list[float] = []
    async with pair(tmp_path) as (server, one, _):
        while not added_s or (min(added_s) > 0.1 and len(added_s) < 3):
            await until(lambda: one.others() == 5 and one.link.state is LinkState.WELL)
            beside_well_s = await lost_s(one)
            server.freeze()
            added_s.append(await lost_s(one) - beside_well_s)
            await until(lambda: one.link.state is LinkState.AWAY)
            assert one.lines[-1].startswith("Redis does not answer (no answer within 1 s)")
            assert one.roster.units() == {"u1", "u2"}
            server.thaw()
        await until(lambda: one.others() == 5 and one.link.state is LinkState.WELL)
    print(f"the loop lost {[f'{1000 * lost:.0f} ms' for lost in added_s]} more beside a frozen Redis")
    assert min(added_s) <= 0.1


async def lost_s(gate: Gate) -> float:
    """What long turns of the loop took of LOOK_S, while verdicts change as fast as it turns."""
    lost_s, until_s = 0.0, time.perf_counter() + LOOK_S
    while (at := time.perf_counter()) < until_s:
        gate.flip(Verdict.UP)
        await asyncio.sleep(0.001)
        lost_s += max(0.0, time.perf_counter() - at - LONG_TURN_S)
    return lost_s


@live
async def test_full_it_is_still_read(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, one, _):
        server.do("CONFIG", "SET", "maxmemory", "1")
        await until(lambda: one.link.state is LinkState.FULL)
        assert one.link.counts["writes_refused"]
        assert one.lines[-1].startswith("Redis takes no writes (it is full, or read-only); ")
        lines = len(one.lines)
        await asyncio.sleep(3 * BEAT_S)
        assert len(one.lines) == lines
        server.do("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: one.link.state is LinkState.WELL and one.others() == 5)


@live
async def test_garbage_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as (server, one, _):
        names = Names()
        garbage = [b"", b"\xff" * 300, b"{}", b"[1]", b'{"v":1,"unit":"u1"}', b"9" * 100_000]
        beat = b'{"v":1,"gate":"g9","beat":1,"units":{}}'
        server.do("SADD", names.gates_of("a"), "g8", "g9", "a:colon", ":::", "\xff", "")
        for number, document in enumerate(garbage):
            server.do("HSET", names.units_of("g9"), f"u{number}", document)
            server.do("PUBLISH", names.flips, document)
        server.do("PUBLISH", names.flips, written(replace(one.views[0], gate="g77")))
        # One that pretends to be another gate's; and a list where a hash should be.
        server.do("HSET", names.units_of("g9"), "u9", server.do("HGET", names.units_of("g2"), "u1"))
        server.do("LPUSH", names.units_of("g8"), "a list")
        server.do("SET", names.beat("g8"), beat.replace(b"g9", b"g8"), "PX", 600)
        server.do("SET", names.beat("g9"), beat, "PX", 600)
        refused = one.link.counts["documents_refused"]
        await until(lambda: one.link.counts["documents_refused"] > refused + len(garbage))
        assert one.roster.units() == {"u1", "u2"}
        assert one.others() == 5
        assert {seen.report.gate for _, seen in one.flips} == {"g2"}
        assert len(one.lines) == 1
        server.do("DEL", names.gates_of("a"), names.cells)
        server.do("SET", names.gates_of("a"), "a text where the index was")
        await asyncio.sleep(3 * BEAT_S)
        server.do("DEL", names.gates_of("a"))
        await until(lambda: one.others() == 5)
        assert len(one.lines) == 1


@live
async def test_the_rights_that_the_page_names_are_enough(tmp_path: Path) -> None:
    found = re.search(r"ACL user with `([^`]+)`, keys `([^`]+)` and\s+channel\s+`([^`]+)`", PAGE.read_text())
    assert found is not None
    with RedisServer(tmp_path) as server:
        server.do("ACL", "SETUSER", "gate", "on", ">right", *found[1].split(), *found.groups()[1:])
        gates = [Gate(name, server.url, username="gate", password="right") for name in ("g1", "g2")]
        async with linked(*gates):
            await until(lambda: all(gate.others() == 5 for gate in gates))
            gates[0].flip(Verdict.DOWN)
            await until(lambda: gates[1].flips[-1][1].report.verdict is Verdict.DOWN)
            assert faults(*gates) == []
        assert server.do("ACL", "LOG") == []


@live
async def test_a_user_that_may_read_but_not_write_there_is_told_as_such(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.do("ACL", "SETUSER", "gate", "on", ">right", "+@all", "%R~cellgate:*", "&cellgate:flips")
        one, other = Gate("g1", server.url, username="gate", password="right"), Gate("g2", server.url)
        async with linked(one, other):
            await until(lambda: one.link.state is LinkState.FULL and one.others() == 5)
            assert one.link.counts["writes_refused"]
            assert one.link.counts["documents_written"] == 0
        (line,) = one.lines
        assert line.startswith("Redis takes no writes (its access control list does not let this user write")


@live
async def test_what_is_no_redis_is_told_as_such() -> None:
    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(visit, "127.0.0.1", 0)
    one = Gate("g1", f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", password="secret")
    async with linked(one):
        await until(lambda: one.link.counts["failures"] >= 2)
    server.close()
    assert one.lines[0].startswith("Redis does not answer (")
    assert not any("secret" in line for line in one.lines)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://h",
        "redis//h",
        "redis://h:port",
        "redis://h:70000",
        "localhost:6379",
        "redis://h/0?ssl_cert_reqs=none",
        "redis://me:secret@h",
        "unix://me:secret@/run/redis.sock",
        "rediss://:secret@[::1]:6379",
        "redis://h:6379\n",
    ],
)
def test_a_url_that_is_none_is_refused_in_one_line_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL such as redis://HOST:PORT/0, ") as caught:
        connector(RedisAccess(url))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://h", "redis://[::1]:6379/2", "rediss://h:6380/0", "unix:///a?db=3"])
def test_a_url_that_is_one_is_taken(url: str) -> None:
    assert connector(RedisAccess(url))() is not None


@pytest.mark.parametrize("error", [TimeoutError(), RedisTimeoutError("Timeout connecting to server")])
def test_a_silence_is_told_alike_whoever_has_ended_the_wait(error: Exception) -> None:
    assert in_words(error) == "no answer within 1 s"
