"""What the gate answers itself: the list of models, and that a model is none of them."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.control.plane import NAMES_SHOWN, Refusals
from cellgate.proxy.request.models import LocalEndpoints
from cellgate.router.board import Board
from cellgate.router.nouns import Ask, Cell, Fleet, Models, Refusal, Rules, Unit


@pytest.fixture
def board() -> Board:
    units = tuple(Unit(name, "c", f"http://{name}") for name in ("a", "b"))
    board = Board(Rules())
    board.configure(Fleet((Cell("c"),), units), 0.0)
    return board


def listed(own: LocalEndpoints) -> list[str]:
    _, body, _ = own.answer(b"/v1/models", stopping=False)
    return [card["id"] for card in orjson.loads(body)["data"]]


def test_the_list_of_models_is_the_union_and_follows_each_unit(board: Board) -> None:
    own = LocalEndpoints(board)
    assert listed(own) == []
    board.set_models(Models("a", ("x", "y"), 0.0))
    board.set_models(Models("b", ("y", "z"), 0.0))
    assert listed(own) == listed(own) == ["x", "y", "z"]
    board.set_models(Models("b", ("w",), 1.0))
    assert listed(own) == ["w", "x", "y"]


def test_the_list_is_not_made_anew_for_each_client(board: Board) -> None:
    own = LocalEndpoints(board)
    board.set_models(Models("a", tuple(f"m{n}" for n in range(1000)), 0.0))
    assert own.answer(b"/v1/models", stopping=False)[1] is own.answer(b"/v1/models", stopping=False)[1]


def test_a_refusal_names_some_models_and_counts_the_rest(board: Board) -> None:
    refusals = Refusals(board)
    board.set_models(Models("a", tuple(f"m{n:04}" for n in range(1000)), 0.0))
    message = refusals.explain(Refusal.UNKNOWN_MODEL, Ask("none"), 0.0).message
    assert message.endswith(f"serve: {', '.join(f'm{n:04}' for n in range(NAMES_SHOWN))} and 980 more")
    board.set_models(Models("a", ("only",), 1.0))
    assert refusals.explain(Refusal.UNKNOWN_MODEL, Ask("none"), 0.0).message.endswith("serve: only")


def test_what_units_say_of_a_model_is_passed_on_with_the_smallest_length(board: Board) -> None:
    own = LocalEndpoints(board)
    facts: dict[str, str | int] = {"created": 7, "owned_by": "vllm", "root": "/models/x"}
    board.set_models(Models("a", ("x",), 0.0, cards={"x": {**facts, "max_model_len": 4096}}))
    board.set_models(Models("b", ("x", "y"), 0.0, cards={"x": {**facts, "max_model_len": 2048}}))
    _, body, _ = own.answer(b"/v1/models", stopping=False)
    first, second = orjson.loads(body)["data"]
    assert first == {"id": "x", "object": "model", **facts, "max_model_len": 2048}
    assert second == {"id": "y", "object": "model", "created": 0, "owned_by": "cellgate"}
    board.set_models(Models("b", ("x", "y"), 0.0, cards={"x": {**facts, "max_model_len": 8192}}))
    _, body, _ = own.answer(b"/v1/models", stopping=False)
    assert orjson.loads(body)["data"][0]["max_model_len"] == 4096
