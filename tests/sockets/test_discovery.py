"""Units from DNS and of a LeaderWorkerSet, asked of servers that answer what a test says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
import yaml
from kubernetes_asyncio.config import incluster_config

from cellgate.proxy import orchestrators
from cellgate.proxy.config.sources import DnsSource, LwsSource
from cellgate.proxy.control.dispatcher import LocalDispatcher
from cellgate.proxy.discovery import kubernetes, sources
from cellgate.proxy.discovery import kubernetes as lws
from cellgate.proxy.discovery.base import Feed, Found, SourceError
from cellgate.proxy.discovery.sources import LATER, Endpoint, units_at, weighed
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.redis.fleet import FleetRouter
from cellgate.proxy.redis.reports import Seen, UnitReport
from cellgate.proxy.redis.roster import Roster
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.ports import PickRequest
from cellgate.router.nouns import Ask, Evidence, Fleet, Outcome, Sign, Strength, Unit, Verdict
from loadtests.kit.fake_kubernetes import FakeKubernetes, group_pod, pod
from tests.unit.redis.told import answered
from tests.wire.client import chat
from tests.wire.stage import stage
from tests.wire.unit import STREAM

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


# Discovery of a LeaderWorkerSet by the official client, against an API server that speaks the protocol.

PATIENCE_S = 10.0
LIKE_SET = Unit(name="", cell="c", url="")


async def add_group(api: FakeKubernetes, number: int, *, size: int = 2) -> None:
    for rank in range(size):
        ip = f"127.0.{number}.{rank + 1}"
        await api.put(group_pod("big", number, rank, size=size, uid=f"{number}/{rank}", ip=ip))


def source(api: FakeKubernetes, folder: Path, **keys: Any) -> LwsSource:
    kubeconfig = api.kubeconfig(folder)
    return LwsSource(LIKE_SET, "big", 8000, namespace="prod", agent_port=9902, kubeconfig=kubeconfig, **keys)


async def told_of_set(follow: AsyncGenerator[Found, None]) -> Found:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(follow)


def urls(found: Found) -> dict[str, str]:
    return {unit.name: unit.url for unit in found.units}


def held_against(found: Found) -> dict[str, str]:
    return {doubt.node: doubt.reason for doubt in found.suspicions}


async def test_groups_are_listed_as_units_with_their_nodes_and_agents(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        await add_group(api, 0)
        await api.put(pod("other-0", labels={}, annotations={}, uid="x", ip="127.0.9.9"))
        async with aclosing(lws.follow_lws(source(api, tmp_path))) as follow:
            found = await told_of_set(follow)
    (unit,) = found.units
    assert (unit.name, unit.cell, unit.url) == ("big-0", "c", "http://127.0.0.1:8000")
    assert [(node.name, node.role.value, node.agent) for node in unit.nodes] == [
        ("big-0", "leader", "127.0.0.1:9902"),
        ("big-0-1", "follower", "127.0.0.2:9902"),
    ]
    assert not found.suspicions
    assert [name for name, _ in found.epochs] == ["big-0"]


async def test_each_change_of_a_pod_is_told_as_it_comes(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        await add_group(api, 0)
        async with aclosing(lws.follow_lws(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            await api.delete("big-0-1")
            assert held_against(await told_of_set(follow)) == {"big-0-1": "its pod is being deleted"}
            await api.remove("big-0-1")
            assert held_against(await told_of_set(follow)) == {"group": "1 pod, its size is 2 (missing: 1)"}
            await api.put(group_pod("big", 0, 1, size=2, uid="again", ip="127.0.0.3"))
            assert not (await told_of_set(follow)).suspicions
            await api.remove("big-0")
            assert urls(await told_of_set(follow)) == {"big-0": ""}
            await api.remove("big-0-1")
            assert (await told_of_set(follow)).units == ()
        assert api.lists == 1


async def test_a_watch_that_the_server_ends_goes_on_from_the_last_bookmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_S", 1)
    monkeypatch.setattr(kubernetes, "SHORT_S", 0.1)
    async with kubernetes_api(bookmark_s=0.2) as api:
        await add_group(api, 0)
        async with aclosing(lws.follow_lws(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            # What others have done moves the version, and only a bookmark tells it.
            await api.put(pod("other-0", labels={}, annotations={}, uid="x"))
            change = asyncio.create_task(told_of_set(follow))
            await api.until_watched(2)
            api.compact()
            await api.delete("big-0")
            assert held_against(await change) == {"big-0": "its pod is being deleted"}
        assert (api.watched, api.lists) == (["2", "3"], 1)


async def test_a_version_that_is_gone_is_answered_with_a_new_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "SHORT_S", 0.2)
    async with kubernetes_api() as api:
        await add_group(api, 0)
        async with aclosing(lws.follow_lws(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            change = asyncio.create_task(told_of_set(follow))
            await api.until_watched(1)
            api.cut()
            await add_group(api, 1)
            await api.remove("big-0")
            await api.remove("big-0-1")
            api.compact()
            assert urls(await change) == {"big-1": "http://127.0.1.1:8000"}
        assert api.lists == 2


async def test_a_watch_that_is_cut_goes_on_where_it_was_and_events_of_any_length_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "SHORT_S", 0.05)
    async with kubernetes_api() as api:
        await add_group(api, 0)
        async with aclosing(lws.follow_lws(source(api, tmp_path))) as follow:
            await told_of_set(follow)
            change = asyncio.create_task(told_of_set(follow))
            await api.until_watched(1)
            api.cut()
            await api.until_watched(2)
            long = group_pod("big", 0, 1, size=2, uid="again", ip="127.0.0.3")
            long["metadata"]["annotations"]["long"] = "x" * 3_000_000
            await api.put(long)
            assert (await change).units[0].nodes[1].agent == "127.0.0.3:9902"
        assert (api.watched, api.lists) == (["2", "2"], 1)


async def test_a_server_that_is_gone_or_refuses_is_a_loss_that_says_why(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        (tmp_path / "empty").write_text("")
        nowhere = LwsSource(LIKE_SET, "big", 8000, kubeconfig=str(tmp_path / "empty"))
        with pytest.raises(SourceError, match="no way to the API server is configured"):
            await told_of_set(lws.follow_lws(nowhere))
        the_set = source(api, tmp_path)
        api.refuse_with = 403
        with pytest.raises(SourceError, match=r"refuses: 403 .*told to refuse"):
            await told_of_set(lws.follow_lws(the_set))
        await api.stop()
        with pytest.raises(SourceError, match="cannot be reached"):
            await told_of_set(lws.follow_lws(the_set))


async def test_in_a_cluster_the_pods_own_account_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-the-pod")
    (tmp_path / "namespace").write_text("prod\n")
    pem = Path(__file__).parents[1] / "wire" / "localhost.pem"
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(pem))
    monkeypatch.setattr(orchestrators, "_NAMESPACE_FILE", tmp_path / "namespace")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    api = await FakeKubernetes().start(tls)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    try:
        await add_group(api, 0)
        async with aclosing(lws.follow_lws(LwsSource(LIKE_SET, "big", 8000))) as follow:
            assert urls(await told_of_set(follow)) == {"big-0": "http://127.0.0.1:8000"}
    finally:
        await api.stop()
    assert api.callers == {("prod", "Bearer of-the-pod")}


def on_nodes(api: FakeKubernetes, first: int = 0) -> None:
    for number in range(first, 2):
        labels = {"topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": f"r-{number}"}
        api.objects.put("nodes", "", {"metadata": {"name": f"n-{number}", "labels": labels}})


async def placed(api: FakeKubernetes, folder: Path) -> list[list[tuple[str, ...]]]:
    """The places of a unit's nodes: at first, and after a change of another pod."""
    for number in range(2):
        made = group_pod("big", number, 0, size=1, uid=f"{number}/n", ip=f"127.0.{number}.1")
        made["spec"]["nodeName"] = f"n-{number}"
        await api.put(made)
    found = []
    async with aclosing(lws.follow_lws(source(api, folder, places=True))) as follow:
        for _ in range(2):
            found.append([node.place for unit in (await told_of_set(follow)).units for node in unit.nodes])
            await api.ready("big-0", False)
    return found


