"""The bodies of a split request: leg 1, leg 2, and what belongs to whom."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.proxy.request.prefill_decode import Handoff, PromptLeg, without_kv_params

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 50}
GIVEN = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [1, 2],
    "remote_engine_id": "e",
    "remote_request_id": "chatcmpl-id-1-abc",
    "remote_host": "h",
    "remote_port": 1,
}


def leg_of(**fields: Any) -> PromptLeg:
    leg = PromptLeg.of(orjson.dumps(CHAT | fields), "id-1")
    assert isinstance(leg, PromptLeg)
    return leg


def handed(leg: PromptLeg, **changed: Any) -> Handoff | str:
    return leg.handoff(orjson.dumps({"choices": [], "kv_transfer_params": GIVEN | changed}))


def test_leg_1_asks_for_one_token_and_for_nothing_that_could_end_it_sooner() -> None:
    leg = leg_of(stop=["x"], stream_options={"include_usage": True}, min_tokens=3, max_completion_tokens=9)
    body = orjson.loads(leg.body)
    assert (body["max_tokens"], body["max_completion_tokens"], body["stream"]) == (1, 1, False)
    assert body["ignore_eos"]
    assert body["messages"] == CHAT["messages"]
    assert not {"stop", "stream_options", "min_tokens"} & body.keys()
    assert body["kv_transfer_params"]["do_remote_decode"]


def test_leg_2_is_the_request_of_the_client_with_what_came_back() -> None:
    handoff = handed(leg_of(stop=["x"]))
    assert isinstance(handoff, Handoff)
    assert orjson.loads(handoff.spend()) == CHAT | {"stop": ["x"], "kv_transfer_params": GIVEN}


def test_blocks_are_handed_over_once() -> None:
    handoff = handed(leg_of())
    assert isinstance(handoff, Handoff)
    handoff.spend()
    with pytest.raises(RuntimeError, match="twice"):
        handoff.spend()
    assert orjson.loads(handoff.releasing())["max_tokens"] == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"remote_request_id": "chatcmpl-id-2-abc"}, "another request"),
        ({"do_remote_prefill": False}, "no kv_transfer_params"),
    ],
)
def test_parameters_that_are_not_of_this_request_are_refused(changed: dict[str, Any], reason: str) -> None:
    found = handed(leg_of(), **changed)
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(
    "reply", [b"", b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":3}']
)
def test_strange_answers_are_no_handoff(reply: bytes) -> None:
    assert isinstance(leg_of().handoff(reply), str)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt": ["a", "b"]},
        {"n": True},
    ],
)
def test_what_takes_more_than_one_prompt_is_not_split(fields: dict[str, Any]) -> None:
    assert isinstance(PromptLeg.of(orjson.dumps(CHAT | fields), "id-1"), str)


@pytest.mark.parametrize("fields", [{"n": 1}, {"n": None}, {"echo": False}, {"prompt": [1, 2, 3]}])
def test_what_is_harmless_is(fields: dict[str, Any]) -> None:
    leg_of(**fields)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","kv_transfer_params":{"do_remote_prefill":true}}',
        b'{"model":"m","kv_transfer_param\\u0073":{"do_remote_prefill":true}} \n',
        b'{"model":"m"}',
    ],
)
def test_the_parameters_of_clients_are_stripped_however_they_are_spelled(body: bytes) -> None:
    assert orjson.loads(without_kv_params(body)) == {"model": "m", "kv_transfer_params": None}


def test_an_empty_object_stays_one() -> None:
    assert without_kv_params(b" { } ") == b" { }"
