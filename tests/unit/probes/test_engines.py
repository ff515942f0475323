"""What a unit serves and is: each API's canary, models, version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from cellgate.probes.base import Trouble
from cellgate.probes.canary import Canary
from cellgate.probes.engines import CANARIES, ENGINES, UNKNOWN, at, has_answer
from cellgate.probes.served import EngineVersion, ModelList
from cellgate.router.nouns import Build, Built, Evidence, Models, Served, Sign, Unit, Verdict
from tests.patient import Answer, FakePatient, evidence_of, look, reply

ANSWERS: dict[str, Any] = {
    "chat": {"choices": [{"message": {"content": None}}]},
    "completions": {"choices": [{"text": ""}]},
    "embeddings": {"data": [{"embedding": [0.1]}]},
    "rerank": {"results": [{"index": 0, "relevance_score": 0.1}]},
    "pooling": {"data": [{"data": [[0.1]]}]},
    "generate": {"model_name": "m", "text_output": ""},
    "infer": {"outputs": [{"name": "s", "data": [0.0]}]},
}
METADATA = b"""{"name": "m", "inputs": [
    {"name": "a", "datatype": "FP32", "shape": [-1, -1, 3]},
    {"name": "t", "datatype": "BYTES", "shape": [-1, 1]},
    {"name": "b", "datatype": "BOOL", "shape": [-1, 1]}]}"""


def fly(name: str, answer: Answer, about: bytes = METADATA) -> tuple[FakePatient, Evidence]:
    """One canary through one API of a Triton server, or of any other."""
    context = FakePatient(lambda target: reply(200, about) if target == "/v2/models/m" else answer)
    context.unit = Unit("u", "c", "http://u", models=("m",), canary=name)
    return context, evidence_of(Canary(), context)


@pytest.mark.parametrize("name", CANARIES)
def test_an_answer_of_each_is_one(name: str) -> None:
    """And an error beside it takes it back. Of rerank alone a list is one: SGLang has no object around it.
    The model is named, no cache can answer, and no request carries a priority.
    """
    body = ANSWERS[name]
    context, evidence = fly(name, reply(200, orjson.dumps(body)))
    assert evidence.sign is Sign.GOOD
    assert fly(name, reply(200, orjson.dumps(body | {"error": "dead"})))[1].sign is Sign.BAD
    assert fly(name, reply(200, b"{}"))[1].sign is Sign.BAD
    scores = b'[{"score": 0.5, "document": "x", "index": 0}]'
    assert has_answer(CANARIES[name], scores) is (name == "rerank")
    if name not in ("generate", "infer"):
        asked = orjson.loads(context.asked[-1].body)
        assert (asked["model"], "priority" in asked) == ("m", False)
        assert CANARIES[name].body("m", "one", None) != CANARIES[name].body("m", "two", None)


def test_infer_sends_the_smallest_tensors_of_zeros() -> None:
    """By the model's own metadata; texts hold the prompt. A slash in a model's name is none of the path's."""
    context, _ = fly("infer", reply(200))
    assert [(asked.method, asked.target) for asked in context.asked] == [
        ("GET", "/v2/models/m"),
        ("POST", "/v2/models/m/infer"),
    ]
    a, t, b = orjson.loads(context.asked[-1].body)["inputs"]
    assert a == {"name": "a", "shape": [1, 1, 3], "datatype": "FP32", "data": [0, 0, 0]}
    assert (t["shape"], t["datatype"], len(t["data"])) == ([1, 1], "BYTES", 1)
    assert isinstance(t["data"][0], str)
    assert (b["shape"], b["data"]) == ([1, 1], [False])
    assert at("/v2/models/{model}/infer", "a/b c") == "/v2/models/a%2Fb%20c/infer"
    for surfaces in (*ENGINES.values(), UNKNOWN):
        assert {*surfaces.canaries} <= CANARIES.keys()
        assert surfaces.ready


@pytest.mark.parametrize(
    "about",
    [
        b"",
        b"[]",
        b"{}",
        b'{"inputs": 7}',
        b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": ["x"]}]}',
        b'{"inputs": [{"name": "a", "datatype": {}, "shape": [1]}]}',
        b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [4096, 4096]}]}',
        b'{"name": "m", "inputs": [{"name": "a", "datatype": "FP32", "shape": [4096, 4096]}]}',
    ],
)
def test_a_model_that_tells_no_fitting_inputs_is_not_asked(about: bytes) -> None:
    """The operator is told what to do."""
    context, evidence = fly("infer", reply(200), about)
    assert [asked.method for asked in context.asked] == ["GET"]
    assert evidence.sign is Sign.NEUTRAL
    assert evidence.reason.endswith("set `canary:` to an API that the unit serves")


