"""Laws for every probe in the registry: whatever a unit says, a look ends in findings and nothing else.

1. No answer and no trouble makes a probe raise.
2. Garbage proves no work: the only good news it may pass for is a weak one, a bare 200.
3. The gate's own trouble is never held against a unit.
4. Findings are about the patient's unit, dated now, signed by the probe.

And for every probe of nodes: whatever a server says, a look ends in one bounded piece of evidence.

5. It is about the node looked at, dated now, signed by the probe's name; nothing is endless or unprintable.
6. Only the node's own bad word is strong, and fatal the second time since the last good news.
7. Late, out of reach, garbage, too large: weak. The gate's own trouble: neutral.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cellgate.extras import EXTRAS, part_of
from cellgate.probes import MORE_NODE_PROBES, NODE_PROBES, PROBES
from cellgate.probes.base import Fetch, FetchError, Net, P, Probe, ProbeContext, Trouble
from cellgate.probes.nodes import HttpProbe, NodeProbe, NodeReport, NodeState, NodeTalk, TcpProbe
from cellgate.router.nouns import (
    Answered,
    Built,
    Evidence,
    Finding,
    Load,
    Models,
    Node,
    Role,
    Served,
    Sign,
    Strength,
    Verdict,
)
from tests.patient import Answer, FakePatient, findings_of, look, reply

ALL = dict(PROBES)
if "answers" in EXTRAS:
    ALL["known_answer"] = part_of("answers", "probe").KnownAnswer
every_probe = pytest.mark.parametrize("probe", [kind() for kind in ALL.values()], ids=list(ALL))
law = settings(max_examples=60)

statuses = st.sampled_from([200, 204, 301, 400, 404, 405, 429, 500, 501, 503, 599]) | st.integers(100, 999)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
keys = st.sampled_from(["data", "choices", "error", "id", "object"]) | st.text(max_size=4)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
metric_names = st.sampled_from(
    ["vllm:num_requests_running", "sglang_num_queue_reqs", "process_start_time_seconds"]
)
metric_lines = st.builds(
    lambda *parts: "".join(parts), metric_names, st.sampled_from(["", "{", "{}", "{a}"]), st.text()
)
metric_texts = st.lists(metric_lines, max_size=5).map(
    lambda lines: "\n".join(lines).encode("utf-8", "replace")
)


def examine(probe: Probe, answer: Answer, **state: Any) -> list[Finding]:
    """One look, held against laws 1 and 4."""
    context = FakePatient(lambda _: answer, **state)
    findings = look(probe, context)
    for finding in findings:
        assert isinstance(finding, Evidence | Load | Models | Served | Built | Answered)
        assert (finding.unit, finding.at) == (context.unit.name, context.now_s)
        if isinstance(finding, Evidence):
            assert finding.source == probe.name
            assert finding.reason.isprintable()
    return findings


def proofs_of_work(findings: list[Finding]) -> list[Evidence]:
    """The good evidence that is more than a weak one."""
    evidence = [finding for finding in findings if isinstance(finding, Evidence)]
    return [e for e in evidence if e.sign is Sign.GOOD and e.strength > Strength.WEAK]


@every_probe
def test_it_is_known_by_its_name(probe: Probe) -> None:
    assert ALL[probe.name] is type(probe)


@every_probe
@law
@given(status=statuses, body=st.binary(max_size=200) | metric_texts)
@example(status=200, body=b"[" * 200_000)
@example(status=200, body=b'{"choices":' * 50_000)
@example(status=200, body=b"\xff\xfe\x00")
@example(status=200, body=b"vllm:num_requests_running{" * 40_000)
@example(status=200, body=b"vllm:num_requests_running " + b"9" * 100_000)
def test_garbage_is_never_a_proof_of_work(probe: Probe, status: int, body: bytes) -> None:
    findings = examine(probe, reply(status, body))
    assert proofs_of_work(findings) == []
    good = [f for f in findings if isinstance(f, Evidence) and f.sign is Sign.GOOD]
    assert not good or status == 200


@every_probe
@law
@given(status=statuses, value=json_values)
def test_any_json_ends_in_findings(probe: Probe, status: int, value: object) -> None:
    body = orjson.dumps(value)
    for models in (frozenset({"m"}), frozenset[str]()):
        findings = examine(probe, reply(status, body), models=models)
        if status != 200:
            assert proofs_of_work(findings) == []


@every_probe
@pytest.mark.parametrize("trouble", Trouble)
@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("models", [frozenset(), frozenset({"m"})], ids=["models unknown", "models known"])
def test_no_trouble_is_good_news(
    probe: Probe, trouble: Trouble, verdict: Verdict, models: frozenset[str]
) -> None:
    findings = examine(probe, trouble, verdict=verdict, models=models)
    signs = {finding.sign for finding in findings if isinstance(finding, Evidence)}
    assert signs <= ({Sign.NEUTRAL} if trouble is Trouble.OWN else {Sign.NEUTRAL, Sign.BAD})


@every_probe
@pytest.mark.parametrize("line", [b"\n", b"\nvllm:num_requests_running{} 1", b'{"data":['])
def test_an_endless_body_is_cut(probe: Probe, line: bytes) -> None:
    """At every bound, and just below it."""
    for size in (1 << 20, (4 << 20) + 1):
        body = (line * (size // len(line) + 1))[:size]
        assert proofs_of_work(examine(probe, reply(200, body))) == []


@every_probe
@pytest.mark.parametrize("verdict", Verdict)
def test_the_first_look_waits_for_nothing_but_signs_of_life(probe: Probe, verdict: Verdict) -> None:
    context = FakePatient(lambda _: reply(200), verdict=verdict, progress_at=-math.inf)
    assert probe.due_at(context, -math.inf) == -math.inf
    assert context.now_s < probe.due_at(context, context.now_s) < math.inf


# Probes of nodes.

NODES: dict[str, NodeProbe] = {
    "http": HttpProbe("http://n:1/health"),
    "tcp": TcpProbe("n:2"),
}
if "node_probes" in EXTRAS:
    NODES["grpc"] = part_of("node_probes", "grpc").GrpcProbe("n:3", "a.B")
    NODES["exporter"] = part_of("node_probes", "exporter").ExporterProbe("http://n:4/m", preset="node")
every_node_probe = pytest.mark.parametrize("probe", NODES.values(), ids=list(NODES))
lines = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["node_memory_MemAvailable_bytes", "node_filesystem_readonly", "# HELP"]),
    st.sampled_from(["", "{", "{}", '{a="b"}', " "]),
    st.text(max_size=20),
)
pages = st.lists(lines, max_size=5).map(lambda found: "\n".join(found).encode("utf-8", "replace"))


class Wire(asyncio.Transport):
    """A transport that leads nowhere."""

    def write(self, data: Any) -> None: ...

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...


class Around:
    """Who is fetched from gives the patient's answer; who is connected to sends its body and hangs up."""

    def __init__(self, context: NodePatient) -> None:
        self._context = context

    def fetch(self, _url: str, *, token: str = "") -> Fetch:
        return self._context.fetch

    async def connect(
        self, address: str, factory: Callable[[], P], *, timeout_s: float
    ) -> tuple[asyncio.Transport, P]:
        answer = self._context.answer(address)
        if isinstance(answer, Trouble):
            raise FetchError(answer, f"{answer.value}, so it was said")
        protocol, wire = factory(), Wire()
        protocol.connection_made(wire)
        cast("asyncio.Protocol", protocol).data_received(answer.body)
        protocol.connection_lost(None)
        return wire, protocol

    def follow(self, address: str, *_: Any, **__: Any) -> AbstractAsyncContextManager[None]:
        raise FetchError(Trouble.REFUSED, f"connection refused by {address}")


