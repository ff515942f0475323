"""Laws for every probe in the registry: whatever a unit says, a look ends in findings and nothing else.

1. No answer and no trouble makes a probe raise.
2. Garbage proves no work: the only good news it may pass for is a weak one, a bare 200.
3. The gate's own trouble is never held against a unit.
4. Findings are about the patient's unit, dated now, signed by the probe.
"""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cellgate.probes import PROBES
from cellgate.probes.base import Probe, Trouble
from cellgate.router.nouns import (
    Answered,
    Built,
    Evidence,
    Finding,
    Load,
    Models,
    Served,
    Sign,
    Strength,
    Verdict,
)
from tests.patient import Answer, FakePatient, look, reply

every_probe = pytest.mark.parametrize("probe", [kind() for kind in PROBES.values()], ids=list(PROBES))
law = settings(derandomize=True, deadline=None, max_examples=60)

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
    assert PROBES[probe.name] is type(probe)


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
