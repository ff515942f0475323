"""The replay's model of a unit: times, batching, the KV cache, and that lookers change nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from loadtests.replay.engine import BLOCK_TOKENS, Engine, Model, Output, Sequence, block_names

MODEL = Model()


def sequence(prompt_tokens: int, answer_tokens: int = 1, text: str = "a") -> Sequence:
    prompt = (text * prompt_tokens)[:prompt_tokens].encode()
    return Sequence(prompt_tokens, answer_tokens, block_names(prompt))


def run(engine: Engine, *arrivals: tuple[float, Sequence]) -> list[Output]:
    """Everything that the sequences show, looking only when one arrives."""
    outputs = []
    for at, one in arrivals:
        outputs += engine.advance(at)
        engine.add(one, at)
    return outputs + engine.advance(inf)


def test_a_step_takes_its_base_its_prefill_and_its_decoding_sequences() -> None:
    outputs = run(Engine(MODEL), (10.0, sequence(1400, answer_tokens=3)))
    first = 10.0 + 0.008 + 1400 / 14_000
    assert [each.tokens for each in outputs] == [1, 3]
    assert [each.at for each in outputs] == pytest.approx([first, first + 2 * (0.008 + 0.00012)])


def test_the_first_token_comes_alone_and_then_every_eighth() -> None:
    outputs = run(Engine(MODEL), (0.0, sequence(10, answer_tokens=20)))
    assert [each.tokens for each in outputs] == [1, 9, 17, 20]
    assert [each.is_last for each in outputs] == [False, False, False, True]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine = Engine(MODEL)
    (output,) = run(engine, (0.0, sequence(10_000)))
    assert engine.counts.steps == 3
    assert output.at == pytest.approx(3 * 0.008 + 10_000 / 14_000)


def test_decoding_sequences_leave_less_of_a_step_to_prompts() -> None:
    engine = Engine(MODEL)
    outputs = run(engine, (0.0, sequence(8, answer_tokens=100)), (0.05, sequence(4096, text="b")))
    short, long = outputs[0].sequence, next(each for each in outputs if each.sequence.prompt_tokens == 4096)
    assert short.prompt_tokens == 8
    # One token of the budget belongs to the sequence that decodes: the prompt needs two steps.
    began = next(each for each in (0.0085714 + n * 0.00812 for n in range(99)) if each >= 0.05)
    assert long.at == pytest.approx(began + 2 * 0.00812 + 4096 / 14_000, abs=1e-5)


def test_a_prompt_that_was_computed_before_is_found_up_to_its_last_token() -> None:
    engine = Engine(MODEL)
    first, second = sequence(1024), sequence(1024)
    run(engine, (0.0, first), (1.0, second))
    assert (first.cached_tokens, second.cached_tokens) == (0, 1024 - BLOCK_TOKENS)
    assert engine.counts.prefilled_tokens == 1024 + BLOCK_TOKENS


def test_another_beginning_is_another_prompt() -> None:
    engine = Engine(MODEL)
    second = Sequence(1024, 1, block_names(b"b" * BLOCK_TOKENS + b"a" * 768))
    run(engine, (0.0, sequence(1024)), (1.0, second))
    assert second.cached_tokens == 0


def test_the_cache_forgets_what_was_longest_unused_its_end_first() -> None:
    engine = Engine(replace(MODEL, kv_tokens=10 * BLOCK_TOKENS))
    prompts = [sequence(4 * BLOCK_TOKENS, text=text) for text in "abca"]
    run(engine, *((float(at), prompt) for at, prompt in enumerate(prompts)))
    # Of the first, four blocks, three had to go for the third, which needs five with its answer.
    assert prompts[3].cached_tokens == BLOCK_TOKENS
    assert engine.pool.used == 0


def test_who_does_not_fit_the_kv_cache_waits_for_room() -> None:
    engine = Engine(replace(MODEL, kv_tokens=10 * BLOCK_TOKENS))
    outputs = run(
        engine,
        (0.0, sequence(6 * BLOCK_TOKENS, answer_tokens=50)),
        (0.0, sequence(6 * BLOCK_TOKENS, text="b")),
    )
    ends = {each.sequence: each.at for each in outputs if each.is_last}
    first, second = (each.sequence for each in outputs if each.tokens == 1)
    assert outputs[-1].sequence is second
    assert ends[second] == pytest.approx(ends[first] + 0.008 + 6 * BLOCK_TOKENS / 14_000)
    assert not engine.fits(sequence(10 * BLOCK_TOKENS))


def test_at_most_64_sequences_run() -> None:
    engine = Engine(MODEL)
    for index in range(70):
        engine.add(sequence(8, answer_tokens=200, text=chr(33 + index)), 0.0)
    engine.advance(0.5)
    assert (engine.running, len(engine.waiting)) == (64, 6)


def test_half_speed_takes_twice_as_long() -> None:
    arrivals = [(0.1 * n, sequence(2000, 30, text=chr(97 + n))) for n in range(5)]
    late = [(0.2 * n, sequence(2000, 30, text=chr(97 + n))) for n in range(5)]
    whole = run(Engine(MODEL), *arrivals)
    half = run(Engine(replace(MODEL, speed=0.5)), *late)
    assert [each.at for each in half] == pytest.approx([2 * each.at for each in whole])


def test_how_often_one_looks_changes_nothing() -> None:
    chance = random.Random(7)
    asks = [
        (n * 0.05, chance.randint(1, 9000), chance.randint(1, 60), chance.choice("abc")) for n in range(60)
    ]
    rare = run(Engine(MODEL), *((at, sequence(size, answer, text)) for at, size, answer, text in asks))
    engine, often = Engine(MODEL), []
    for at, size, answer, text in asks:
        while (until := engine.next_at()) is not None and until < at:
            often += engine.advance(until)
        often += engine.advance(at)
        engine.add(sequence(size, answer, text), at)
    while (until := engine.next_at()) is not None:
        often += engine.advance(until)
    assert [(each.tokens, each.at) for each in often] == [(each.tokens, each.at) for each in rare]


def test_who_leaves_gives_back_all_it_held() -> None:
    engine = Engine(MODEL)
    asks = [sequence(3000, 50, text) for text in "abc"]
    for ask in asks:
        engine.add(ask, 0.0)
    engine.advance(0.4)
    for ask in asks:
        engine.abort(ask)
        engine.abort(ask)
    assert engine.advance(inf) == []
    assert (engine.running, len(engine.waiting), engine.pool.used) == (0, 0, 0)
    assert engine.next_at() is None
