"""The gym's engine: nothing is lost, nothing is held too long, and it takes the time that the model says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from loadtests.gym import engine as engine_module
from loadtests.gym.engine import Engine
from loadtests.gym.kv import BLOCK_TOKENS
from loadtests.gym.prompts import Text
from loadtests.gym.sequences import Model, Sequence, Shown

SMALL = Model(kv_tokens=6000, seats=6, step_tokens=512)


class Stage:
    """An engine and what it has shown."""

    def __init__(self, model: Model) -> None:
        self.engine = Engine(model)
        self.first: dict[Sequence, float] = {}
        self.ended: dict[Sequence, float] = {}
        self.tokens = 0

    def take(self, sequence: Sequence, now: float) -> None:
        self.engine.expect(sequence)
        self._note(self.engine.take(sequence, now))

    def run(self) -> None:
        while (at := self.engine.next_at) is not None:
            self._note(self.engine.advance(at))
            held = self.engine.kv.used
            assert held <= self.engine.model.kv_tokens or len(self.engine.running) == 1

    def _note(self, shown: list[Shown]) -> None:
        for one in shown:
            self.tokens += one.steps * sum(one.decoding)
            for sequence in one.first:
                assert sequence not in self.first
                self.first[sequence] = one.at
            for sequence in one.ended:
                assert sequence not in self.ended
                self.ended[sequence] = one.at


def sequences(seed: int, count: int = 60, most: int = 2000) -> list[tuple[float, Sequence]]:
    rng, system, at, made = random.Random(seed), Text().extend(600), 0.0, []
    for _ in range(count):
        at += rng.expovariate(8.0)
        prompt = (system if rng.random() < 0.5 else Text([rng.randrange(1 << 20)])).extend(
            rng.randint(1, most)
        )
        answer = prompt.extend(rng.randint(1, 200))
        made.append((at, Sequence(prompt.tokens, answer.tokens - prompt.tokens, answer.names, 0)))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_every_sequence_ends_once_and_leaves_nothing_behind(seed: int) -> None:
    stage, todo = Stage(SMALL), sequences(seed)
    for at, sequence in todo:
        stage.take(sequence, at)
    stage.run()
    engine = stage.engine
    assert stage.first.keys() == stage.ended.keys() == {sequence for _, sequence in todo}
    assert engine.answered == sum(sequence.answer_tokens for _, sequence in todo)
    assert engine.preemptions > 0
    assert (engine.kv.used, engine.pending, engine.coming, engine.count, engine.decoding) == (0, 0, 0, 0, 0)
    assert engine.context == 0
    assert engine.kv.idle <= SMALL.kv_tokens


@pytest.mark.parametrize("seed", range(3))
def test_many_steps_at_once_are_as_one_after_the_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    for at_once in (64, 1):
        monkeypatch.setattr(engine_module, "STEPS_AT_ONCE", at_once)
        stage = Stage(SMALL)
        for at, sequence in sequences(seed):
            stage.take(sequence, at)
        stage.run()
        times.append([*stage.first.values(), *stage.ended.values()])
    assert times[0] == pytest.approx(times[1], abs=1e-6)


def test_who_leaves_gives_back_all_it_held() -> None:
    stage = Stage(replace(SMALL, seats=3))
    all_of_them = [Sequence(700, 50, Text([n << 10]).extend(750).names, 0) for n in range(5)]
    for one in all_of_them:
        stage.take(one, 0.0)
    engine = stage.engine
    engine.advance(0.14)
    kinds = {one: (one.ends_step > 0, one in engine.prefilling, one in engine.waiting) for one in all_of_them}
    assert len(set(kinds.values())) == 3
    for one in all_of_them:
        engine.drop(one)
        engine.drop(one)
    stage.run()
    assert (engine.count, engine.kv.used, engine.pending, engine.decoding, engine.context) == (0, 0, 0, 0, 0)
    assert not stage.ended


def test_who_stays_is_not_harmed_by_who_leaves() -> None:
    stage, rng = Stage(SMALL), random.Random(3)
    stays = []
    for at, one in sequences(4):
        stage.take(one, at)
        if rng.random() < 0.3 and one not in stage.ended:
            stage.engine.drop(one)
        else:
            stays.append(one)
    stage.run()
    assert set(stays) <= set(stage.ended)
    assert (stage.engine.count, stage.engine.pending, stage.engine.kv.private) == (0, 0, 0)


def test_what_is_cached_is_not_computed_again_until_it_was_pushed_out() -> None:
    stage, text = Stage(Model(kv_tokens=8192)), Text().extend(4000)
    long = [Sequence(4000, 1, text.names) for _ in range(3)]
    stage.take(long[0], 0.0)
    stage.run()
    stage.take(long[1], 10.0)
    stage.run()
    assert long[0].cached_tokens == 0
    assert long[1].cached_tokens == 3999 // BLOCK_TOKENS * BLOCK_TOKENS
    other = Text([99]).extend(7000)
    stage.take(Sequence(7000, 1, other.names), 20.0)
    stage.run()
    stage.take(long[2], 30.0)
    stage.run()
    assert long[2].cached_tokens < long[1].cached_tokens


def test_a_follow_up_finds_the_answer_before_it() -> None:
    stage, prompt = Stage(Model()), Text().extend(1000)
    context = prompt.extend(640)
    stage.take(Sequence(1000, 640, context.names), 0.0)
    stage.run()
    after = context.extend(200)
    follow_up = Sequence(after.tokens, 1, after.names)
    stage.take(follow_up, 100.0)
    stage.run()
    # The last token of the answer was never computed.
    assert follow_up.cached_tokens == 1639 // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_full_unit_lets_others_wait_for_a_seat() -> None:
    stage = Stage(Model(seats=2))
    for number in range(3):
        stage.take(Sequence(100, 100, Text([number << 8]).extend(200).names), 0.0)
    stage.run()
    firsts = sorted(stage.first.values())
    assert firsts[2] > min(stage.ended.values())


def test_steps_grow_with_batch_and_context() -> None:
    model = Model(per_context_token_s=1e-6)
    assert model.step_s(0, 10, 0.0) > model.step_s(0, 1, 0.0)
    assert model.step_s(0, 10, 1e5) == pytest.approx(model.step_s(0, 10, 0.0) + 0.1)
    assert model.step_s(1400, 0, 0.0) == pytest.approx(0.1 + model.base_s)
