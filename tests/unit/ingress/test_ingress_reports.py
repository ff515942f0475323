"""What the ingress is told: ORCA, Envoy, the present reason; and what the files in deploy/ do with heads."""

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

from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.http.heads import INTERNAL_REPLY_FIELDS, KEY_FIELDS, MEANINGS, REQUEST_FIELDS, Said
from cellgate.proxy.ingress.reasons import why
from cellgate.proxy.ingress.reports import (
    DEGRADED,
    FAIL_NOW,
    KV_FULL,
    LEAST,
    WINDOW_S,
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
from cellgate.proxy.request.routes import FIELDS as CORS_FIELDS
from cellgate.proxy.request.routes import RouteKind, RoutingHeaders, find_route
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, Load, Rules, Sign, Strength, Unit
from cellgate.router.outliers import Outlier

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


def test_the_bytes_are_those_of_the_wire_format() -> None:
    assert base64.b64encode(encoded(REPORT)) == REPORT_BASE64


def test_a_published_vector_reads_as_expected_by_the_decoder_used_here() -> None:
    """Envoy's tests have these bytes for {cpu 0.5, rps 100, eps 2, named rif 4}."""
    message = decoder().FromString(
        base64.b64decode("CQAAAAAAAOA/MQAAAAAAAFlAOQAAAAAAAABAQg4KA3JpZhEAAAAAAAAQQA==")
    )
    assert (message.cpu_utilization, message.rps_fractional, message.eps) == (0.5, 100.0, 2.0)
    assert dict(message.named_metrics) == {"rif": 4.0}


@given(
    utilization=numbers,
    rps=numbers,
    eps=numbers,
    named=st.dictionaries(st.from_regex(r"[a-z_]{1,40}", fullmatch=True), numbers, max_size=6),
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


def board(*units: Unit) -> Board:
    """Units that are all UP."""
    made = Board(Rules())
    made.configure(Fleet(units=units), 0.0)
    for unit in units:
        made.observe(Evidence(unit.name, Sign.GOOD, Strength.STRONG, "canary", "it answers", 0.0))
    return made


def unit(name: str, places: int = 10) -> Unit:
    return Unit(name, "c", f"http://{name}", max_in_flight=places)


def down(on: Board, name: str) -> None:
    on.observe(Evidence(name, Sign.BAD, Strength.FATAL, "tcp_accept", "refused", 1.0))


def test_utilization_is_of_the_places_of_the_usable_units() -> None:
    here = board(unit("a"), unit("b", 30))
    for _ in range(4):
        here.open("b", Ask(), 0.0, retry=False)
    assert gate_utilization(here, waiting=0) == 4 / 40
    assert gate_utilization(here, waiting=6) == 10 / 40
    down(here, "a")
    assert gate_utilization(here, waiting=6) == 10 / 30


def test_other_peoples_requests_and_a_full_cache_count() -> None:
    here = board(unit("a"), unit("b"))
    here.report(Load("a", 1.0, running=5, waiting=1))
    assert gate_utilization(here, 0) == 6 / 20
    here.report(Load("b", 1.0, running=1, kv_use=KV_FULL))
    assert gate_utilization(here, 0) == 16 / 20


def test_a_gate_without_a_usable_unit_has_no_utilization() -> None:
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
    gate = Clocked()
    report = gate.run(10 * WINDOW_S, rps=8.0, in_flight=4)
    assert report.rps_fractional == pytest.approx(8.0, rel=0.02)
    assert report.application_utilization == pytest.approx(0.4, rel=0.02)
    assert report.eps == 0.0
    report = gate.run(10 * WINDOW_S, rps=2.0, in_flight=1)
    assert report.rps_fractional == pytest.approx(2.0, rel=0.05)


def test_the_weight_is_what_the_units_can_do_whatever_they_are_sent() -> None:
    """By Little's law in_flight = rps * duration, so the weight is places / duration."""
    fast, slow = Clocked(), Clocked()
    fast.run(40.0, rps=8.0, in_flight=4)
    slow.run(40.0, rps=2.0, in_flight=2)
    assert fast.weight() == pytest.approx(10 / 0.5, rel=0.05)
    assert slow.weight() == pytest.approx(10 / 1.0, rel=0.05)


def test_failures_weigh_against_the_gate() -> None:
    well, ill = Clocked(), Clocked()
    well.run(40.0, rps=8.0, in_flight=4)
    ill.run(40.0, rps=8.0, in_flight=4, status=503)
    assert ill.orca.report.eps == pytest.approx(8.0, rel=0.02)
    assert ill.weight() < well.weight() / 3


def test_health_checks_are_no_work() -> None:
    gate = Clocked()
    assert gate.run(10.0, rps=100.0, in_flight=0, route="health").rps_fractional == 0.0
    for path in (b"/readyz", b"/livez", b"/v1/models", b"/healthz/unit/a", b"/version", b"/tokenize"):
        route = find_route(path)
        assert route.kind in (RouteKind.LOCAL, RouteKind.READ)
        assert gate.run(10.0, rps=4.0, in_flight=0, route=route.name).rps_fractional == 0.0


def test_idle_is_not_zero() -> None:
    report = Clocked().run(60.0, rps=0.0, in_flight=0)
    assert report.application_utilization == LEAST


def test_a_gate_that_was_idle_is_as_strong_as_before() -> None:
    """Or its first report would keep the next request away, and with it the next report."""
    gate = Clocked()
    gate.run(40.0, rps=8.0, in_flight=4)
    before = gate.weight()
    gate.run(10_000.0, rps=0.0, in_flight=0)
    assert gate.weight() == pytest.approx(before, rel=0.05)


def test_a_gate_that_had_no_unit_is_as_strong_as_before_whatever_it_refused() -> None:
    gate = Clocked()
    gate.run(40.0, rps=8.0, in_flight=4)
    before = gate.weight()
    down(gate.board, "a")
    gate.run(60.0, rps=50.0, in_flight=0, status=503)
    assert gate.weight() == before
    for _ in range(3):
        gate.board.observe(Evidence("a", Sign.GOOD, Strength.STRONG, "canary", "it answers", gate.now))
    gate.run(5.0, rps=8.0, in_flight=4)
    assert gate.weight() == pytest.approx(before, rel=0.05)


def test_a_gate_that_starts_is_not_weaker_for_having_had_no_unit() -> None:
    gate = Clocked()
    down(gate.board, "a")
    gate.run(20.0, rps=0.0, in_flight=0)
    for _ in range(3):
        gate.board.observe(Evidence("a", Sign.GOOD, Strength.STRONG, "canary", "it answers", gate.now))
    gate.run(5.0, rps=8.0, in_flight=4)
    assert gate.weight() == pytest.approx(20.0, rel=0.1)


def test_a_request_gets_the_carrier_it_asks_for() -> None:
    orca = Clocked().orca
    orca.refresh(0.0)
    assert orca.lines.usual == bin_line(orca.report)
    assert orca.lines.line(b"TEXT") == text_line(orca.report)
    assert orca.lines.line(b" json ") == json_line(orca.report)
    assert orca.lines.line(b"yaml") == bin_line(orca.report)


def test_lines_are_rendered_by_the_tick_alone() -> None:
    gate = Clocked()
    gate.orca.refresh(0.0)
    line = gate.orca.lines.usual
    gate.board.open("a", Ask(), 0.0, retry=False)
    assert gate.orca.lines.usual is line


# What Envoy is told beside a status.


def tell(on: Board, name: str, sign: Sign, strength: Strength = Strength.STRONG) -> None:
    on.observe(Evidence(name, sign, strength, "canary", "the test says so", 1.0))


def test_only_a_stopping_gate_asks_to_be_taken_out_at_once() -> None:
    here = board(*map(unit, ["a", "b"]))
    assert readyz_headers(here, stopping=False) == ()
    assert response_line(stopping=False) == b""
    for name in ("a", "b"):
        tell(here, name, Sign.BAD, Strength.FATAL)
        assert FAIL_NOW not in readyz_headers(here, stopping=False)
        assert unit_headers(here, name) == ()
    assert readyz_headers(here, stopping=True) == (FAIL_NOW,)
    assert response_line(stopping=True) == b"x-envoy-immediate-health-check-fail: 1\r\n"


def test_a_drained_unit_is_no_stopping_gate() -> None:
    here = board(*map(unit, ["a", "b"]))
    here.drain("a", drained=True)
    assert unit_headers(here, "a") == ()
    assert FAIL_NOW not in readyz_headers(here, stopping=False)


def test_a_gate_is_degraded_when_half_of_its_weight_is_gone() -> None:
    here = board(*map(unit, ["a", "b", "c", "d"]))
    tell(here, "a", Sign.BAD, Strength.FATAL)
    assert not gate_is_degraded(here)
    tell(here, "b", Sign.BAD, Strength.FATAL)
    assert readyz_headers(here, stopping=False) == (DEGRADED,)
    tell(here, "b", Sign.GOOD)
    tell(here, "b", Sign.GOOD)
    tell(here, "b", Sign.GOOD)
    assert readyz_headers(here, stopping=False) == ()


def test_a_gate_whose_only_unit_is_suspected_is_degraded() -> None:
    here = board(*map(unit, ["a"]))
    assert not gate_is_degraded(here)
    tell(here, "a", Sign.BAD)
    assert gate_is_degraded(here)


def test_a_gate_that_takes_itself_to_be_cut_off_is_degraded() -> None:
    here = board(*map(unit, ["a", "b"]))
    here.panic_at = 1.0
    assert gate_is_degraded(here)


def test_a_unit_is_degraded_when_suspected_in_doubt_or_slow() -> None:
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


def told(*evidence: Evidence) -> str:
    """What is said of a unit after this evidence."""
    board = Board(Rules())
    board.configure(Fleet((Cell("c"),), (Unit("a", "c", "http://a:1"),)), 0.0)
    for piece in evidence:
        board.observe(piece)
    return why(board.units["a"])


def test_a_unit_that_is_down_is_down_for_what_is_wrong_now() -> None:
    assert told(PASSED, REFUSED) == "connection refused by a:1 (source readiness)"
    assert told(PASSED, REFUSED, TURNED_DOWN) == "the canary was refused: HTTP 401 (source canary)"


def test_a_unit_that_is_up_is_up_for_its_last_proof() -> None:
    newest = replace(PASSED, reason="one token by completions", at=9.0)
    assert told(PASSED, newest) == "one token by completions (source canary)"


def test_a_unit_that_works_and_calls_itself_unready_says_both() -> None:
    said = told(PASSED, UNREADY, replace(PASSED, at=3.0))
    assert said == "one token by chat (source canary); but its readiness says: GET /health: HTTP 500"


def test_before_the_first_verdict_it_is_said_what_its_canary_was_told() -> None:
    assert told() == "no probe has answered yet"
    neutral = replace(TURNED_DOWN, sign=Sign.NEUTRAL)
    assert told(neutral) == "the canary was refused: HTTP 401 (source canary)"


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


def test_each_field_that_the_gate_reads_is_in_the_table() -> None:
    routing = RoutingHeaders(HeaderNames()).names
    read = REQUEST_FIELDS | KEY_FIELDS | CORS_FIELDS | routing
    assert read - FRAMING - MEANINGS.keys() == set()


def test_no_other_field_of_the_gate_is_read_anywhere() -> None:
    sources = "".join(path.read_text() for path in (DEPLOY.parent / "proxy").rglob("*.py"))
    named = set(re.findall(r'b"(x-(?:cellgate|gateway|haproxy|envoy)-[a-z-]+)[":]', sources))
    answers = {"x-envoy-degraded", "x-envoy-immediate-health-check-fail", "x-cellgate-reason"}
    answers |= {"x-cellgate-model", "x-cellgate-fallback-from", "x-cellgate-unit-request-id"}
    assert named - answers - {name.decode() for name in MEANINGS} == set()


@pytest.mark.parametrize("file", FILES)
def test_an_ingress_passes_on_nothing_of_its_clients_that_is_not_theirs_to_say(file: str) -> None:
    removed, replaced, _ = FILES[file]((DEPLOY / file).read_text())
    said = {who: {name.decode() for name, by in MEANINGS.items() if by is who} for who in Said}
    assert said[Said.BY_OPERATOR] - removed == set()
    assert said[Said.BY_INGRESS] - removed - replaced == set()
    assert said[Said.BY_CLIENTS] & removed == set()
    assert "x-forwarded-for" in replaced


@pytest.mark.parametrize("file", FILES)
def test_an_ingress_shows_users_nothing_of_the_fleet(file: str) -> None:
    _, _, hidden = FILES[file]((DEPLOY / file).read_text())
    assert {name.decode() for name in INTERNAL_REPLY_FIELDS} - hidden == set()


def test_no_other_file_is_an_ingress() -> None:
    found = {
        str(path.relative_to(DEPLOY))
        for path in DEPLOY.rglob("*")
        if path.is_file()
        and re.search(r"\n(frontend|    upstream) |http_connection_manager", path.read_text())
    }
    assert found == FILES.keys()
