"""A unit that comes up is known before it gets requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellgate.probes.canary import Canary
from cellgate.router.nouns import Built, Evidence, Models, Served, Verdict
from tests.patient import FakePatient, look, reply

TOKEN = reply(200, b'{"choices": [{"message": {"content": "x"}}], "usage": {}}')


@pytest.mark.parametrize("verdict", [Verdict.STARTING, Verdict.PROBATION])
def test_a_unit_that_comes_up_says_first_which_version_it_is(verdict: Verdict) -> None:
    """Else a stream that begins there at once would be that of an unknown build."""
    answers = {"/version": reply(200, b'{"version": "0.32.0"}')}
    context = FakePatient(lambda target: answers.get(target, TOKEN), verdict=verdict, engine="vllm")
    built, evidence = look(Canary(), context)
    assert isinstance(built, Built)
    assert built.build.version == "0.32.0"
    assert isinstance(evidence, Evidence)
    known = replace(context, asked=[], build=built.build)
    assert [type(found) for found in look(Canary(), known)] == [Evidence]
    answers["/version"] = reply(500)
    assert [type(found) for found in look(Canary(), replace(context, asked=[]))] == [Evidence]


def test_a_unit_whose_engine_is_unknown_says_first_what_it_is() -> None:
    """A restart may bring another engine, so what was known is forgotten."""
    listed = reply(200, b'{"data": [{"id": "m", "owned_by": "vllm"}]}')
    answers = {"/v1/models": listed}
    context = FakePatient(
        lambda target: answers.get(target, TOKEN), verdict=Verdict.STARTING, models=frozenset({"m"})
    )
    found = look(Canary(), context)
    assert [type(finding) for finding in found] == [Served, Models, Evidence]
    answers["/v1/models"] = reply(500)
    assert [type(finding) for finding in look(Canary(), context)] == [Evidence]
