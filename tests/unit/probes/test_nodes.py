"""Probes of nodes without a network: HTTP and TCP."""

from __future__ import annotations

import pytest

from cellgate.probes.base import Reply, Trouble
from cellgate.probes.nodes import HttpProbe, TcpProbe, page_name, split_url
from cellgate.router.nouns import Node, Role, Sign, Strength
from tests.patient import Answer, FakePatient, evidence_of, reply

NODE = Node("n1", Role.FOLLOWER)
BAD_TWICE = [Strength.STRONG, Strength.FATAL, Strength.FATAL]


@pytest.mark.parametrize(
    ("answer", "sign"),
    [
        *((reply(status), Sign.GOOD) for status in (200, 204)),
        *((reply(status), Sign.BAD) for status in (301, 404, 503)),
        (reply(429), Sign.NEUTRAL),
        (Trouble.REFUSED, Sign.BAD),
    ],
)
def test_the_status_says_how_the_node_is(answer: Answer, sign: Sign) -> None:
    """A bad one is fatal when it comes again. A server that refuses is the node's own word."""
    probe, context = HttpProbe("http://n1:8080/health?full=1"), FakePatient(lambda _: answer, node=NODE)
    found = [evidence_of(probe, context) for _ in range(3)]
    weak = [Strength.WEAK] * 3
    assert [evidence.sign for evidence in found] == [sign] * 3
    assert [evidence.strength for evidence in found] == (BAD_TWICE if sign is Sign.BAD else weak)
    assert {(evidence.source, evidence.node) for evidence in found} == {("http n1:8080/health", "n1")}
    assert isinstance(answer, Trouble) or str(answer.status) in found[0].reason
    assert {(one.method, one.target) for one in context.asked} == {("GET", "http://n1:8080/health?full=1")}


def test_a_redirect_tells_where_it_leads_and_a_refused_connection_is_the_nodes_own_word() -> None:
    answer = Reply(302, {"location": "http://elsewhere/\x1b[2J" + "x" * 500}, b"")
    evidence = evidence_of(HttpProbe("http://n1/"), FakePatient(lambda _: answer, node=NODE))
    assert evidence.sign is Sign.BAD
    assert evidence.reason.startswith("HTTP 302 redirects to http://elsewhere/?[2Jxx")
    assert evidence.reason.endswith("which is not followed; configure the final URL")
    evidence = evidence_of(TcpProbe("n1:29500"), FakePatient(lambda _: reply(200), node=NODE))
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.STRONG)
    assert (evidence.source, evidence.reason) == ("tcp n1:29500", "connection refused by n1:29500")


@pytest.mark.parametrize(
    ("url", "root", "target", "name"),
    [
        ("http://n:1/health", "http://n:1", "/health", "n:1/health"),
        ("https://[::1]:2/", "https://[::1]:2", "/", "[::1]:2/"),
        ("http://n/a/b?c=/d", "http://n", "/a/b?c=/d", "n/a/b"),
    ],
)
def test_a_url_is_taken_apart(url: str, root: str, target: str, name: str) -> None:
    assert split_url(url) == (root, target)
    assert page_name(url) == name
