"""What the ingress is told: ORCA, Envoy, HAProxy, a load balancer of AWS, reasons; heads in deploy/."""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.http.heads import KEY_FIELDS, REQUEST_FIELDS
from cellgate.proxy.ingress.haproxy import (
    SEEN_S,
    AgentReply,
    Balancers,
    ReplyFormatter,
    ServerState,
    gate_reply,
    unit_reply,
)
from cellgate.proxy.ingress.reasons import why
from cellgate.proxy.ingress.reports import (
    DEGRADED,
    FAIL_NOW,
    KV_FULL_REPORTED,
    LEAST,
    LOAD_WINDOW_S,
    Orca,
    OrcaReport,
    bin_line,
    encoded,
    gate_is_degraded,
    gate_utilization,
    json_line,
    named_metrics,
    readyz_headers,
    response_line,
    text_line,
    unit_headers,
)
from cellgate.proxy.request.cors import FIELDS as CORS_FIELDS
from cellgate.proxy.request.routes import RouteKind, RoutingHeaders, find_route
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, Load, Rules, Sign, Strength, Unit
from cellgate.router.outliers import Outlier
from tests.said_fields import INTERNAL_REPLY_FIELDS, MEANINGS, Said
from tests.unit.router.fleets import board_up

RULES = Rules(slow_start_s=10.0)


def board(*units: Unit) -> Board:
    """Units that are all UP since 0."""
    return board_up(*units, rules=RULES)


def unit(name: str, places: int = 10, weight: float = 1.0) -> Unit:
    return Unit(name, "c", f"http://{name}", weight=weight, max_in_flight=places)


def tell(on: Board, name: str, sign: Sign, strength: Strength = Strength.STRONG) -> None:
    on.observe(Evidence(name, sign, strength, "canary", "no token in 2 s", 1.0))


def down(on: Board, name: str) -> None:
    tell(on, name, Sign.BAD, Strength.FATAL)


DOUBLE, MESSAGE, OPTIONAL, REPEATED = 1, 11, 1, 3


