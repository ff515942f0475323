"""What only the gate may say of a transfer of KV blocks is taken out wherever engines read it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.proxy.request.prefill_decode import may_have_some, named_in, without_transfer

FOREIGN = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "10.0.0.1"}
PLACES: dict[str, Any] = {
    "at the top": {"kv_transfer_params": FOREIGN},
    "in extra_args": {"sampling_params": {"extra_args": {"kv_transfer_params": FOREIGN}, "n": 1}},
    "in xargs": {"vllm_xargs": {"kv_transfer_params": "x"}},
    "under another name": {"sampling_params": {"extra_args": {"blocks": FOREIGN}}},
    "in a list": {"requests": [{"kv_transfer_params": FOREIGN}]},
    "in a string": {"sampling_parameters": orjson.dumps({"kv_transfer_params": FOREIGN}).decode()},
    "of an encoder": {"ec_transfer_params": {"a": 1}},
    "of TensorRT-LLM": {"disaggregated_params": {"ctx_request_id": 7}},
    "a room": {"bootstrap_room": 7, "bootstrap_host": "h"},
}


@pytest.mark.parametrize("fields", PLACES.values(), ids=PLACES)
def test_parameters_of_a_transfer_are_taken_out(fields: dict[str, Any]) -> None:
    body = orjson.dumps({"model": "m", "prompt": "hi", **fields})
    assert may_have_some(body)
    bare = without_transfer(body)
    for word in (b"transfer_params", b"remote_", b"10.0.0.1", b"bootstrap", b"ctx_request_id"):
        assert word not in bare
    assert orjson.loads(bare)["prompt"] == "hi"


@pytest.mark.parametrize(
    "name", ["\\u006bv_transfer_params", "kv\\u005Ftransfer_params", "kv_\\u0074ransfer_param\\u0073"]
)
def test_a_name_that_is_written_with_escapes_is_the_same_name(name: str) -> None:
    body = b'{"sampling_params":{"extra_args":{"%b":{"a":1}}}}' % name.encode()
    assert may_have_some(body)
    assert named_in(body)
    assert without_transfer(body) == b'{"sampling_params":{"extra_args":{}}}'


def test_a_prompt_may_say_what_it_likes() -> None:
    said = '{"kv_transfer_params": {"remote_host": "\\u0041"}}'
    body = orjson.dumps({"messages": [{"role": "user", "content": said}], "tools": [{"remote_host": {}}]})
    assert without_transfer(body) == body
    assert not named_in(body)
    assert not may_have_some(
        orjson.dumps({"prompt": "caf\u00e9", "sampling_params": {"extra_args": {"a": 1}}})
    )


def test_what_is_nested_without_end_is_left_out() -> None:
    deep: Any = {"kv_transfer_params": FOREIGN}
    for _ in range(40):
        deep = {"a": deep}
    assert b"transfer" not in without_transfer(orjson.dumps({"prompt": "hi", "b": deep}))
