"""Probes of nodes without a network: gRPC; the exporter: presets, rules, samples on pages."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cellgate.extras.node_probes.exporter import (
    PRESETS,
    ExporterProbe,
    Rule,
    RuleError,
    TooLargeError,
    labels_of,
    parse,
    scan,
)
from cellgate.extras.node_probes.grpc_health import GrpcProbe, HealthCall
from cellgate.probes.base import FetchError, Trouble
from cellgate.probes.nodes import NodeReport, NodeState
from cellgate.proxy.config.units import a_preset
from cellgate.router.nouns import Evidence, Node, Role, Sign, Strength
from tests.patient import Answer, FakePatient, look, reply
from tests.unit.config.files import probes_of

NODE = Node("n1", Role.FOLLOWER)

# The gRPC health probe without a network: a server's HTTP/2 is fed to one call, whole, cut and damaged.

fuzz = settings(derandomize=True, deadline=None, max_examples=100)
SERVING, NOT_SERVING = b"\0\0\0\0\2\x08\1", b"\0\0\0\0\2\x08\2"
HEAD = {":status": "200", "content-type": "application/grpc+proto"}


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closing


class Server:
    """The other end of one call."""

    def __init__(self, service: str = "") -> None:
        self.call = HealthCall("n1:9000", service)
        self.wire = Wire()
        self.call.connection_made(self.wire)
        self.http2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.http2.initiate_connection()
        self.asked = self.http2.receive_data(self.wire.written)

    def answer(self, body: bytes | None, head: Mapping[str, str] = HEAD, **trailers: str) -> bytes:
        """The bytes of an answer; without a body there is one block of headers only."""
        fields = {name.replace("_", "-"): value for name, value in trailers.items()}
        if body is None:
            self.http2.send_headers(1, [*head.items(), *fields.items()], end_stream=True)
        else:
            self.http2.send_headers(1, list(head.items()))
            self.http2.send_data(1, body)
            self.http2.send_headers(1, list(fields.items()), end_stream=True)
        return self.http2.data_to_send()


def heard(body: bytes | None, **trailers: str) -> NodeReport:
    server = Server()
    server.call.data_received(server.answer(body, HEAD, **trailers))
    assert server.call.ended.is_set()
    return server.call.said()


@pytest.mark.parametrize(
    ("service", "size"),
    [("", b"\0\0\0\0\0"), ("a.B", b"\0\0\0\0\5\x0a\3"), ("s" * 200, b"\0\0\0\0\xcb\x0a\xc8\1")],
    ids=["none", "short", "long"],
)
def test_the_call_is_what_grpc_servers_expect(service: str, size: bytes) -> None:
    """The service is named whatever its length."""
    asked = Server(service).asked
    (request,) = [event for event in asked if isinstance(event, RequestReceived)]
    assert {str(name): str(value) for name, value in request.headers} == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": "n1:9000",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "cellgate",
    }
    (message,) = [event.data for event in asked if isinstance(event, DataReceived)]
    assert message == size + service.encode()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (SERVING, NodeState.GOOD),
        (NOT_SERVING, NodeState.BAD),
        (b"\0\0\0\0\0", NodeState.NOTHING),
        (b"\0\0\0\0\2\x08\0", NodeState.NOTHING),
        (b"\0\0\0\0\2\x08\3", NodeState.NOTHING),
    ],
    ids=["serving", "not serving", "unknown", "unknown in full", "service unknown"],
)
def test_the_health_service_says_how_the_node_is(body: bytes, word: NodeState) -> None:
    assert heard(body, grpc_status="0").state is word


@pytest.mark.parametrize(
    ("status", "word", "said"),
    [
        ("5", NodeState.NOTHING, "NOT_FOUND: name a service that the health service knows as `service`"),
        ("12", NodeState.NOTHING, "UNIMPLEMENTED: the server has no health service; use another probe"),
        ("16", NodeState.NOTHING, "UNAUTHENTICATED"),
        ("8", NodeState.NOTHING, "RESOURCE_EXHAUSTED"),
        ("14", NodeState.DOUBT, "the call failed"),
        ("", NodeState.DOUBT, "the call failed"),
    ],
)
def test_a_call_that_fails_says_nothing_or_little(status: str, word: NodeState, said: str) -> None:
    trailers = {"grpc_status": status} if status else {"x": "y"}
    for body in (None, b""):
        heard_of_it = heard(body, **trailers, grpc_message="going%20down")
        assert heard_of_it.state is word
        assert heard_of_it.reason.startswith(said)
        assert heard_of_it.reason.endswith(f"(grpc-status {status or 'missing'} going down)")


@fuzz
@given(st.lists(st.integers(1, 30), max_size=20))
def test_it_does_not_matter_how_the_answer_is_cut(sizes: list[int]) -> None:
    server = Server()
    data = server.answer(SERVING, grpc_status="0")
    for size in [*sizes, len(data)]:
        server.call.data_received(data[:size])
        data = data[size:]
    assert server.call.said().state is NodeState.GOOD


@fuzz
@given(st.binary(max_size=300), st.integers(0, 200), st.integers(0, 50))
@example(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n", 0, 999)
@example(b"\0" * 100_000, 0, 0)
def test_garbage_ends_in_an_answer_or_a_trouble(noise: bytes, at: int, lost: int) -> None:
    server = Server()
    data = server.answer(SERVING, grpc_status="0")
    server.call.data_received(data[:at] + noise + data[at + lost :])
    server.call.data_received(noise)
    server.call.connection_lost(None)
    assert server.call.ended.is_set()
    try:
        said = server.call.said()
    except FetchError as error:
        assert str(error)  # noqa: PT017
    else:
        assert said.reason


@pytest.mark.parametrize(
    ("body", "head", "said"),
    [
        (b"\0\0\0\0\2\x08\7", HEAD, "its answer is not a HealthCheckResponse"),
        (b"\1\0\0\0\2\x08\1", HEAD, "its answer is not a HealthCheckResponse"),
        (SERVING * 2, HEAD, "its answer is not a HealthCheckResponse"),
        (b"", HEAD, "its answer is not a HealthCheckResponse"),
        (b"<html>", {":status": "404", "content-type": "text/html"}, "HTTP 404 is not a gRPC answer"),
    ],
)
def test_what_is_no_answer_is_a_trouble(body: bytes, head: dict[str, str], said: str) -> None:
    server = Server()
    server.call.data_received(server.answer(body, head, grpc_status="0"))
    with pytest.raises(FetchError, match=said):
        server.call.said()


def test_a_server_that_breaks_off_is_a_trouble() -> None:
    """An answer that was complete stays valid."""
    hung_up, reset, gone, chatty = Server(), Server(), Server(), Server()
    hung_up.call.connection_lost(None)
    reset.http2.reset_stream(1, 2)
    gone.http2.close_connection(11)
    for _ in range(6000):
        chatty.http2.ping(b"12345678")
    for server, said in (
        (hung_up, "it closed the connection before it answered"),
        (reset, r"it reset the call \(HTTP/2 error 2\)"),
        (gone, r"it reset the call \(HTTP/2 error 11\)"),
        (chatty, "its reply is larger than 65536 bytes"),
    ):
        server.call.data_received(server.http2.data_to_send())
        with pytest.raises(FetchError, match=f"^{said}$"):
            server.call.said()
    server = Server()
    server.call.data_received(server.answer(NOT_SERVING, grpc_status="0"))
    server.http2.close_connection()
    server.call.data_received(server.http2.data_to_send())
    server.call.connection_lost(None)
    assert server.call.said() == NodeReport(NodeState.BAD, "NOT_SERVING")


GOOD = (Sign.GOOD, Strength.WEAK)
DOUBT = (Sign.BAD, Strength.WEAK)
FIRST, SECOND = (Sign.BAD, Strength.STRONG), (Sign.BAD, Strength.FATAL)
NOTHING = (Sign.NEUTRAL, Strength.WEAK)
RANGES = "ranges in brackets are not supported: increase is the growth since the last probe"

DCGM = """# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1",device="nvidia0",err_msg="No Error"} 0
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-2",device="nvidia1",err_msg="of GPU 1"} %d
DCGM_FI_DEV_GPU_TEMP{gpu="0"} 79
"""
XID_COUNT = 'DCGM_EXP_XID_ERRORS_COUNT{gpu="1",window_size_in_ms="300000",xid="%d"} 2\n'
NEURON = """execution_errors_total{error_type="hardware",runtime_tag="9"} %s
execution_errors_total{error_type="numerical",runtime_tag="9"} %s
hardware_ecc_events_total{event_type="mem_ecc_uncorrected",neuron_device_index="0"} 4.0
"""
NODE_PAGE = """node_filesystem_readonly{device="/dev/root",fstype="ext4",mountpoint="/"} %s
node_vmstat_oom_kill 3
node_memory_MemAvailable_bytes %s
"""


class Looks:
    """One probe that looks at page after page."""

    def __init__(self, *, rule: str = "", preset: str = "") -> None:
        self._answer: Answer = Trouble.OWN
        self.patient = FakePatient(lambda _: self._answer, node=NODE)
        self.probe = ExporterProbe("http://n1:9400/metrics", rule, preset)
        self.reason = ""

    def __call__(self, answer: Answer | str) -> tuple[Sign, Strength]:
        self._answer = reply(200, answer.encode()) if isinstance(answer, str) else answer
        (evidence,) = look(self.probe, self.patient)
        assert isinstance(evidence, Evidence)
        self.reason = evidence.reason
        return evidence.sign, evidence.strength


@pytest.mark.parametrize("xid", [48, 64, 74, 79, 95])
def test_an_xid_that_needs_a_reset_is_fatal_when_it_stays(xid: int) -> None:
    looks = Looks(preset="dcgm")
    assert [looks(DCGM % 0), looks(DCGM % xid), looks(DCGM % xid)] == [GOOD, FIRST, SECOND]
    assert looks.reason.startswith(f'DCGM_FI_DEV_XID_ERRORS == {xid}: DCGM_FI_DEV_XID_ERRORS{{gpu="1",')
    assert looks.reason.endswith(f"is {xid}")
    assert looks(DCGM % 0) == GOOD


def weights(preset: str, *answers: Answer | str) -> list[tuple[Sign, Strength]]:
    return [*map(Looks(preset=preset), answers)]


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 94])
def test_an_xid_of_an_application_or_a_repair_is_none_and_hides_no_fatal_one(xid: int) -> None:
    assert weights("dcgm", DCGM % xid, DCGM % 0 + XID_COUNT % xid) == [GOOD, GOOD]
    assert weights("dcgm", DCGM % xid + XID_COUNT % 95) == [FIRST]


def test_growth_counts_from_the_second_look() -> None:
    """A counter that began anew grew by what it has; a failed look does not forget the last values."""
    pages = [NEURON % each for each in ((7, 0), (7, 5), (8, 5), (9, 5), (9, 5))]
    assert weights("neuron", *pages) == [GOOD, GOOD, FIRST, SECOND, GOOD]
    assert weights("neuron", NEURON % (7, 0), NEURON % (0, 0), NEURON % (2, 0)) == [GOOD, GOOD, FIRST]
    assert weights("neuron", NEURON % (7, 0), Trouble.TIMEOUT, NEURON % (8, 0)) == [GOOD, DOUBT, FIRST]


def test_a_file_system_is_bad_when_it_becomes_read_only_and_a_machine_while_it_lacks_memory() -> None:
    read_only = [NODE_PAGE % (is_so, 8e9) for is_so in (1, 0, 1, 1)]
    assert weights("node", *read_only) == [GOOD, GOOD, FIRST, GOOD]
    assert weights("node", *(NODE_PAGE % (0, left) for left in (1e6, 1e6, 8e9))) == [FIRST, SECOND, GOOD]


@pytest.mark.parametrize("answer", [Trouble.REFUSED, Trouble.TIMEOUT, Trouble.BROKEN, reply(500), reply(404)])
def test_an_exporter_that_is_gone_is_no_node_that_is_gone(answer: Answer) -> None:
    assert weights("dcgm", *[answer] * 3) == [DOUBT] * 3


def test_a_rule_of_ones_own() -> None:
    """A page without its samples says nothing but takes a bad word back; ten megabytes are too much."""
    looks = Looks(rule='load{cpu="0"} > 100')
    assert looks('load{cpu="0"} 100\nload{cpu="1"} 900\n') == GOOD
    assert looks('load{cpu="0"} 101\n') == FIRST
    assert looks.probe.name == 'exporter n1:9400/metrics load{cpu="0"} > 100'
    looks = Looks(rule="x > 0")
    assert looks("<html>\n") == NOTHING
    assert looks.reason == "the page has no sample of x; check the URL and the rule"
    assert [looks("x 1"), looks("y 1"), looks("y 1")] == [FIRST, GOOD, NOTHING]
    looks = Looks(rule="x > 0")
    assert looks("y 1\n" * (10 << 18)) == DOUBT
    assert looks.reason == "more than 4194304 bytes"
    assert looks("x 1\n" * 100_000) == DOUBT
    assert looks.reason == "more than 262144 bytes of lines that begin with x"


@pytest.mark.parametrize(("rule", "preset"), [("", ""), ("x > 0", "dcgm"), ("x", "")])
def test_it_goes_by_one_rule_or_one_preset(rule: str, preset: str) -> None:
    with pytest.raises(RuleError):
        ExporterProbe("http://n/metrics", rule, preset)


# Rules on exporters' samples: what they mean, what is none, and how the samples are found on a page.

metric_names = st.builds(str.__add__, st.sampled_from("aZ_:"), st.text("zA_:90", max_size=12))
label_names = st.builds(str.__add__, st.sampled_from("aZ_"), st.text("zA_90", max_size=8))
label_values = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8)
label_sets = st.dictionaries(label_names, label_values, max_size=3)
blanks = st.text(" \t", max_size=2)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def written(labels: dict[str, str], blank: str = "") -> str:
    """Labels in braces; none for no label."""
    inside = f",{blank}".join(
        f'{name}{blank}={blank}"{escaped(value)}"{blank}' for name, value in labels.items()
    )
    return f"{{{blank}{inside}}}" if labels else ""


# Rules.


COMPARE = {"==": eq, "!=": ne, ">": gt, ">=": ge, "<": lt, "<=": le}
numbers = st.sampled_from([-1.0, 0.0, 2.0]) | st.floats(allow_nan=False, allow_infinity=False)


@fuzz
@given(
    metric_names, label_sets, st.booleans(), st.sampled_from(list(COMPARE)), numbers, numbers, numbers, blanks
)
def test_a_rule_means_what_it_says(
    metric: str,
    labels: dict[str, str],
    grows: bool,
    compare: str,
    limit: float,
    last: float,
    value: float,
    blank: str,
) -> None:
    """The growth is that of a counter, which may begin anew."""
    sample = f"{metric}{blank}{written(labels, blank)}"
    text = f"increase{blank}({blank}{sample}{blank})" if grows else sample
    rule = parse(f"{blank}{text}{blank}{compare}{blank}{limit!r}{blank}")
    assert (rule.metric, rule.labels, rule.grows) == (metric, tuple(labels.items()), grows)
    assert (rule.compare, rule.limit) == (compare, limit)
    assert parse(rule.text) == rule
    for before, grown in ((None, 0.0), (last, value - last if value >= last else value)):
        assert rule.holds(value, before) is COMPARE[compare](grown if grows else value, limit)


@fuzz
@given(st.text(max_size=40) | st.lists(st.sampled_from('x_1{}()=!<>~",\\ \n[]'), max_size=30).map("".join))
@example("x{" + 'a="b" ' * 70 + "> 1")
@example("x{" + "\\" * 400)
@example("x" * 501)
def test_what_is_no_rule_is_refused_and_nothing_else_happens(text: str) -> None:
    with suppress(RuleError):
        assert math.isfinite(parse(text).limit)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("x", "a comparison is missing, such as > 0"),
        ("", "a comparison is missing, such as > 0"),
        ("x = 1", "did you mean '=='?"),
        ("x => 1", "did you mean '>='?"),
        ("x ~ 1", "known comparisons: == != >= <= > <"),
        ("x > y", "it must end with a number"),
        ("x > inf", "it must end with a number"),
        ("rate(x) > 1", "function rate() is not supported; did you mean 'increase(x)'?"),
        ("increase(x > 1", "a parenthesis is missing"),
        ("increase(x[5m]) > 1", RANGES),
        ("x > 1 and y > 2", "only one comparison is allowed; use one probe for each"),
        ("x{a=b} > 1", 'label values must be in double quotes: {label="value"}'),
        ('x{a!="b"} > 1', 'labels can only be compared by label="value"'),
        ('x{a=~"b"} > 1', 'labels can only be compared by label="value"'),
        ("x" * 500 + " > 1", "it is longer than 500 characters"),
    ],
)
def test_the_near_miss_is_named(text: str, hint: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert caught.value.hint == hint


def test_labels_narrow_a_rule_and_a_missing_one_is_empty() -> None:
    samples = list(scan(b'x{a="1",b="2"} 5\nx{a="2"} 7\nx 9', ["x"]))
    for rule, values in (('x{a="1"}', [5.0]), ('x{b=""}', [7.0, 9.0]), ("x", [5.0, 7.0, 9.0])):
        assert [sample.value for sample in samples if parse(f"{rule} > 0").is_about(sample)] == values
    assert all(isinstance(parse(text), Rule) for rules in PRESETS.values() for text in rules)


# Samples.


@fuzz
@given(
    st.lists(st.tuples(metric_names, label_sets, st.floats(allow_nan=False)), max_size=8),
    st.lists(st.binary(max_size=12).filter(lambda noise: b"\n" not in noise), min_size=1, max_size=3),
    blanks,
)
def test_the_samples_of_a_page_are_found_among_noise(
    samples: list[tuple[str, dict[str, str], float]], noise: list[bytes], blank: str
) -> None:
    page = b"\n".join(
        line
        for metric, labels, value in samples
        for line in (f"{metric}{written(labels, blank)} {blank}{value!r} 12345".encode(), b"# " + noise[0])
    )
    for wanted in {metric for metric, _, _ in samples}:
        found = [(sample.value, labels_of(sample)) for sample in scan(page, [wanted])]
        assert found == [(value, labels) for metric, labels, value in samples if metric == wanted]


@fuzz
@given(
    st.binary(max_size=300), st.lists(st.sampled_from([b'x{a="b"} ', b"x", b"\n", b"{", b'"', b"\\", b" 1"]))
)
def test_no_page_is_too_strange(garbage: bytes, pieces: list[bytes]) -> None:
    page = garbage + b"".join(pieces)
    assume(b"\n" in page)
    for sample in scan(page, ["x", "xx"]):
        assert not math.isnan(sample.value)
        labels_of(sample)
        str(sample)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (b"x 1", [1.0]),
        (b"x\t1\r", [1.0]),
        (b'x{a="}"} 3 # {trace="1"} 9', [3.0]),
        (b'x{a="\\"}",} 4', [4.0]),
        (b"x{} 5", [5.0]),
        (b"x +Inf", [math.inf]),
        (b"x NaN", []),
        (b"x", []),
        (b"x{", []),
        (b"xy 1", []),
        (b" x 1", []),
        (b"# x 1", []),
        (b"x{a=b} 1", []),
        (b'x{a="' + b"v" * 5000 + b'"} 1', []),
    ],
)
def test_a_line_is_a_sample_or_nothing(line: bytes, values: list[float]) -> None:
    assert [sample.value for sample in scan(b"y 1\n" + line + b"\nz 1", ["x"])] == values


@pytest.mark.parametrize(
    "line", [b"x", b"x 1", b'x{a="b" ', b'x{a="' + b"\\a" * 1900, b'x{a="b"' + b" " * 4000], ids=range(5)
)
def test_a_page_made_to_cost_much_is_given_up_soon(line: bytes) -> None:
    """After some 0.1 s; a collection of all other tests' garbage meanwhile would not be its own cost."""
    page = (line + b"\n") * ((4 << 20) // (len(line) + 1))
    began = time.thread_time()
    gc.disable()
    try:
        with pytest.raises(TooLargeError):
            deque(scan(page, ["x"]), maxlen=0)
    finally:
        gc.enable()
    assert time.thread_time() - began < 1.0


# Their keys.


def test_how_a_node_is_probed_is_read_as_it_says(tmp_path: Path) -> None:
    probes = {
        "probe: grpc, address: n1:9000, service: a.B": GrpcProbe("n1:9000", "a.B"),
        "probe: exporter, url: 'http://x/m', rule: 'x{a=\"b\"} > 1'": ExporterProbe(
            "http://x/m", 'x{a="b"} > 1'
        ),
    }
    for preset in PRESETS:
        text = f"probe: exporter, url: 'http://x/m', preset: {preset}"
        probes[text] = ExporterProbe("http://x/m", preset=preset)
    assert probes_of(tmp_path, *probes) == tuple(probes.values())
    assert a_preset.kind() == {"enum": sorted(PRESETS)}
