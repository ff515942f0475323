"""Token ids: asked for, kept beside the text, and never shown to a client who did not ask."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.resume.transcript import (
    TokenLog,
    asking,
    digest_of,
    gives_ids,
    without_ids,
    without_prompt,
)

FIRST = (
    b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}],"prompt_token_ids":[1,22,333],"prompt_text":null}\n\n'
)
TOKEN = (
    b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"x \\"token_ids\\":[7]"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":[44,5]}]}\n\n'
)


def test_a_request_asks_for_them_in_front_of_its_own_fields() -> None:
    asked = asking(b' {"model": "m", "stream": true}')
    assert orjson.loads(asked) == {"return_token_ids": True, "model": "m", "stream": True}


@pytest.mark.parametrize(
    ("engine", "version", "gives"),
    [
        ("vllm", "0.32.0", True),
        ("vllm", "0.11.0rc2", True),
        ("vllm", "1.0", True),
        ("vllm", "0.10.2", False),
        ("vllm", "", False),
        ("vllm", "dev", False),
        ("sglang", "0.5.23", False),
    ],
)
def test_only_engines_that_are_known_to_give_them_are_asked(engine: str, version: str, gives: bool) -> None:
    assert gives_ids(engine, version) is gives


def test_the_client_gets_the_bytes_that_it_would_have_got() -> None:
    shown = without_ids(FIRST + TOKEN)
    assert b'"prompt_token_ids":null,"prompt_text":null' in shown
    assert b'"finish_reason":null,"token_ids":null}]' in shown
    assert orjson.loads(shown.split(b"\n\n")[1][6:])["choices"][0]["delta"]["content"] == 'x "token_ids":[7]'
    assert without_ids(shown) == shown


def test_the_ids_of_a_prompt_are_kept_as_a_digest_whatever_their_spelling() -> None:
    kept = without_prompt(FIRST)
    document = orjson.loads(kept.strip()[6:])
    assert document["prompt_token_ids"] == digest_of([1, 22, 333])
    assert without_prompt(FIRST.replace(b",22,", b", 22, ")) == kept
    assert digest_of([1, 22, 333]) != digest_of([12, 2, 333])


def test_those_of_the_answer_are_kept_as_numbers_read_from_bytes_or_objects() -> None:
    log = TokenLog()
    assert b'"token_ids":null' in log.pull(TOKEN)
    assert log.ids.tolist() == [44, 5]
    for event in (without_prompt(FIRST), TOKEN):
        document = orjson.loads(event.strip()[6:])
        log.take(document)
        assert "token_ids" not in document["choices"][0]
    assert (log.prompt, log.ids.tolist()) == (digest_of([1, 22, 333]), [44, 5, 44, 5])


@pytest.mark.parametrize("ids", ["abc", [1, "2"], [-1], {"a": 1}, [1.5]])
def test_what_are_no_ids_is_left_to_be_found_strange(ids: object) -> None:
    log, document = TokenLog(), {"choices": [{"token_ids": ids}]}
    log.take(document)
    assert (log.ids.tolist(), document) == ([], {"choices": [{"token_ids": ids}]})
