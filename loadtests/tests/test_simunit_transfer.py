"""Simulated units that compute prompts for each other, as real processes."""

from collections.abc import Iterator
from typing import Any

import pytest

from loadtests.simunit.process import SimUnit, sim_units
from loadtests.simunit.transfer import STRANGE
from loadtests.tests.simunit_stage import (
    MESSAGES,
    STEP_MS,
    OpenStream,
    call,
    chat,
    eventually,
    metric,
    text_of,
)

LONG = [{"role": "user", "content": "one more word " * 400}]
KEEP = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_port": None}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[SimUnit]]:
    with sim_units(["p", "d"], followers=0, step_ms=STEP_MS, transfer_tokens_per_s=1e6) as units:
        yield units


@pytest.fixture
def prefiller(pair: list[SimUnit]) -> SimUnit:
    return pair[0]


@pytest.fixture
def decoder(pair: list[SimUnit]) -> Iterator[SimUnit]:
    yield pair[1]
    pair[1].link("p", "heal")


def handed_over(unit: SimUnit, messages: object = LONG) -> dict[str, Any]:
    status, answer = chat(unit, messages=messages, max_tokens=1, kv_transfer_params=KEEP)
    assert status == 200
    given: dict[str, Any] = answer["kv_transfer_params"]
    return given


def by_source(unit: SimUnit, source: str) -> float:
    _, page = call(unit, "/metrics")
    lines = [line for line in page.splitlines() if f'source="{source}"' in line]
    return sum(float(line.split()[-1]) for line in lines)


def test_fetched_blocks_are_not_computed_again_and_freed(prefiller: SimUnit, decoder: SimUnit) -> None:
    alone = text_of(chat(prefiller, messages=LONG))
    given = handed_over(prefiller)
    assert prefiller.state()["moved"]["held"] == 1
    assert metric(prefiller, "nixl_num_held_reqs") == 1
    computed, fetched = by_source(decoder, "local_compute"), by_source(decoder, "external_kv_transfer")
    assert text_of(chat(decoder, messages=LONG, kv_transfer_params=given)) == alone
    assert by_source(decoder, "local_compute") == computed + 1
    assert by_source(decoder, "external_kv_transfer") > fetched + 1000
    assert prefiller.state()["moved"]["held"] == 0
    assert prefiller.state()["kv_blocks_used"] == 0


def test_an_answer_follows_from_the_blocks_and_not_from_the_prompt(
    prefiller: SimUnit, decoder: SimUnit
) -> None:
    given = handed_over(prefiller, MESSAGES)
    alone = text_of(chat(prefiller))
    stream = OpenStream(decoder, messages=LONG, max_tokens=8, kv_transfer_params=given).read_until(b"[DONE]")
    assert stream.text == alone
    stream.close()


def test_blocks_that_were_freed_are_somebody_elses(prefiller: SimUnit, decoder: SimUnit) -> None:
    given = handed_over(prefiller)
    text_of(chat(decoder, messages=LONG, kv_transfer_params=given))
    strange = text_of(chat(decoder, messages=LONG, kv_transfer_params=given))
    _, answer = call(decoder, "/v1/completions", {"prompt": STRANGE, "max_tokens": 8})
    assert strange == answer["choices"][0]["text"]


def test_a_cut_link_fails_requests_and_only_those_that_need_it(prefiller: SimUnit, decoder: SimUnit) -> None:
    decoder.link("p", "cut")
    given = handed_over(prefiller)
    assert chat(decoder, messages=LONG, kv_transfer_params=given)[0] == 500
    stream = OpenStream(decoder, kv_transfer_params=given).read_until(b"[DONE]")
    assert stream.received.startswith(b"HTTP/1.1 200")
    assert b"KV load failed from p" in stream.received
    stream.close()
    assert chat(decoder)[0] == 200
    assert len(decoder.state()["links"]["p"]["failures"]) == 2
    decoder.link("p", "heal")
    assert chat(decoder, messages=LONG, kv_transfer_params=given)[0] == 200


def test_a_hanging_transfer_ends_with_its_client(prefiller: SimUnit, decoder: SimUnit) -> None:
    decoder.link("p", "hang")
    stream = OpenStream(decoder, kv_transfer_params=handed_over(prefiller)).read_until(b"\r\n\r\n")
    assert eventually(lambda: decoder.state()["moved"]["fetching"] == 1)
    assert stream.is_silent()
    assert metric(decoder, "num_requests_waiting") == 1
    stream.close()
    assert eventually(lambda: decoder.state()["moved"]["fetching"] == 0)


def test_a_slow_link_delays_the_first_token(prefiller: SimUnit, decoder: SimUnit) -> None:
    decoder.link("p", "slow", factor=1000.0)
    longer = [{"role": "user", "content": "some other word " * 400}]
    given = handed_over(prefiller, longer)
    stream = OpenStream(decoder, messages=longer, max_tokens=2, kv_transfer_params=given)
    assert stream.is_silent()
    stream.read_until(b"[DONE]").close()


def test_a_dead_prefiller_fails_the_request_and_not_the_decoder(decoder: SimUnit) -> None:
    with SimUnit.start("q", followers=0, step_ms=STEP_MS) as doomed:
        given = handed_over(doomed)
        doomed.kill()
    assert chat(decoder, messages=LONG, kv_transfer_params=given)[0] == 500
    assert chat(decoder)[0] == 200
