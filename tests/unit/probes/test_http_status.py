"""The HTTP and TCP probes of a node: which answers are good, bad, and nothing."""

from __future__ import annotations

import pytest

from cellgate.probes.base import Reply, Trouble
from cellgate.probes.nodes import HttpProbe, TcpProbe, page_name, split_url
from cellgate.router.nouns import Evidence, Node, Role, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply

NODE = Node("n1", Role.FOLLOWER)


def ask(answer: Answer) -> Evidence:
    probe = HttpProbe("http://n1:8080/health?full=1")
    context = FakePatient(lambda _: answer, node=NODE)
    (evidence,) = look(probe, context)
    assert isinstance(evidence, Evidence)
    assert [(asked.method, asked.target) for asked in context.asked] == [
        ("GET", "http://n1:8080/health?full=1")
    ]
    return evidence


@pytest.mark.parametrize(
    ("status", "sign"),
    [
        (200, Sign.GOOD),
        (204, Sign.GOOD),
        (301, Sign.BAD),
        (404, Sign.BAD),
        (503, Sign.BAD),
        (429, Sign.NEUTRAL),
    ],
)
def test_the_status_says_how_the_node_is(status: int, sign: Sign) -> None:
    evidence = ask(reply(status))
    assert evidence.sign is sign
    assert evidence.strength is (Strength.STRONG if sign is Sign.BAD else Strength.WEAK)
    assert (evidence.source, evidence.node) == ("http n1:8080/health", "n1")
    assert str(status) in evidence.reason


def test_a_redirect_tells_where_it_leads_and_what_to_do() -> None:
    evidence = ask(Reply(302, {"location": "http://elsewhere/\x1b[2J" + "x" * 500}, b""))
    assert evidence.sign is Sign.BAD
    assert evidence.reason.startswith("HTTP 302 redirects to http://elsewhere/?[2Jxx")
    assert evidence.reason.endswith("which is not followed; configure the final URL")


def test_a_bad_status_is_fatal_when_it_comes_again() -> None:
    context = FakePatient(lambda _: reply(503), node=NODE)
    probe = HttpProbe("http://n1/health")
    strengths = [finding.strength for _ in range(3) for finding in look(probe, context)]  # type: ignore[union-attr]
    assert strengths == [Strength.STRONG, Strength.FATAL, Strength.FATAL]


def test_a_server_that_refuses_is_the_nodes_own_word() -> None:
    evidence = ask(Trouble.REFUSED)
    assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.STRONG)


def test_a_refused_connection_is_the_nodes_own_word() -> None:
    (evidence,) = look(TcpProbe("n1:29500"), FakePatient(lambda _: reply(200), node=NODE))
    assert isinstance(evidence, Evidence)
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