@cache
def decoder() -> Any:
    """xds.data.orca.v3.OrcaLoadReport for protobuf's own library, with the numbers of its proto file."""
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="xds", syntax="proto3")
    message = file.message_type.add(name="OrcaLoadReport")
    for number, name in (
        (1, "cpu_utilization"),
        (6, "rps_fractional"),
        (7, "eps"),
        (9, "application_utilization"),
    ):
        message.field.add(name=name, number=number, type=DOUBLE, label=OPTIONAL)
    entry = message.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=OPTIONAL)
    entry.field.add(name="value", number=2, type=DOUBLE, label=OPTIONAL)
    message.field.add(
        name="named_metrics",
        number=8,
        type=MESSAGE,
        label=REPEATED,
        type_name=".xds.OrcaLoadReport.NamedMetricsEntry",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xds.OrcaLoadReport"))


REPORT = OrcaReport(0.62, 12.5, 0.0, {"num_requests_waiting": 3.0})
# Derived byte by byte from the field numbers and protobuf's wire format.
REPORT_BASE64 = b"MQAAAAAAAClASdejcD0K1+M/Qh8KFG51bV9yZXF1ZXN0c193YWl0aW5nEQAAAAAAAAhA"

numbers = st.floats(min_value=0.0, max_value=1e12)


def test_a_published_vector_reads_as_expected_by_the_decoder_used_here() -> None:
    """Envoy's tests have these bytes for {cpu 0.5, rps 100, eps 2, named rif 4}."""
    vector = base64.b64decode("CQAAAAAAAOA/MQAAAAAAAFlAOQAAAAAAAABAQg4KA3JpZhEAAAAAAAAQQA==")
    message = decoder().FromString(vector)
    assert (message.cpu_utilization, message.rps_fractional, message.eps) == (0.5, 100.0, 2.0)
    assert dict(message.named_metrics) == {"rif": 4.0}


@given(
    numbers, numbers, numbers, st.dictionaries(st.text("az_", min_size=1, max_size=40), numbers, max_size=6)
)
def test_protobufs_own_library_reads_what_was_written(
    utilization: float, rps: float, eps: float, named: dict[str, float]
) -> None:
    message = decoder().FromString(encoded(OrcaReport(utilization, rps, eps, named)))
    assert message.application_utilization == utilization
    assert (message.rps_fractional, message.eps) == (rps, eps)
    assert dict(message.named_metrics) == named
    assert len(UnknownFieldSet(message)) == 0


def test_the_three_carriers() -> None:
    assert bin_line(REPORT) == b"endpoint-load-metrics-bin: " + REPORT_BASE64 + b"\r\n"
    assert text_line(REPORT) == (
        b"endpoint-load-metrics: TEXT application_utilization:0.62,rps_fractional:12.5,eps:0,"
        b"named_metrics.num_requests_waiting:3\r\n"
    )
    name, carrier, body = json_line(REPORT).decode().split(" ", 2)
    assert (name, carrier) == ("endpoint-load-metrics:", "JSON")
    assert json.loads(body) == {
        "application_utilization": 0.62,
        "rps_fractional": 12.5,
        "eps": 0.0,
        "named_metrics": {"num_requests_waiting": 3.0},
    }


def test_utilization_is_of_the_places_of_the_usable_units() -> None:
    """Other people's requests and a full cache count as well; without a usable unit there is none."""
    here = board(unit("a"), unit("b", 30))
    for _ in range(4):
        here.open("b", Ask(), 0.0, retry=False)
    assert gate_utilization(here, waiting=0) == 4 / 40
    assert gate_utilization(here, waiting=6) == 10 / 40
    here.report(Load("a", 1.0, running=5, waiting=1))
    assert gate_utilization(here, 0) == 10 / 40
    here.report(Load("b", 1.0, running=1, kv_use=KV_FULL_REPORTED))
    assert gate_utilization(here, 0) == 36 / 40
    down(here, "a")
    assert gate_utilization(here, waiting=0) == 30 / 30
    here = board(unit("a"))
    down(here, "a")
    assert gate_utilization(here, 0) is None
    assert named_metrics(here, 2) == {
        "in_flight": 0.0,
        "queued": 2.0,
        "kv_cache_usage": 0.0,
        "units_ready": 0.0,
        "units_total": 1.0,
    }


class Clocked:
    """A gate's report under a load of so many requests a second that take so long each."""

    def __init__(self, places: int = 10) -> None:
        self.board = board(unit("a", places))
        self.responses: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.orca = Orca(self.board, self.responses, lambda: 0)
        self.now = 0.0

    def run(
        self, seconds: float, *, rps: float, in_flight: int, status: int = 200, route: str = "chat"
    ) -> OrcaReport:
        leases = [self.board.open("a", Ask(), self.now, retry=False) for _ in range(in_flight)]
        ended = 0.0
        for _ in range(int(seconds * 4)):
            self.orca.refresh(self.now)
            self.now += 0.25
            ended += rps / 4
            self.responses[route, status] += int(ended)
            ended -= int(ended)
        self.orca.refresh(self.now)
        for lease in leases:
            self.board.close(lease, self.now)
        return self.orca.report

    def weight(self) -> float:
        """What Envoy makes of it: qps / (utilization + eps / qps)."""
        report = self.orca.report
        return report.rps_fractional / (report.application_utilization + report.eps / report.rps_fractional)


def test_rates_are_those_of_the_last_seconds() -> None:
    """By Little's law the weight is places / duration, whatever is sent. Health checks are no work."""
    gate = Clocked()
    report = gate.run(10 * LOAD_WINDOW_S, rps=8.0, in_flight=4)
    assert report.rps_fractional == pytest.approx(8.0, rel=0.02)
    assert report.application_utilization == pytest.approx(0.4, rel=0.02)
    assert report.eps == 0.0
    assert (weight := gate.weight()) == pytest.approx(10 / 0.5, rel=0.05)
    report = gate.run(10 * LOAD_WINDOW_S, rps=2.0, in_flight=2)
    assert report.rps_fractional == pytest.approx(2.0, rel=0.05)
    assert gate.weight() == pytest.approx(10 / 1.0, rel=0.05)
    ill = Clocked()
    assert ill.run(40.0, rps=8.0, in_flight=4, status=503).eps == pytest.approx(8.0, rel=0.02)
    assert ill.weight() < weight / 3
    gate = Clocked()
    report = gate.run(60.0, rps=100.0, in_flight=0, route="health")
    assert (report.rps_fractional, report.application_utilization) == (0.0, LEAST)
    for path in (b"/readyz", b"/livez", b"/v1/models", b"/healthz/unit/a", b"/version", b"/tokenize"):
        route = find_route(path)
        assert route.kind in (RouteKind.LOCAL, RouteKind.READ)
        assert gate.run(10.0, rps=4.0, in_flight=0, route=route.name).rps_fractional == 0.0


def test_a_gate_that_was_idle_or_had_no_unit_is_as_strong_as_before_whatever_it_refused() -> None:
    """Or its first report would keep the next request away, and with it the next report."""
    gate, fresh = Clocked(), Clocked()
    gate.run(40.0, rps=8.0, in_flight=4)
    before = gate.weight()
    gate.run(2_000.0, rps=0.0, in_flight=0)
    assert gate.weight() == pytest.approx(before, rel=0.05)
    gate.run(40.0, rps=8.0, in_flight=4)
    before = gate.weight()
    down(gate.board, "a")
    gate.run(60.0, rps=50.0, in_flight=0, status=503)
    assert gate.weight() == before
    down(fresh.board, "a")
    fresh.run(20.0, rps=0.0, in_flight=0)
    for each, rel in ((gate, 0.05), (fresh, 0.1)):
        for _ in range(3):
            tell(each.board, "a", Sign.GOOD)
        each.run(5.0, rps=8.0, in_flight=4)
        assert each.weight() == pytest.approx(20.0, rel=rel)


def test_a_request_gets_the_carrier_it_asks_for_as_the_last_tick_rendered_it() -> None:
    gate = Clocked()
    orca = gate.orca
    orca.refresh(0.0)
    line = orca.lines.usual
    assert line == orca.lines.line(b"yaml") == bin_line(orca.report)
    assert orca.lines.line(b"TEXT") == text_line(orca.report)
    assert orca.lines.line(b" json ") == json_line(orca.report)
    gate.board.open("a", Ask(), 0.0, retry=False)
    assert orca.lines.usual is line


# What Envoy is told beside a status.


def test_only_a_stopping_gate_asks_to_be_taken_out_at_once() -> None:
    here = board(*map(unit, "ab"))
    assert readyz_headers(here, stopping=False) == ()
    assert response_line(stopping=False) == b""
    here.drain("a", drained=True)
    assert unit_headers(here, "a") == ()
    for name in "ab":
        assert FAIL_NOW not in readyz_headers(here, stopping=False)
        down(here, name)
        assert unit_headers(here, name) == ()
    assert FAIL_NOW not in readyz_headers(here, stopping=False)
    assert readyz_headers(here, stopping=True) == (FAIL_NOW,)
    assert response_line(stopping=True) == b"x-envoy-immediate-health-check-fail: 1\r\n"


def test_who_is_degraded() -> None:
    """A gate when half of its weight is gone or suspected, or it may be cut off; a unit in doubt, or slow."""
    here = board(*map(unit, "abcd"))
    down(here, "a")
    assert not gate_is_degraded(here)
    down(here, "b")
    assert readyz_headers(here, stopping=False) == (DEGRADED,)
    for _ in range(3):
        tell(here, "b", Sign.GOOD)
    assert readyz_headers(here, stopping=False) == ()
    here.panic_at = 1.0
    assert gate_is_degraded(here)
    here = board(unit("a"))
    assert not gate_is_degraded(here)
    tell(here, "a", Sign.BAD)
    assert gate_is_degraded(here)
    here = board(*map(unit, ["a", "b", "c", "d"]))
    tell(here, "a", Sign.BAD)
    here.suspect_restart("b", 2.0)
    here.units["c"].outlier = Outlier(0.4)
    assert [unit_headers(here, name) for name in "abcd"] == [(DEGRADED,), (DEGRADED,), (DEGRADED,), ()]
    assert unit_headers(here, "nobody") == ()


# The reason that people and load balancers are told is the present one.

PASSED = Evidence("a", Sign.GOOD, Strength.STRONG, "canary", "one token by chat", 1.0)
REFUSED = Evidence("a", Sign.BAD, Strength.FATAL, "readiness", "connection refused by a:1", 2.0)
TURNED_DOWN = Evidence("a", Sign.BAD, Strength.STRONG, "canary", "the canary was refused: HTTP 401", 3.0)
UNREADY = Evidence("a", Sign.BAD, Strength.STRONG, "readiness", "GET /health: HTTP 500", 2.0)


NEWEST = replace(PASSED, reason="one token by completions", at=9.0)
WORKS_UNREADY = "one token by chat (source canary); but its readiness says: GET /health: HTTP 500"


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ((), "no probe has answered yet"),
        ((replace(TURNED_DOWN, sign=Sign.NEUTRAL),), "the canary was refused: HTTP 401 (source canary)"),
        ((PASSED, REFUSED), "connection refused by a:1 (source readiness)"),
        ((PASSED, REFUSED, TURNED_DOWN), "the canary was refused: HTTP 401 (source canary)"),
        ((PASSED, NEWEST), "one token by completions (source canary)"),
        ((PASSED, UNREADY, replace(PASSED, at=3.0)), WORKS_UNREADY),
    ],
    ids=["unproven", "turned down", "refused", "wrong now", "last proof", "works, and unready"],
)
def test_what_is_said_of_a_unit_is_what_is_so_now(evidence: tuple[Evidence, ...], said: str) -> None:
    board = Board(Rules())
    board.configure(Fleet((Cell("c"),), (Unit("a", "c", "http://a:1"),)), 0.0)
    for piece in evidence:
        board.observe(piece)
    assert why(board.units["a"]) == said