class NodePatient(FakePatient):
    """A patient whose probes look at a node."""

    @property
    def net(self) -> Net:
        return Around(self)


def patient(answer: Answer) -> NodePatient:
    return NodePatient(lambda _: answer, node=Node("n", Role.FOLLOWER))


def examine_node(probe: NodeProbe, looked_at: NodePatient) -> Evidence:
    """One look, held against laws 5 and 6."""
    (evidence,) = asyncio.run(findings_of(probe, looked_at))
    assert isinstance(evidence, Evidence)
    assert (evidence.unit, evidence.node) == (looked_at.unit.name, "n")
    assert (evidence.source, evidence.at, evidence.epoch) == (probe.name, looked_at.now_s, None)
    assert evidence.reason.isprintable()
    assert 0 < len(evidence.reason) <= 400
    assert evidence.sign is Sign.BAD or evidence.strength is Strength.WEAK
    return evidence


def test_every_node_probe_is_examined() -> None:
    more = MORE_NODE_PROBES if "node_probes" in EXTRAS else ()
    assert list(NODES) == [*NODE_PROBES, *more]
    assert all(type(NODES[kind]) is probe for kind, probe in NODE_PROBES.items())
    assert all(probe.kind == kind for kind, probe in NODES.items())


def test_names_tell_probes_apart_and_end() -> None:
    assert len({probe.name for probe in NODES.values()}) == len(NODES)
    name = HttpProbe("http://n/" + "x" * 500 + "?token=s3cret").name
    assert len(name) <= 120
    assert "s3cret" not in HttpProbe("http://n/x?token=s3cret").name


