"""The replay's prompts: as long as the gym says in words and bytes, and with as much in common."""

from __future__ import annotations

import random

import pytest

from loadtests.gym.kv import BLOCK_TOKENS
from loadtests.gym.loads import LOADS
from loadtests.gym.prompts import Text
from loadtests.replay.client import bodies_of
from loadtests.replay.texts import ANSWER_WORD, block_names, written
from loadtests.replay.units import _sequence

LOADS_TRIED = ("shared_prompt", "zipf_few", "rag", "mooncake_like")


@pytest.mark.parametrize("load", LOADS_TRIED)
def test_a_text_has_the_words_and_bytes_that_the_gym_says(load: str) -> None:
    for request in LOADS[load].make(random.Random(1), 10.0, 20):
        text = written(request.prompt, ())
        assert (len(text), len(text.split())) == (request.prompt.size, request.prompt.tokens)
        assert text.endswith(b" ")


@pytest.mark.parametrize("load", LOADS_TRIED)
def test_two_texts_have_as_many_blocks_in_common_as_in_the_gym(load: str) -> None:
    prompts = [each.prompt for each in LOADS[load].make(random.Random(2), 10.0, 20)]
    names = [block_names(written(each, ()).split()) for each in prompts]
    for one, its_names in zip(prompts, names, strict=True):
        for other, other_names in zip(prompts, names, strict=True):
            assert common(its_names, other_names) == common(one.names, other.names)


def test_what_a_unit_answers_stands_in_the_prompt_that_follows() -> None:
    first = next(each for each in LOADS["chat"].make(random.Random(3), 10.0, 20) if each.then is not None)
    assert first.then is not None
    answers = {first.context}
    body = {"prompt": written(first.prompt, answers).decode(), "max_tokens": first.answer_tokens}
    told = _sequence(body, None)  # type: ignore[arg-type]
    following = written(first.then.prompt, answers)
    assert following.startswith(written(first.prompt, answers) + ANSWER_WORD * first.answer_tokens)
    assert block_names(following.split())[: first.context.tokens // BLOCK_TOKENS] == told.names
    assert len(following.split()) == first.then.prompt.tokens


def test_follow_ups_have_a_body() -> None:
    requests = LOADS["chat"].make(random.Random(3), 10.0, 20)
    assert len(bodies_of(requests)) == 20 > len(requests)


def test_words_that_do_not_go_into_their_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="5 words do not go into 5 bytes"):
        written(Text().extend(5, 1.0), ())


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
