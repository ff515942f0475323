"""Units from DNS, asked of a server that answers what a test says, and of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from cellgate.proxy.config.sources import DnsSource
from cellgate.proxy.discovery import sources
from cellgate.proxy.discovery.base import Found, SourceError
from cellgate.proxy.discovery.sources import LATER, Endpoint, units_at, weighed
from cellgate.router.nouns import Unit

LIKE = Unit(name="", cell="c", url="", weight=2.0)
NAME = "units.example."


class NameServer(asyncio.DatagramProtocol):
    """Answers by type of record; a type it has nothing of is NXDOMAIN. Silent when told to be."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        if self.silent:
            return
        asked = dns.message.from_wire(data)
        answer = dns.message.make_response(asked)
        answer.flags |= dns.flags.RA
        kind = dns.rdatatype.to_text(asked.question[0].rdtype)
        if rows := self.records.get(kind):
            answer.answer.append(dns.rrset.from_text(asked.question[0].name, 0, "IN", kind, *rows))
        else:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(answer.to_wire(), address)


@asynccontextmanager
async def name_server() -> AsyncIterator[tuple[NameServer, str]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    try:
        host, port = transport.get_extra_info("sockname")
        yield server, f"{host}:{port}"
    finally:
        transport.close()


async def told(follow: AsyncGenerator[Found, None]) -> dict[str, tuple[str, float]]:
    async with asyncio.timeout(10.0):
        found = await anext(follow)
    return {unit.name: (unit.url, unit.weight) for unit in found.units}


async def test_each_address_is_a_unit_and_one_that_is_there_anew_or_gone_is_found_at_the_next_look() -> None:
    async with name_server() as (server, at):
        server.records |= {"A": ["127.0.0.2", "127.0.0.1"], "AAAA": ["fd00::1"]}
        source = DnsSource(LIKE, NAME, "A", 8000, server=at, period_s=0.01)
        async with aclosing(sources.follow_dns(source)) as follow:
            found = await told(follow)
            assert {name: url for name, (url, _) in found.items()} == {
                "127.0.0.1-8000": "http://127.0.0.1:8000",
                "127.0.0.2-8000": "http://127.0.0.2:8000",
            }
            server.records["A"] = ["127.0.0.3", "127.0.0.2"]
            assert list(await told(follow)) == ["127.0.0.2-8000", "127.0.0.3-8000"]
        async with aclosing(sources.follow_dns(DnsSource(LIKE, NAME, "AAAA", 8000, server=at))) as follow:
            assert [url for url, _ in (await told(follow)).values()] == ["http://[fd00::1]:8000"]


async def test_srv_records_have_ports_and_weights_of_their_own() -> None:
    async with name_server() as (server, at):
        server.records["SRV"] = ["0 50 8001 a.example.", "0 100 8002 b.example.", "1 5 8003 late.example."]
        async with aclosing(
            sources.follow_dns(DnsSource(LIKE, NAME, "SRV", scheme="https", server=at))
        ) as follow:
            assert await told(follow) == {
                "a.example-8001": ("https://a.example:8001", 1.0),
                "b.example-8002": ("https://b.example:8002", 2.0),
                "late.example-8003": ("https://late.example:8003", 2.0 * LATER),
            }


async def test_no_record_and_no_answer_are_losses_not_an_empty_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SOURCE_PATIENCE_S", 0.2)
    async with name_server() as (server, at):
        for silent, why in ((False, "The DNS query name does not exist"), (True, "The resolution lifetime")):
            server.silent = silent
            with pytest.raises(SourceError, match=f"not resolved: {why}"):
                await told(sources.follow_dns(DnsSource(LIKE, NAME, "A", 8000, server=at)))


def test_shares_are_by_weight_within_a_priority() -> None:
    records = [(10, 0, "z", 1), (10, 0, "y", 1), (20, 7, "late", 1), (30, 1, "last", 1), (10, 0, "", 1)]
    assert weighed(records) == [
        Endpoint("y", 1, 1.0),
        Endpoint("z", 1, 1.0),
        Endpoint("late", 1, LATER),
        Endpoint("last", 1, LATER**2),
    ]


def test_units_are_named_after_their_places() -> None:
    units = units_at([Endpoint("fd00::2", 80, 1.0), Endpoint("Pod-0.svc", 80, 0.5)], LIKE, "http")
    assert [(unit.name, unit.url, unit.weight) for unit in units] == [
        ("Pod-0.svc-80", "http://pod-0.svc:80", 1.0),
        ("fd00--2-80", "http://[fd00::2]:80", 2.0),
    ]
    assert [node.name for unit in units for node in unit.nodes] == ["Pod-0.svc-80", "fd00--2-80"]