@every_node_probe
@law
@given(status=statuses, body=st.binary(max_size=200) | pages)
@example(status=200, body=b"\n" * (4 << 20))
@example(status=200, body=b"\nnode_memory_MemAvailable_bytes" * 130_000)
@example(status=200, body=b"\nnode_memory_MemAvailable_bytes{" + b'a="b" ' * 600_000)
@example(status=200, body=b"HTTP/1.1 200 OK\r\n\r\n")
@example(status=200, body=b"\0" * 100_000)
def test_whatever_is_said_ends_in_evidence(probe: NodeProbe, status: int, body: bytes) -> None:
    examine_node(probe, patient(reply(status, body)))


@every_node_probe
@pytest.mark.parametrize("trouble", Trouble)
def test_trouble_is_weak_but_for_a_refusal_and_neutral_when_it_is_our_own(
    probe: NodeProbe, trouble: Trouble
) -> None:
    evidence = examine_node(probe, patient(trouble))
    assert evidence.sign is (Sign.NEUTRAL if trouble is Trouble.OWN else Sign.BAD)
    refused = trouble is Trouble.REFUSED and probe.refusal is NodeState.BAD
    assert evidence.strength is (Strength.STRONG if refused else Strength.WEAK)


@every_node_probe
def test_looks_are_periodical_and_bounded_and_a_body_that_is_too_large_is_a_doubt(probe: NodeProbe) -> None:
    if probe.kind not in ("tcp", "http"):
        evidence = examine_node(probe, patient(reply(200, b"x 1\n" * (5 << 18))))
        assert (evidence.sign, evidence.strength) == (Sign.BAD, Strength.WEAK)
    looked_at = patient(Trouble.OWN)
    assert probe.due_at(looked_at, -math.inf) == -math.inf
    assert probe.due_at(looked_at, 100.0) == 100.0 + (5.0 if probe.kind == "exporter" else 1.0)
    assert probe.limit_s(looked_at) == 3.0


# What words weigh.


@dataclass(frozen=True, slots=True)
class Repeats(NodeTalk):
    """Says what it is told to say."""

    words: list[NodeState]

    @property
    def about(self) -> str:
        return "words"

    async def ask(self, _context: ProbeContext) -> NodeReport:
        return NodeReport(self.words.pop(0), "because")


Repeats.kind = "repeats"


@law
@given(st.lists(st.sampled_from(NodeState), max_size=12))
@example([NodeState.BAD, NodeState.DOUBT, NodeState.BAD, NodeState.GOOD, NodeState.BAD])
def test_the_second_bad_word_since_the_last_good_one_is_fatal(words: list[NodeState]) -> None:
    probe, looked_at, bad = Repeats(list(words)), patient(Trouble.OWN), 0
    for word in words:
        evidence = examine_node(probe, looked_at)
        bad = {NodeState.BAD: bad + 1, NodeState.GOOD: 0}.get(word, bad)
        if word is NodeState.BAD:
            assert evidence.strength is (Strength.STRONG if bad == 1 else Strength.FATAL)
        assert evidence.sign is {NodeState.GOOD: Sign.GOOD, NodeState.NOTHING: Sign.NEUTRAL}.get(
            word, Sign.BAD
        )
