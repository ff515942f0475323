"""The simulated unit's model of time and memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.simunit.engine import Engine
from loadtests.simunit.sequence import FinishReason, Sequence, Timing
from loadtests.simunit.text import Context

TIMING = Timing(
    step_ms=20,
    per_sequence_ms=1,
    prefill_tokens_per_s=1000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_gpu_blocks=20,
    max_model_len=200,
)


class Nobody:
    """Listens to nothing: these tests look at outputs."""

    def token(self, text: str, finish: FinishReason | None, said: str | None = None) -> None:
        """Nothing."""

    def fail(self, message: str) -> None:
        """Nothing."""


def sequence(prompt: str, max_tokens: int = 4) -> Sequence:
    return Sequence(Context(prompt), Nobody(), max_tokens=max_tokens)


def run(engine: Engine, *sequences: Sequence) -> tuple[list[str], float]:
    """Run to the end: each sequence's text, and the seconds it took."""
    texts, seconds = {id(one): "" for one in sequences}, 0.0
    for one in sequences:
        engine.add(one)
    while batch := engine.plan():
        seconds += batch.duration_s
        for output in engine.apply(batch):
            texts[id(output.sequence)] += output.text
        assert engine.pool.used <= engine.pool.num_blocks
    return list(texts.values()), seconds


def alone(prompt: str, max_tokens: int) -> str:
    context = Context(prompt)
    return "".join(context.extend() for _ in range(max_tokens))


def test_a_step_takes_its_base_a_part_per_sequence_and_its_prefill() -> None:
    _, seconds = run(Engine(TIMING), sequence("w" * 5 * 41, max_tokens=3))
    assert seconds == pytest.approx(3 * 0.021 + 40 / 1000)


def test_a_long_prompt_is_prefilled_in_chunks_beside_which_others_decode() -> None:
    engine = Engine(TIMING)
    engine.add(sequence("short", max_tokens=10))
    first = engine.plan()
    assert first is not None
    engine.apply(first)
    engine.add(sequence("w" * 5 * 150))
    sizes = []
    for _ in range(3):
        batch = engine.plan()
        assert batch is not None
        sizes.append([tokens for _, tokens in batch.parts])
        engine.apply(batch)
    assert sizes == [[1, 63], [1, 63], [1, 24]]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    engine = Engine(TIMING)
    for index in range(6):
        engine.add(sequence(f"{index}"))
    engine.plan()
    assert (len(engine.running), len(engine.waiting)) == (4, 2)


def test_a_cached_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    engine = Engine(TIMING)
    prompt = "w" * 5 * 64
    run(engine, sequence(prompt))
    again = sequence(prompt)
    _, seconds = run(engine, again)
    assert again.cached_tokens == 48
    assert seconds == pytest.approx(4 * 0.021 + 15 / 1000)
    assert (engine.counts.prefix_queries, engine.counts.prefix_hits) == (128, 48)


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    engine = Engine(TIMING)
    prompts = [letter * 5 * 160 for letter in "abc"]
    for prompt in prompts:
        run(engine, sequence(prompt, max_tokens=1))
    cached = []
    for prompt in (prompts[2], prompts[0]):
        again = sequence(prompt, max_tokens=1)
        run(engine, again)
        cached.append(again.cached_tokens)
    assert cached == [144, 0]


def test_when_blocks_run_out_the_youngest_yields_and_is_answered_all_the_same() -> None:
    engine = Engine(TIMING)
    prompts = [letter * 5 * 60 for letter in "abcd"]
    texts, _ = run(engine, *(sequence(prompt, max_tokens=100) for prompt in prompts))
    assert engine.counts.preemptions > 0
    assert texts == [alone(prompt, 100) for prompt in prompts]
    assert engine.pool.used == 0


def test_a_sequence_that_is_aborted_during_a_step_brings_nothing_and_frees_its_blocks() -> None:
    engine = Engine(TIMING)
    gone = sequence("gone")
    engine.add(gone)
    batch = engine.plan()
    assert batch is not None
    assert engine.abort(gone)
    assert engine.apply(batch) == []
    assert not engine.abort(gone)
    assert engine.pool.used == 0
    assert engine.counts.ended == {"stop": 0, "length": 0, "abort": 1}


def test_a_stalled_sequence_gets_no_more_until_the_stall_ends() -> None:
    engine = Engine(TIMING)
    engine.add(stalled := sequence("x", max_tokens=5))
    while batch := engine.plan(stall_after=2):
        engine.apply(batch)
    assert (stalled.generated, engine.running) == (2, [stalled])
    while batch := engine.plan():
        engine.apply(batch)
    assert stalled.generated == 5


def test_a_text_without_a_limit_ends_by_itself_or_at_the_models_length() -> None:
    brief = Timing(mean_answer_tokens=10)
    ended = Sequence(Context("x"), Nobody(), max_tokens=brief.max_model_len, natural_end=True)
    run(Engine(brief), ended)
    assert 0 < ended.generated < 200
    unending = sequence("x", max_tokens=TIMING.max_model_len)
    run(Engine(TIMING), unending)
    assert unending.context.tokens == TIMING.max_model_len


def test_a_cache_too_small_for_the_longest_text_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 321 does not fit 20 KV blocks"):
        Timing(num_gpu_blocks=20, max_model_len=321)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 120), st.integers(1, 60)), max_size=8))
def test_whatever_runs_beside_it_each_text_is_its_own_and_no_block_leaks(
    asked: list[tuple[str, int, int]],
) -> None:
    engine = Engine(TIMING)
    prompts = [letter * 5 * length for letter, length, _ in asked]
    texts, _ = run(
        engine, *(sequence(prompt, count) for prompt, (_, _, count) in zip(prompts, asked, strict=True))
    )
    assert texts == [alone(prompt, count) for prompt, (_, _, count) in zip(prompts, asked, strict=True)]
    assert engine.pool.used == 0
    assert not engine.running
    assert not engine.waiting
