"""Learning what a unit serves: its engine and its models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.canary import ModelList
from cellgate.probes.engines import ENGINES
from cellgate.router.nouns import Models, Served, Unit, Verdict
from tests.patient import Answer, FakePatient, look, reply

VLLM = reply(200, b'{"object": "list", "data": [{"id": "base", "owned_by": "vllm"}, {"id": "lora"}]}')
LLAMA_CPP = reply(
    200,
    b'{"models":[{"name":"tiny","model":"tiny","type":"model","capabilities":["completion"]}],"object":"list",'
    b'"data":[{"id":"tiny","aliases":["tiny"],"tags":[],"object":"model","created":1795382035,'
    b'"owned_by":"llamacpp","meta":{"n_vocab":99,"n_ctx":2048,"n_params":681856}}]}',
)
LLAMA_CPP_LOADING = reply(503, b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')
TRITON = {
    "/v2": reply(200, b'{"name": "triton", "version": "2.60.0", "extensions": ["model_repository"]}'),
    "/v2/repository/index": reply(200, b'[{"name": "llm", "version": "1", "state": "READY"}]'),
}


def triton(target: str) -> Answer:
    """A Triton server."""
    return TRITON.get(target, reply(404))


LORA = reply(
    200,
    b'{"object":"list","data":[{"id":"poet","owned_by":"vllm","root":"/a","parent":"base"},'
    b'{"id":"base","owned_by":"vllm","parent":null},{"id":"odd","parent":["base"]},{"id":{},"parent":"base"},'
    b'{"id":"stray","parent":"other"},{"id":"loop","parent":"loop"}]}',
)


def test_lora_adapters_are_told_from_models() -> None:
    """An adapter of a model that is not in the list is a model like others."""
    found = look(ModelList(), FakePatient(lambda _: LORA))[-1]
    assert isinstance(found, Models)
    assert (found.names, found.bases) == (("poet", "base", "odd", "stray", "loop"), {"poet": "base"})


def test_the_list_of_models_tells_models_and_engine() -> None:
    """OpenAI's list shape."""
    context = FakePatient(lambda _: VLLM)
    assert look(ModelList(), context) == [
        Served("u", "vllm", context.now_s),
        Models("u", ("base", "lora"), context.now_s),
    ]
    assert [(asked.method, asked.target) for asked in context.asked] == [("GET", "/v1/models")]


@pytest.mark.parametrize(
    ("owner", "engine"),
    [('"sglang"', "sglang"), ('"tensorrt_llm"', "trtllm"), ('"library"', "openai"), ("null", "openai")],
)
def test_each_engine_names_itself_as_the_owner(owner: str, engine: str) -> None:
    """Whoever is not known by name is taken for a plain one."""
    body = f'{{"data": [{{"id": "m", "owned_by": {owner}}}]}}'.encode()
    served, _ = look(ModelList(), FakePatient(lambda _: reply(200, body)))
    assert served == Served("u", engine, 100.0)
    assert engine in ENGINES


def test_llama_cpp_is_known_once_its_model_is_loaded() -> None:
    """It lists its model twice, in a shape of its own and in OpenAI's."""
    assert look(ModelList(), FakePatient(lambda _: LLAMA_CPP_LOADING)) == []
    assert look(ModelList(), FakePatient(lambda _: LLAMA_CPP)) == [
        Served("u", "llamacpp", 100.0),
        Models("u", ("tiny",), 100.0),
    ]


def test_triton_is_known_by_its_own_address_and_tells_its_models_there() -> None:
    """It has no list in OpenAI's shape."""
    context = FakePatient(triton)
    assert look(ModelList(), context) == [Served("u", "triton", 100.0), Models("u", ("llm",), 100.0)]
    asked = [(asked.method, asked.target) for asked in context.asked]
    assert asked == [("GET", "/v1/models"), ("GET", "/v2"), ("POST", "/v2/repository/index")]


def test_a_configured_triton_is_asked_for_its_models_alone() -> None:
    """Nothing needs to be found out."""
    context = FakePatient(triton, unit=Unit("u", "c", "http://u", engine="triton"))
    assert look(ModelList(), context) == [Models("u", ("llm",), 100.0)]
    assert [asked.target for asked in context.asked] == ["/v2/repository/index"]


def test_who_knows_neither_address_is_a_plain_engine() -> None:
    """It may still serve what OpenAI's API serves."""
    assert look(ModelList(), FakePatient(lambda _: reply(404))) == [Served("u", "openai", 100.0)]


@pytest.mark.parametrize(
    "answer",
    [
        reply(500, b'{"data": [{"id": "m"}]}'),
        reply(401),
        reply(200, b"{"),
        reply(200, b"[]"),
        reply(200, b'{"data": []}'),
        reply(200, b'{"data": {"id": "m"}}'),
        reply(200, b'{"data": ["m", {"id": 7}, {"id": ""}, {}]}'),
        *Trouble,
    ],
)
def test_an_answer_without_a_model_is_no_finding(answer: Answer) -> None:
    """What was known before stays known."""
    assert look(ModelList(), FakePatient(lambda _: answer)) == []


def test_what_is_configured_is_not_found_out() -> None:
    """The operator's word stands."""
    told = Unit("u", "c", "http://u", models=("m",), engine="vllm")
    context = FakePatient(lambda _: VLLM, unit=told)
    assert look(ModelList(), context) == []
    assert context.asked == []
    context.unit = replace(told, engine="")
    assert look(ModelList(), context) == [Served("u", "vllm", 100.0)]
    context.unit = replace(told, models=())
    assert look(ModelList(), context) == [Models("u", ("base", "lora"), 100.0)]


def test_it_asks_often_until_all_is_known() -> None:
    """Then every half minute."""
    known = FakePatient(lambda _: VLLM, models=frozenset({"m"}), engine="vllm")
    assert ModelList().due_at(known, 100.0) == 130.0
    assert ModelList().due_at(replace(known, models=frozenset()), 100.0) == 101.0
    assert ModelList().due_at(replace(known, engine=""), 100.0) == 101.0


@pytest.mark.parametrize("verdict", [Verdict.STARTING, Verdict.DOWN, Verdict.PROBATION])
def test_a_unit_that_may_come_back_as_another_engine_is_asked_often(verdict: Verdict) -> None:
    """Whatever it was known to be."""
    context = FakePatient(lambda _: VLLM, models=frozenset({"m"}), engine="triton", verdict=verdict)
    assert ModelList().due_at(context, 100.0) == 101.0
    assert Served("u", "vllm", 100.0) in look(ModelList(), context)