# What the gate gives a meaning to, and what the files in deploy/ do with it when a client says it.

DEPLOY = Path(__file__).parents[3] / "deploy"
FRAMING = frozenset(
    (
        b"connection content-length keep-alive proxy-authenticate proxy-authorization proxy-connection te "
        b"trailer transfer-encoding upgrade"
    ).split()
)
"""HTTP's own, which every proxy writes again."""

Dealt = tuple[set[str], set[str], set[str]]
"""Fields of requests that are removed; that are replaced, or appended to; of answers that are removed."""


def haproxy(text: str) -> Dealt:
    frontend = text[text.index("frontend") : text.index("\nbackend")]
    return (
        set(re.findall(r"^ +http-request del-header (\S+)$", frontend, re.MULTILINE)),
        set(re.findall(r"^ +http-request set-header (\S+) \S+$", frontend, re.MULTILINE)),
        set(re.findall(r"^ +http-response del-header (\S+)$", frontend, re.MULTILINE)),
    )


def nginx(text: str) -> Dealt:
    sets = dict(re.findall(r"^ +proxy_set_header (\S+) (\S+);$", text, re.MULTILINE))
    return (
        {name.lower() for name, value in sets.items() if value == '""'},
        {name.lower() for name, value in sets.items() if value != '""'},
        set(re.findall(r"^ +proxy_hide_header (\S+);$", text, re.MULTILINE)),
    )


