"""The room of one attempt: nobody else gets it, and a client cannot choose it."""

from __future__ import annotations

from random import Random
from typing import Any

import orjson
import pytest

from cellgate.proxy.request.prefill_decode import Rendezvous, own_lines, without_bootstrap
from cellgate.router.nouns import Unit

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
P1 = Unit("p1", "c", "http://10.0.0.1:30000", role="prefill", bootstrap_port=9000)


def met(seed: int = 1, unit: Unit = P1, **fields: Any) -> Rendezvous:
    return Rendezvous(orjson.dumps(CHAT | fields), unit, Random(seed))


def test_both_engines_get_the_request_of_the_client_and_where_they_meet() -> None:
    meeting = met()
    body = orjson.loads(meeting.body)
    assert body | CHAT == body
    assert (body["bootstrap_host"], body["bootstrap_port"]) == ("10.0.0.1", 9000)
    assert 0 < body["bootstrap_room"] < 2**63
    assert meeting.spend() == meeting.body


def test_a_room_is_for_one_attempt() -> None:
    meeting = met()
    meeting.spend()
    with pytest.raises(RuntimeError, match="twice"):
        meeting.spend()
    rng = Random(1)
    rooms = {orjson.loads(Rendezvous(b"{}", P1, rng).body)["bootstrap_room"] for _ in range(1000)}
    assert len(rooms) == 1000


def test_an_address_of_ipv6_has_no_brackets() -> None:
    unit = Unit("p1", "c", "http://[fd00::1]:30000", role="prefill")
    body = orjson.loads(met(unit=unit).body)
    assert (body["bootstrap_host"], body["bootstrap_port"]) == ("fd00::1", 8998)


@pytest.mark.parametrize("spelling", [b"bootstrap_room", b"bootstrap_r\\u006fom"])
def test_what_a_client_says_of_rooms_reaches_no_engine(spelling: bytes) -> None:
    body = b'{"model":"m","%b":7,"bootstrap_host":"evil","disagg_prefill_dp_rank":1} \n' % spelling
    bare = orjson.loads(without_bootstrap(body))
    assert {name: value for name, value in bare.items() if value is not None} == {"model": "m"}
    assert orjson.loads(Rendezvous(body, P1, Random(1)).body)["bootstrap_room"] != 7
    assert orjson.loads(without_bootstrap(b" { } "))["bootstrap_room"] is None


def test_header_lines_that_choose_a_room_are_left_out() -> None:
    lines = [b"accept: */*\r\n", b"x-override-bootstrap-room: 7\r\n", b"x-data-parallel-rank: 1\r\n"]
    assert own_lines(lines) == lines[:1]