async def test_nodes_have_the_places_that_labels_say_and_each_is_asked_for_once(tmp_path: Path) -> None:
    async with kubernetes_api() as api:
        on_nodes(api)
        found = await placed(api, tmp_path)
        assert found == [[("r", "r-0"), ("r", "r-1")]] * 2
        rules = Path(__file__).parents[2] / "deploy" / "kubernetes" / "node-places-rbac.yaml"
        assert rights_used(api) == rights_given(rules) | {("list", "", "pods"), ("watch", "", "pods")}
    # A node that is gone keeps no place from another.
    async with kubernetes_api() as api:
        on_nodes(api, first=1)
        assert await placed(api, tmp_path) == [[(), ("r", "r-1")]] * 2


async def test_without_the_right_to_get_nodes_units_are_found_without_places(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kubernetes_api() as api:
        on_nodes(api)
        api.lacks = {("get", "nodes")}
        assert await placed(api, tmp_path) == [[(), ()]] * 2
    assert caplog.text.count("places of nodes are not known: the gate's account lacks a right") == 1


async def test_a_request_that_comes_while_all_units_change_their_gate_waits_for_that() -> None:
    """A killed gate had them all, so that all are DOWN in one turn; another gate has told of them too."""
    async with stage(STREAM) as here, here.client() as client:
        plane, feed, roster = here.plane, Feed(), Roster("router")
        router = FleetRouter(plane, roster, feed)
        plane.on_flip.append(router.flipped)

        async def follow() -> None:
            async for found in feed.follow():
                plane.configure(Fleet(found.cells, found.units))

        following = asyncio.create_task(follow())
        reports = [
            UnitReport(
                unit, "c", "killed", Verdict.UP, f"http://{unit}", gate_url="http://[::1]:1", models=("tiny",)
            )
            for unit in ("u1", "u2")
        ]
        others = [replace(r, gate="other", gate_url=f"http://127.0.0.1:{here.unit.port}") for r in reports]
        answered(roster, {(r.unit, r.gate): Seen(r, 0.0) for r in reports}, plane.now())
        router.tick(plane.now())
        await here.until(lambda: len(plane.board.units) == 2 and all(s.is_usable() for s in plane.board))
        answered(roster, {(r.unit, r.gate): Seen(r, 0.0) for r in (*reports, *others)}, plane.now())
        ask = read_ask(b'{"model": "tiny", "messages": [], "stream": true}')
        assert isinstance(ask, Ask)
        waiter, dispatcher = Mock(), LocalDispatcher(plane)
        for unit in ("u1", "u2"):
            plane.prober.observe(
                Evidence(unit, Sign.BAD, Strength.FATAL, "request", "it refused", plane.now())
            )
        assert not isinstance(dispatcher.acquire(PickRequest(ask, 0), waiter), Failure)
        await here.until(lambda: waiter.on_result.called)
        (lease,) = waiter.on_result.call_args.args
        assert lease.unit_state.unit.url == others[0].gate_url
        dispatcher.released(lease, Outcome.OK)
        assert (await client.ask(chat())).status == 200
        following.cancel()


@asynccontextmanager
async def kubernetes_api(**options: Any) -> AsyncIterator[FakeKubernetes]:
    """An API server."""
    api = await FakeKubernetes(**options).start()
    try:
        yield api
    finally:
        await api.stop()


def rights_used(api: FakeKubernetes) -> set[tuple[str, str, str]]:
    """What the API server was asked for: verb, group, resource."""
    return {(what.verb, what.group, what.resource) for what in api.asked}


def rights_given(rules: Path) -> set[tuple[str, str, str]]:
    """What the roles in a file allow."""
    return {
        (verb, group, resource)
        for role in yaml.safe_load_all(rules.read_text())
        for rule in role.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
