"""The simulated unit's language: reversible, and continued exactly from any point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.simunit.text import (
    BLOCK_TOKENS,
    WORDS,
    Context,
    Message,
    StopScanner,
    detokenize,
    render_chat,
    tokenize,
)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
PIECES = st.lists(st.sampled_from(["a", "b", "ab", "ba", "c"]), max_size=20)
STOPS = st.lists(st.sampled_from(["ab", "cab", "bb"]), min_size=1)


def generate(prompt: str, tokens: int) -> str:
    context = Context(prompt)
    return "".join(context.extend() for _ in range(tokens))


@given(TEXTS)
def test_tokens_give_the_text_back(text: str) -> None:
    assert detokenize(tokenize(text)) == text


@given(TEXTS, st.integers(0, 40), st.integers(0, 40))
def test_prompt_plus_text_goes_on_as_if_never_broken_off(prompt: str, before: int, after: int) -> None:
    whole = generate(prompt, before + after)
    said = generate(prompt, before)
    assert said + generate(prompt + said, after) == whole


@given(TEXTS, st.integers(0, 40))
def test_a_generated_text_counts_as_many_tokens_when_it_comes_back_in_a_prompt(
    prompt: str, tokens: int
) -> None:
    text = generate(prompt, tokens)
    assert len(tokenize(prompt + text)) == len(tokenize(prompt)) + tokens


@given(TEXTS, st.integers(0, 60))
def test_generated_blocks_have_the_names_they_get_in_a_prompt(prompt: str, tokens: int) -> None:
    context = Context(prompt)
    text = "".join(context.extend() for _ in range(tokens))
    again = Context(prompt + text)
    assert again.block_hashes == context.block_hashes
    assert again.tokens == context.tokens
    assert len(again.block_hashes) == again.tokens // BLOCK_TOKENS


def test_a_text_may_end_by_itself_wherever_it_was_broken_off() -> None:
    context, prompt = Context("Once"), "Once"
    while not context.ends_here(20):
        prompt += context.extend()
    assert Context(prompt).ends_here(20)
    assert prompt != "Once"


def test_an_open_final_message_is_what_the_generation_prompt_and_its_text_make() -> None:
    asked = [Message("user", "Hello")]
    prompt = render_chat(asked, add_generation_prompt=True, continue_final=False)
    said = generate(prompt, 5)
    open_turn = [*asked, Message("assistant", said)]
    assert render_chat(open_turn, add_generation_prompt=False, continue_final=True) == prompt + said


def test_every_word_is_one_token() -> None:
    assert {len(tokenize(word)) for word in WORDS} == {1}


@pytest.mark.parametrize("token", [-1, 0, 1, 255, 2, 1 << 60, 1 << 80])
def test_a_number_that_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="not a token"):
        detokenize([token])


@given(PIECES, STOPS)
def test_a_stop_string_ends_the_text_before_it_however_the_pieces_fall(
    pieces: list[str], stops: list[str]
) -> None:
    scanner, shown, stopped = StopScanner(stops), "", False
    for piece in pieces:
        text, stopped = scanner.feed(piece)
        shown += text
        if stopped:
            break
    else:
        shown += scanner.flush()
    everything = "".join(pieces)
    assert stopped == any(stop in everything for stop in stops)
    assert not any(stop in shown for stop in stops)
    assert everything.startswith(shown)
    assert stopped or shown == everything
