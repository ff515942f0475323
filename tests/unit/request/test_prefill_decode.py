"""The bodies of a split request: its two legs, rooms, and what only the gate may say."""

from __future__ import annotations

from random import Random
from typing import Any

import orjson
import pytest

from cellgate.proxy.request.prefill_decode import (
    Handoff,
    PromptLeg,
    Rendezvous,
    may_have_some,
    named_in,
    own_lines,
    without_bootstrap,
    without_kv_params,
    without_transfer,
)
from cellgate.router.nouns import Unit

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


def test_leg_2_is_the_request_of_the_client_with_what_came_back_which_is_handed_over_once() -> None:
    handoff = handed(leg_of(stop=["x"]))
    assert isinstance(handoff, Handoff)
    assert orjson.loads(handoff.spend()) == CHAT | {"stop": ["x"], "kv_transfer_params": GIVEN}
    with pytest.raises(RuntimeError, match="twice"):
        handoff.spend()
    assert orjson.loads(handoff.releasing())["max_tokens"] == 1


def test_strange_answers_and_parameters_that_are_not_of_this_request_are_no_handoff() -> None:
    assert "another request" in str(handed(leg_of(), remote_request_id="chatcmpl-id-2-abc"))
    assert "no kv_transfer_params" in str(handed(leg_of(), do_remote_prefill=False))
    for reply in (b"", b"[]", b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":3}'):
        assert isinstance(leg_of().handoff(reply), str)


SEVERAL: list[dict[str, Any]] = [
    *({"n": 2}, {"best_of": 3}, {"use_beam_search": True}, {"echo": True}, {"prompt": ["a", "b"]}),
    {"n": True},
]
ONE: list[dict[str, Any]] = [{"n": 1}, {"n": None}, {"echo": False}, {"prompt": [1, 2, 3]}]


def test_what_takes_more_than_one_prompt_is_not_split() -> None:
    for fields in SEVERAL:
        assert isinstance(PromptLeg.of(orjson.dumps(CHAT | fields), "id-1"), str)
    for fields in ONE:
        leg_of(**fields)


def test_the_parameters_of_clients_are_stripped_however_they_are_spelled() -> None:
    for name in (b"kv_transfer_params", b"kv_transfer_param\\u0073"):
        body = b'{"model":"m","%b":{"do_remote_prefill":true}} \n' % name
        assert orjson.loads(without_kv_params(body)) == {"model": "m", "kv_transfer_params": None}
    assert orjson.loads(without_kv_params(b'{"model":"m"}')) == {"model": "m", "kv_transfer_params": None}
    assert without_kv_params(b" { } ") == b" { }"


# The room of one attempt: nobody else gets it, and a client cannot choose it.

ROOM_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
P1 = Unit("p1", "c", "http://10.0.0.1:30000", role="prefill", bootstrap_port=9000)


def met(unit: Unit = P1) -> Rendezvous:
    return Rendezvous(orjson.dumps(ROOM_CHAT), unit, Random(1))


def test_both_engines_get_the_request_of_the_client_and_where_they_meet() -> None:
    meeting = met()
    body = orjson.loads(meeting.body)
    assert body | ROOM_CHAT == body
    assert (body["bootstrap_host"], body["bootstrap_port"]) == ("10.0.0.1", 9000)
    assert 0 < body["bootstrap_room"] < 2**63
    # A room is for one attempt.
    assert meeting.spend() == meeting.body
    with pytest.raises(RuntimeError, match="twice"):
        meeting.spend()
    rng = Random(1)
    rooms = {orjson.loads(Rendezvous(b"{}", P1, rng).body)["bootstrap_room"] for _ in range(1000)}
    assert len(rooms) == 1000


def test_an_address_of_ipv6_has_no_brackets() -> None:
    unit = Unit("p1", "c", "http://[fd00::1]:30000", role="prefill")
    body = orjson.loads(met(unit=unit).body)
    assert (body["bootstrap_host"], body["bootstrap_port"]) == ("fd00::1", 8998)


@pytest.mark.parametrize("spelling", [b"bootstrap_room", b"bootstrap_r\\u006fom"])
def test_what_a_client_says_of_rooms_reaches_no_engine(spelling: bytes) -> None:
    body = b'{"model":"m","%b":7,"bootstrap_host":"evil","disagg_prefill_dp_rank":1} \n' % spelling
    bare = orjson.loads(without_bootstrap(body))
    assert {name: value for name, value in bare.items() if value is not None} == {"model": "m"}
    assert orjson.loads(Rendezvous(body, P1, Random(1)).body)["bootstrap_room"] != 7
    assert orjson.loads(without_bootstrap(b" { } "))["bootstrap_room"] is None


def test_header_lines_that_choose_a_room_are_left_out() -> None:
    lines = [b"accept: */*\r\n", b"x-override-bootstrap-room: 7\r\n", b"x-data-parallel-rank: 1\r\n"]
    assert own_lines(lines) == lines[:1]


# What only the gate may say of a transfer of KV blocks is taken out wherever engines read it.

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


def test_a_name_that_is_written_with_escapes_is_the_same_name() -> None:
    for name in (b"kv\\u005Ftransfer_params", b"kv_\\u0074ransfer_param\\u0073"):
        body = b'{"sampling_params":{"extra_args":{"%b":{"a":1}}}}' % name
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
