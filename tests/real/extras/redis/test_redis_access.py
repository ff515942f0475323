"""How a gate comes to a real Redis: by TLS, as a user, under a prefix; and that it serves where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import Tls
from loadtests.simunit.process import SimUnit
from tests.real.asking import post
from tests.real.certificates import Certificate, authority, signed_by
from tests.real.extras.redis.test_redis import LATE, Gate, faults, linked, until
from tests.real.programs import free_port
from tests.real.redis_server import RedisServer
from tests.wire.process import GateProcess, eventually
from tests.wire.stage import PROCESSES_S, live, live_for

SECRET = "open-sesame"
BODY = orjson.dumps({"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "Why?"}]})


@contextmanager
def over_tls(folder: Path, ca: Certificate) -> Iterator[tuple[str, RedisServer]]:
    """A Redis that wants a client's certificate, as it does by default; and its URL."""
    port, own = free_port(), signed_by(ca, folder, "redis")
    options = ("--tls-port", str(port), "--tls-cert-file", own.cert, "--tls-key-file", own.key)
    with RedisServer(folder, *options, "--tls-ca-cert-file", ca.cert) as server:
        yield f"rediss://127.0.0.1:{port}/0", server


@live
async def test_by_tls_both_sides_show_who_they_are(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    shown = signed_by(ca, tmp_path, "gate")
    tls = Tls(ca=ca.cert, unit_cert=shown.cert, unit_key=shown.key)
    with over_tls(tmp_path, ca) as (url, _):
        one, other = Gate("g1", url, tls=tls), Gate("g2", url, tls=tls)
        async with linked(one, other):
            await until(lambda: one.others() == 5 and other.others() == 5)
            assert faults(one, other) == []


@live
async def test_a_redis_that_another_authority_vouches_for_is_not_believed(tmp_path: Path) -> None:
    ca, another = authority(tmp_path), authority(tmp_path, "another")
    shown = signed_by(ca, tmp_path, "gate")
    tls = Tls(ca=another.cert, unit_cert=shown.cert, unit_key=shown.key)
    with over_tls(tmp_path, ca) as (url, server):
        lines: list[str] = []
        while not lines:
            one = Gate("g1", url, tls=tls, password=SECRET)
            async with linked(one):
                await until(lambda one=one: one.link.counts["failures"] >= 3)
            lines = [line for line in one.lines if LATE not in line]
        assert server.do("DBSIZE") == 0
    (line,) = lines
    assert "certificate verify failed" in line
    assert SECRET not in line


@live
async def test_a_redis_that_wants_a_certificate_and_sees_none_is_told_as_such(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    with over_tls(tmp_path, ca) as (url, _):
        one = Gate("g1", url, tls=Tls(ca=ca.cert))
        async with linked(one):
            await until(lambda: one.link.counts["failures"] >= 3)
            assert one.link.counts["beats"] == 0
    assert one.lines[0].startswith("Redis does not answer (")


@pytest.mark.parametrize("place", ["environment", "file"])
@live_for(PROCESSES_S)
async def test_a_gate_is_a_user_with_a_password_under_its_prefix_and_shows_neither(
    tmp_path: Path, place: str
) -> None:
    port = free_port()
    (tmp_path / "password").write_text(f"{SECRET}\n")
    ways = {
        "environment": {"CELLGATE_REDIS_PASSWORD": SECRET},
        "file": {"redis_password_file": str(tmp_path / "password")},
    }
    environ = ways["environment"] if place == "environment" else {}
    more: dict[str, Any] = {"redis_prefix": "east:"} | (ways["file"] if place == "file" else {})
    with (
        SimUnit.start("a") as unit,
        RedisServer(tmp_path, "--bind", "127.0.0.1", "--port", str(port)) as server,
    ):
        server.do("ACL", "SETUSER", "gate", "on", f">{SECRET}", "+@all", "~east:*", "&east:flips")
        server.do("CONFIG", "SET", "requirepass", "of-somebody-else")
        with GateProcess(
            tmp_path,
            {"a": unit.url},
            flags=["--redis", f"redis://127.0.0.1:{port}"],
            environ={"CELLGATE_REDIS_USERNAME": "gate", **environ},
            **more,
        ) as gate:
            assert eventually(lambda: "Redis answers" in gate.log), gate.log
            gate.until_up("a")
            assert await post(gate.port, BODY) == 200
            units = gate.admin("GET", "/units")[1]
        server.password = "of-somebody-else"
        assert server.do("SMEMBERS", "east:cells") == {b"c"}
        assert all(key.startswith(b"east:") for key in server.do("KEYS", "*"))
    assert SECRET not in gate.log
    assert SECRET not in str(units)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "Redis refuses (it rejects these credentials); this gate routes by its own observations"),
        (f"redis://:{SECRET}@127.0.0.1:6379", "expected a URL such as redis://HOST:PORT/0"),
    ],
    ids=["credentials", "URL"],
)
@live_for(PROCESSES_S)
async def test_with_what_is_wrong_a_gate_serves_and_says_so_in_one_line(
    tmp_path: Path, url: str, said: str
) -> None:
    environ = {"CELLGATE_REDIS_PASSWORD": SECRET}
    with (
        SimUnit.start("a") as unit,
        RedisServer(tmp_path, "--requirepass", "right") as server,
        GateProcess(tmp_path, {"a": unit.url}, environ=environ, redis=url or server.url) as gate,
    ):
        gate.until_up("a")
        assert eventually(lambda: said in gate.log), gate.log
        assert await post(gate.port, BODY) == 200
        # A helper's trouble is an event as soon as it is shown; it is the line, and no second one.
        assert url or eventually(lambda: gate.admin("GET", "/status")[1]["troubles"])
    (line,) = [line for line in gate.log.splitlines() if "redis" in line.lower() and LATE not in line]
    assert said in line
    assert "its own observations" in line
    assert SECRET not in gate.log