def test_a_model_that_a_triton_server_does_not_know_is_told_as_such() -> None:
    """Its page says so; nothing is asked of it."""
    about = reply(404, b'{"error": "Request for unknown model: \'m\' is not found"}')
    context = FakePatient(lambda _: about, unit=Unit("u", "c", "http://u", models=("m",), canary="infer"))
    evidence = evidence_of(Canary(), context)
    assert ([asked.method for asked in context.asked], evidence.sign) == (["GET"], Sign.NEUTRAL)
    assert evidence.reason.endswith("; it does not serve `m`: see what its engine was started with")


# Learning what a unit serves: its engine and its models.

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


LISTED, INDEX = ("GET", "/v1/models"), ("POST", "/v2/repository/index")


@pytest.mark.parametrize(
    ("unit", "engine", "names", "asked"),
    [
        (lambda _: VLLM, "vllm", ("base", "lora"), [LISTED]),
        # It lists its model twice, in a shape of its own and in OpenAI's.
        (lambda _: LLAMA_CPP, "llamacpp", ("tiny",), [LISTED]),
        # It has no list in OpenAI's shape.
        (triton, "triton", ("llm",), [LISTED, ("GET", "/v2"), INDEX]),
        # It may still serve what OpenAI's API serves.
        (lambda _: reply(404), "openai", (), [LISTED, ("GET", "/v2")]),
    ],
    ids=["vllm", "llama.cpp", "triton", "neither"],
)
def test_the_list_of_models_tells_models_and_engine(
    unit: Callable[[str], Answer], engine: str, names: tuple[str, ...], asked: list[tuple[str, str]]
) -> None:
    context = FakePatient(unit)
    models = [Models("u", names, 100.0)] if names else []
    assert look(ModelList(), context) == [Served("u", engine, 100.0), *models]
    assert [(one.method, one.target) for one in context.asked] == asked


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


def test_what_is_configured_is_not_found_out() -> None:
    told = Unit("u", "c", "http://u", models=("m",), engine="vllm")
    context = FakePatient(lambda _: VLLM, unit=told)
    assert look(ModelList(), context) == []
    assert context.asked == []
    context.unit = replace(told, engine="")
    assert look(ModelList(), context) == [Served("u", "vllm", 100.0)]
    context.unit = replace(told, models=())
    assert look(ModelList(), context) == [Models("u", ("base", "lora"), 100.0)]
    context = FakePatient(triton, unit=Unit("u", "c", "http://u", engine="triton"))
    assert look(ModelList(), context) == [Models("u", ("llm",), 100.0)]
    assert [asked.target for asked in context.asked] == ["/v2/repository/index"]


@pytest.mark.parametrize(
    "answer",
    [
        reply(500, b'{"data": [{"id": "m"}]}'),
        LLAMA_CPP_LOADING,
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


@pytest.mark.parametrize(
    "changes",
    [
        {"models": frozenset()},
        {"engine": ""},
        *({"verdict": verdict} for verdict in (Verdict.STARTING, Verdict.DOWN, Verdict.PROBATION)),
    ],
    ids=str,
)
def test_it_asks_often_until_all_is_known_and_while_it_may_return_as_another(changes: dict[str, Any]) -> None:
    """Then every half minute. Whatever it was known to be."""
    known = FakePatient(lambda _: VLLM, models=frozenset({"m"}), engine="triton")
    assert ModelList().due_at(known, 100.0) == 130.0
    unknown = replace(known, **changes)
    assert ModelList().due_at(unknown, 100.0) == 101.0
    assert Served("u", "vllm", 100.0) in look(ModelList(), unknown)


# The version of an engine, from the page where it shows it.

VERSION = EngineVersion()


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
    assert look(VERSION, context) == [Built("u", Build(version="0.32.0"), 100.0)]
    assert [asked.target for asked in context.asked] == [path]


@pytest.mark.parametrize("page", [b"", b"[]", b'{"version": 7}', b'{"version": "' + b"x" * 200 + b'"}'])
def test_strange_pages_show_no_version(page: bytes) -> None:
    assert look(VERSION, FakePatient(lambda _: reply(200, page), engine="vllm")) == []


def test_it_is_asked_often_until_it_is_known_or_known_to_be_missing() -> None:
    context = FakePatient(lambda _: reply(404), engine="")
    assert look(VERSION, context) == []
    assert VERSION.due_at(context, 100.0) == 100.0 + VERSION.eager_s
    context.engine = "vllm"
    assert look(VERSION, context) == []
    assert VERSION.due_at(context, 100.0) == 100.0 + VERSION.period_s
    known = FakePatient(lambda _: reply(200), engine="vllm", build=Build(version="0.32.0"))
    assert VERSION.due_at(known, 100.0) == 100.0 + VERSION.period_s


# A unit that comes up is known before it gets requests.

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
