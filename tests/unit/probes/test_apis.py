"""What a canary asks of each API, and what it takes for an answer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.probes.canary import Canary
from cellgate.probes.engines import CANARIES, ENGINES, UNKNOWN, at, has_answer
from cellgate.router.nouns import Evidence, Sign, Unit
from tests.patient import Answer, FakePatient, look, reply

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
    [evidence] = look(Canary(), context)
    assert isinstance(evidence, Evidence)
    return context, evidence


@pytest.mark.parametrize("name", CANARIES)
def test_an_answer_of_each_is_one(name: str) -> None:
    """And an error beside it takes it back."""
    assert fly(name, reply(200, orjson.dumps(ANSWERS[name])))[1].sign is Sign.GOOD
    assert fly(name, reply(200, orjson.dumps(ANSWERS[name] | {"error": "dead"})))[1].sign is Sign.BAD
    assert fly(name, reply(200, b"{}"))[1].sign is Sign.BAD


def test_a_list_of_scores_is_an_answer_of_rerank_alone() -> None:
    """SGLang has no object around it."""
    body = b'[{"score": 0.5, "document": "x", "index": 0}]'
    assert [name for name, api in CANARIES.items() if has_answer(api, body)] == ["rerank"]


@pytest.mark.parametrize("name", [name for name in CANARIES if name not in ("generate", "infer")])
def test_the_prompt_is_unique_and_the_model_named(name: str) -> None:
    """No cache can answer, and no request carries a priority."""
    bodies = [orjson.loads(fly(name, reply(200))[0].asked[-1].body) for _ in range(2)]
    assert bodies[0]["model"] == "m"
    assert "priority" not in bodies[0]
    prompts = [CANARIES[name].body("m", prompt, None) for prompt in ("one", "two")]
    assert prompts[0] != prompts[1]


def test_infer_sends_the_smallest_tensors_of_zeros() -> None:
    """By the model's own metadata; texts hold the prompt."""
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
    ],
)
def test_a_model_that_tells_no_fitting_inputs_is_not_asked(about: bytes) -> None:
    """The operator is told what to do."""
    context, evidence = fly("infer", reply(200), about)
    assert [asked.method for asked in context.asked] == ["GET"]
    assert evidence.sign is Sign.NEUTRAL
    assert evidence.reason.endswith("set `canary:` to an API that the unit serves")


def test_a_model_s_name_is_part_of_a_path_whatever_it_holds() -> None:
    """A slash in it is none of the path's."""
    assert at("/v2/models/{model}/infer", "a/b c") == "/v2/models/a%2Fb%20c/infer"


def test_every_engine_s_canaries_exist() -> None:
    """The tables know each other."""
    for surfaces in (*ENGINES.values(), UNKNOWN):
        assert {*surfaces.canaries} <= CANARIES.keys()
        assert surfaces.ready
