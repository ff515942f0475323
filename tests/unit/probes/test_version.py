"""The version of an engine, from the page where it shows it."""

from __future__ import annotations

import pytest

from cellgate.probes.canary import EngineVersion
from cellgate.router.nouns import Build, Built
from tests.patient import FakePatient, look, reply

PROBE = EngineVersion()


@pytest.mark.parametrize(
    ("engine", "path", "page"),
    [
        ("vllm", "/version", b'{"version": "0.32.0"}'),
        ("sglang", "/server_info", b'{"version": "0.32.0", "internal_states": [{}]}'),
        ("llamacpp", "/props", b'{"build_info": "0.32.0"}'),
        ("trtllm", "/version", b'{"version": "0.32.0"}'),
        ("triton", "/v2", b'{"name": "triton", "version": "0.32.0"}'),
    ],
)
def test_each_engine_shows_it_on_a_page_of_its_own(engine: str, path: str, page: bytes) -> None:
    context = FakePatient(lambda _: reply(200, page), engine=engine)
    assert look(PROBE, context) == [Built("u", Build(version="0.32.0"), 100.0)]
    assert [asked.target for asked in context.asked] == [path]


@pytest.mark.parametrize("page", [b"", b"[]", b'{"version": 7}', b'{"version": "' + b"x" * 200 + b'"}'])
def test_strange_pages_show_no_version(page: bytes) -> None:
    assert look(PROBE, FakePatient(lambda _: reply(200, page), engine="vllm")) == []


def test_it_is_asked_often_until_it_is_known_or_known_to_be_missing() -> None:
    context = FakePatient(lambda _: reply(404), engine="")
    assert look(PROBE, context) == []
    assert PROBE.due_at(context, 100.0) == 100.0 + PROBE.eager_s
    context.engine = "vllm"
    assert look(PROBE, context) == []
    assert PROBE.due_at(context, 100.0) == 100.0 + PROBE.period_s
    known = FakePatient(lambda _: reply(200), engine="vllm", build=Build(version="0.32.0"))
    assert PROBE.due_at(known, 100.0) == 100.0 + PROBE.period_s
