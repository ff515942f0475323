"""Another model in a body: only its bytes change, wherever it stands."""

from __future__ import annotations

import json
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.models import with_model

WINDOW = LIMITS.model_search_bytes
WORDS = st.text(alphabet='model"\\{}[]:, éx', max_size=12)
VALUES = st.recursive(
    WORDS | st.just("gpt"),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(WORDS | st.just("model"), each, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (b'{"model":"gpt"}', b'{"model":"v\\"1"}'),
        (b'{ "model" :\n "gpt" , "x":1}', b'{ "model" :\n "v\\"1" , "x":1}'),
        (b'{"model":"g\\u0070t"}', b'{"model":"v\\"1"}'),
        (b'{"a":{"model":"gpt"},"model":"gpt"}', b'{"a":{"model":"gpt"},"model":"v\\"1"}'),
        (b'{"model":"gpt","a":[{"model":"gpt"}]}', b'{"model":"v\\"1","a":[{"model":"gpt"}]}'),
        (b'{"a":"\\"model\\":\\"gpt\\"","model":"gpt"}', b'{"a":"\\"model\\":\\"gpt\\"","model":"v\\"1"}'),
        (b'{"x\\"model":"gpt","model":"gpt"}', b'{"x\\"model":"gpt","model":"v\\"1"}'),
        (b'{"model":"gpt","model":"gpt"}', b'{"model":"v\\"1","model":"v\\"1"}'),
    ],
)
def test_only_the_name_is_replaced(body: bytes, after: bytes) -> None:
    assert with_model(body, "gpt", 'v"1') == after


@given(st.dictionaries(WORDS, VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_all_else_stays(data: dict[str, object], is_last: bool, indent: int | None) -> None:
    data.pop("model", None)
    whole = {**data, "model": "gpt"} if is_last else {"model": "gpt", **data}
    after = with_model(json.dumps(whole, indent=indent).encode(), "gpt", "v1")
    assert after is not None
    assert orjson.loads(after) == {**whole, "model": "v1"}


def test_in_a_large_body_it_is_found_at_both_ends() -> None:
    text = "x" * (3 * WINDOW)
    for whole in ({"model": "gpt", "a": text}, {"a": text, "model": "gpt"}):
        after = with_model(json.dumps(whole).encode(), "gpt", "v1")
        assert after is not None
        assert json.loads(after)["model"] == "v1"
    assert with_model(json.dumps({"a": text, "model": "gpt", "b": text}).encode(), "gpt", "v1") is None
    inner = {"a": text, "metadata": {"model": "gpt"}, "model": "gpt"}
    assert with_model(json.dumps(inner).encode(), "gpt", "v1") is None


@pytest.mark.alone
def test_a_body_that_is_full_of_models_takes_no_longer_than_one_that_is_not() -> None:
    """Each mention was once looked up from the beginning of the body: a minute for 140 kB."""
    inner = b'{"model":"gpt"}'
    body = b'{"model":"gpt","messages":[' + b",".join([inner] * 8000) + b"]}"
    begun = time.process_time()
    assert with_model(body, "gpt", "v1") == body.replace(b"gpt", b"v1", 1)
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":"gpt","b":{"model":"gpt"}}'
    assert with_model(deep, "gpt", "v1") is None
    others = b'{"messages":[' + b",".join([b'{"model":"other"}'] * 60_000) + b"]}"
    assert with_model(others[:-1] + b',"model":"gpt"}', "gpt", "v1") is None
    assert time.process_time() - begun < 0.5


def test_what_was_not_read_to_its_end_is_not_guessed() -> None:
    """Of a large body, a mention at its end may be one in a quotation."""
    deep = b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b',"model":"gpt","b":"%b","c":{"model":"gpt"}}'
    assert with_model(deep % (b"x" * (3 << 20)), "gpt", "v1") is None