def envoy(text: str) -> Dealt:
    (listener,) = yaml.safe_load(text)["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]
    # Envoy writes both itself for whoever connects to it.
    own = {"x-forwarded-for", "x-forwarded-proto"} if manager["use_remote_address"] else set()
    return set(routes["request_headers_to_remove"]), own, set(routes["response_headers_to_remove"])


FILES: dict[str, Callable[[str], Dealt]] = {
    "ingress/haproxy.cfg": haproxy,
    "ingress/haproxy-units.cfg": haproxy,
    "compose/haproxy.cfg": haproxy,
    "ingress/nginx.conf": nginx,
    "ingress/envoy.yaml": envoy,
}


def test_each_field_that_the_gate_reads_is_in_the_table_and_no_other_is_read_anywhere() -> None:
    routing = RoutingHeaders(HeaderNames()).names
    read = REQUEST_FIELDS | KEY_FIELDS | CORS_FIELDS | routing
    assert read - FRAMING - MEANINGS.keys() == set()
    sources = "".join(path.read_text() for path in (DEPLOY.parent / "proxy").rglob("*.py"))
    named = set(re.findall(r'b"(x-(?:cellgate|gateway|haproxy|envoy)-[a-z-]+)[":]', sources))
    answers = {"x-envoy-degraded", "x-envoy-immediate-health-check-fail", "x-cellgate-reason"}
    answers |= {"x-cellgate-model", "x-cellgate-fallback-from", "x-cellgate-unit-request-id"}
    assert named - answers - {name.decode() for name in MEANINGS} == set()


@pytest.mark.parametrize("file", FILES)
def test_an_ingress_passes_on_what_clients_may_say_and_shows_them_nothing_of_the_fleet(file: str) -> None:
    removed, replaced, hidden = FILES[file]((DEPLOY / file).read_text())
    said = {who: {name.decode() for name, by in MEANINGS.items() if by is who} for who in Said}
    assert said[Said.BY_OPERATOR] - removed == set()
    assert said[Said.BY_INGRESS] - removed - replaced == set()
    assert said[Said.BY_CLIENTS] & removed == set()
    assert "x-forwarded-for" in replaced
    assert {name.decode() for name in INTERNAL_REPLY_FIELDS} - hidden == set()


def test_no_other_file_is_an_ingress() -> None:
    found = {
        str(path.relative_to(DEPLOY))
        for path in DEPLOY.rglob("*")
        if path.is_file()
        and re.search(r"\n(frontend|    upstream) |http_connection_manager", path.read_text())
    }
    assert found == FILES.keys()


LINE = re.compile(rb"up ready ([1-9]\d?|100)% maxconn:[1-9]\d*\n|drain\n|down #[ -~]{0,80}\n")
LATE = 100.0
"""Long after slow start."""


def said(on: Board, name: str, now: float = LATE) -> bytes:
    return ReplyFormatter().line(name, unit_reply(on.units[name], now, on), 1)


def test_a_unit_is_told_as_it_is() -> None:
    """Whatever else is so, a drained one is drained. Whatever was said, the next good word takes it back."""
    here = board(*map(unit, "abcd"))
    here.units["b"].outlier = Outlier(0.4)
    tell(here, "c", Sign.BAD)
    down(here, "d")
    assert [said(here, name) for name in "abcd"] == [
        b"up ready 100% maxconn:10\n",
        b"up ready 60% maxconn:10\n",
        b"up ready 1% maxconn:10\n",
        b"down #down: no token in 2 s (source canary)\n",
    ]
    for name in "ad":
        here.drain(name, drained=True)
        assert said(here, name) == b"drain\n"
    fresh = Board(RULES)
    fresh.configure(Fleet(units=(unit("b"),)), 0.0)
    assert said(fresh, "b") == b"down #starting: no probe has answered yet\n"
    here = board(unit("a", weight=2.0))
    assert [said(here, "a", at).split()[2] for at in (0.1, 5.0, 10.0)] == [b"10%", b"50%", b"100%"]
    here, speaker = board(unit("a")), ReplyFormatter()
    state = here.units["a"]
    for stand in ServerState:
        speaker.line("a", AgentReply(stand), 1)
        assert speaker.line("a", unit_reply(state, LATE, here), 1).startswith(b"up ready ")


def test_the_gate_is_what_its_usable_units_are() -> None:
    here = board(unit("a"), unit("b"), unit("c", weight=2.0))
    assert gate_reply(here, LATE, stopping=False) == AgentReply(ServerState.UP, 100, 30)
    down(here, "c")
    assert gate_reply(here, LATE, stopping=False) == AgentReply(ServerState.UP, 50, 20)
    down(here, "a")
    down(here, "b")
    assert (
        ReplyFormatter().line("gate", gate_reply(here, LATE, stopping=False), 1)
        == b"down #0/3 units usable\n"
    )
    assert gate_reply(here, LATE, stopping=True) == AgentReply(ServerState.DRAIN)


def test_small_changes_are_not_worth_a_word_and_each_load_balancer_gets_its_part_of_the_places() -> None:
    speaker = ReplyFormatter()
    lines = [
        speaker.line("a", AgentReply(ServerState.UP, percent, 32), 1)
        for percent in (80, 84, 76, 74, 78, 96, 99, 100, 97)
    ]
    assert b" ".join(line.split()[2] for line in lines) == b"80% 80% 80% 74% 74% 96% 96% 100% 100%"
    lines = [
        ReplyFormatter().line("a", AgentReply(ServerState.UP, 100, 32), balancers)
        for balancers in (1, 2, 3, 100)
    ]
    assert [int(line.split(b"maxconn:")[1]) for line in lines] == [32, 16, 10, 1]


@given(
    stand=st.sampled_from(ServerState),
    words=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10**6), st.integers(1, 500)), min_size=1),
    reason=st.text(),
)
def test_every_line_is_one_that_haproxy_understands(
    stand: ServerState, words: list[tuple[int, int, int]], reason: str
) -> None:
    speaker = ReplyFormatter()
    for percent, places, balancers in words:
        assert LINE.fullmatch(speaker.line("a", AgentReply(stand, percent, places, reason), balancers))


def test_load_balancers_are_counted_by_address_and_name_and_bounded() -> None:
    seen = Balancers()
    for who in ("10.0.0.1 ", "10.0.0.2 ", "10.0.0.1 ", "10.0.0.2 lb2"):
        seen.asked("gate", who, 0.0)
    assert (seen.count("gate", SEEN_S), seen.count("a", SEEN_S)) == (3, 1)
    assert seen.count("gate", SEEN_S + 0.1) == 1
    seen.asked("b", "10.0.0.1 ", 0.0)
    for number in range(3 * LIMITS.balancers):
        seen.asked("a", f"10.0.0.{number} ", 0.0)
    assert seen.count("a", 0.0) == LIMITS.balancers
    assert seen.count("b", 0.0) == 1
