"""What is kept of the names of bodies: bounded, and the same for each body with these names."""

from __future__ import annotations

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request import body
from cellgate.proxy.request.body import KEPT, shape_of_body


def test_bodies_with_the_same_names_have_the_same_shape() -> None:
    assert shape_of_body({"model": "a", "messages": []}) is shape_of_body({"model": "b", "messages": [1]})


def test_the_prompt_is_in_the_order_of_templates_whatever_the_order_of_the_body() -> None:
    shape = shape_of_body({"prompt": "x", "messages": [], "system": "y", "tools": []})
    assert (shape.preamble, shape.prompts) == (("tools", "system"), ("messages", "prompt"))


def test_of_many_fields_that_nobody_knows_all_are_taken_as_they_are() -> None:
    few = {f"field {number}": 1 for number in range(LIMITS.fields)}
    assert shape_of_body({"model": "m", **few}).more == tuple(sorted(few))
    many = {"model": "m", "last": 1, **few}
    assert shape_of_body(many).more == tuple(many)


def test_the_first_limit_that_is_set_counts() -> None:
    assert shape_of_body({"max_output_tokens": 1, "max_tokens": 2}).limits == (
        "max_tokens",
        "max_output_tokens",
    )


def test_clients_cannot_make_it_keep_more_than_so_much() -> None:
    before = dict(body._shapes)
    long = {"x" * 2000: 1}
    assert shape_of_body(long) is not shape_of_body(long)
    assert body._shapes == before
    for number in range(2 * KEPT):
        shape_of_body({f"name {number}": 1})
        assert len(body._shapes) <= KEPT
