"""The model of one unit of the replay: continuous batching, chunked prefill, a prefix-cached KV cache. Pure.

Time is handed in, in virtual seconds. What must stay true: steps follow one another without a gap while there
is work, and end at the moment the model says, however late anybody looks: a late process shows its results
late, and computes the same.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import xxhash

from loadtests.simunit.prefix_cache import BlockPool

BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Model:
    """How fast and how large a unit is.

    A step computes up to `step_tokens` tokens, those of decoding sequences first, then prompts in order of
    arrival. It takes (`step_s` + prefilled tokens / `prefill_tokens_s` + `sequence_s` x decoding sequences)
    / `speed`. The first token is shown alone, then every `event_tokens`.
    """

    prefill_tokens_s: float = 14_000.0
    step_s: float = 0.008
    sequence_s: float = 0.00012
    step_tokens: int = 4096
    max_sequences: int = 64
    kv_tokens: int = 1_500_000
    event_tokens: int = 8
    speed: float = 1.0


def block_names(prompt: bytes) -> tuple[int, ...]:
    """The name of each full block of a prompt: it stands for the block's text and all text before it."""
    name = 0
    names = []
    for at in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = xxhash.xxh3_64_intdigest(prompt[at : at + BLOCK_TOKENS], name)
        names.append(name)
    return tuple(names)


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its answer. `computed`: the prompt's tokens whose KV exists, cached ones included."""

    prompt_tokens: int
    answer_tokens: int
    names: tuple[int, ...]
    computed: int = 0
    cached_tokens: int = 0
    named: int = 0
    unnamed: int = 0
    began_step: int = 0
    """The step that showed the first token."""
    ended: bool = False


class Output(NamedTuple):
    """At `at` the answer had come to `tokens` tokens."""

    sequence: Sequence
    tokens: int
    at: float

    @property
    def is_last(self) -> bool:
        """Whether the answer is complete."""
        return self.tokens == self.sequence.answer_tokens


@dataclass(slots=True)
class Counts:
    """What the unit has done since it started."""

    steps: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Step:
    ends_at: float
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)


class Engine:
    """The queue, the batch and the KV cache of one unit."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.pool = BlockPool(model.kv_tokens // BLOCK_TOKENS)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: set[Sequence] = set()
        self.counts = Counts()
        self._step: _Step | None = None
        # When decoding sequences have something to show: (step, order, sequence, tokens by then).
        self._due: list[tuple[int, int, Sequence, int]] = []
        self._order = 0

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self.prefilling) + len(self.decoding)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the KV cache is large enough for it at all."""
        return _blocks_of(sequence) <= self.pool.num_blocks

    def add(self, sequence: Sequence, now: float) -> None:
        """A request has come. The engine must have been advanced to `now`."""
        self.waiting.append(sequence)
        if self._step is None:
            self._begin(now)

    def abort(self, sequence: Sequence) -> None:
        """Its client left. Nothing happens when it has ended."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        if sequence in self.decoding:
            self.decoding.remove(sequence)
        else:
            self.prefilling.remove(sequence)
        self._release(sequence)

    def next_at(self) -> float | None:
        """Until when nothing is shown, as far as is known now; None: nothing is there to do."""
        if self._step is None:
            return None
        if self._step.prefills or self.waiting or not self._due:
            return self._step.ends_at
        more_steps = self._due[0][0] - self.counts.steps - 1
        return self._step.ends_at + more_steps * self._duration_s(0)

    def advance(self, now: float) -> list[Output]:
        """Take all steps that end by `now`."""
        outputs: list[Output] = []
        while self._step is not None and self._step.ends_at <= now:
            step, self._step = self._step, None
            self._end(step, outputs)
            self._begin(step.ends_at)
        return outputs

    def _begin(self, at: float) -> None:
        """Plan the step that starts at `at`."""
        budget = self.model.step_tokens - len(self.decoding)
        prefills: list[tuple[Sequence, int]] = []
        for sequence in self.prefilling:
            budget -= self._plan(sequence, budget, prefills)
        while self.waiting and budget > 0 and self.running < self.model.max_sequences:
            sequence = self.waiting[0]
            if not self._claim(sequence):
                break
            self.prefilling.append(self.waiting.popleft())
            budget -= self._plan(sequence, budget, prefills)
        if not self.running:
            return
        duration_s = self._duration_s(sum(tokens for _, tokens in prefills))
        self.counts.busy_s += duration_s
        self._step = _Step(at + duration_s, prefills)

    @staticmethod
    def _plan(sequence: Sequence, budget: int, prefills: list[tuple[Sequence, int]]) -> int:
        tokens = min(sequence.prompt_tokens - sequence.computed, budget)
        if tokens > 0:
            prefills.append((sequence, tokens))
        return max(tokens, 0)

    def _duration_s(self, prefilled: int) -> float:
        model = self.model
        return (
            model.step_s + prefilled / model.prefill_tokens_s + model.sequence_s * len(self.decoding)
        ) / model.speed

    def _end(self, step: _Step, outputs: list[Output]) -> None:
        counts = self.counts
        counts.steps += 1
        counts.answer_tokens += len(self.decoding)
        while self._due and self._due[0][0] <= counts.steps:
            _, _, sequence, tokens = heappop(self._due)
            if not sequence.ended:
                self._show(sequence, tokens, step.ends_at, outputs)
        for sequence, tokens in step.prefills:
            if sequence.ended:
                continue
            counts.prefilled_tokens += tokens
            sequence.computed += tokens
            self._name_blocks(sequence)
            if sequence.computed == sequence.prompt_tokens:
                self._first_token(sequence, step.ends_at, outputs)

    def _first_token(self, sequence: Sequence, at: float, outputs: list[Output]) -> None:
        self.prefilling.remove(sequence)
        self.decoding.add(sequence)
        sequence.began_step = self.counts.steps
        self.counts.answer_tokens += 1
        self._show(sequence, 1, at, outputs)

    def _show(self, sequence: Sequence, tokens: int, at: float, outputs: list[Output]) -> None:
        outputs.append(Output(sequence, tokens, at))
        if tokens == sequence.answer_tokens:
            sequence.ended = True
            self.decoding.remove(sequence)
            self._release(sequence)
            return
        # The first token comes alone, so that events end at 1, 9, 17, … tokens.
        following = min(tokens + self.model.event_tokens, sequence.answer_tokens)
        self._order += 1
        heappush(self._due, (sequence.began_step + following - 1, self._order, sequence, following))

    def _claim(self, sequence: Sequence) -> bool:
        """Hold what is cached and reserve the rest, answer included; False while there is no room.

        The last token of a prompt is always computed: it gives the first one of the answer.
        """
        names = sequence.names[: (sequence.prompt_tokens - 1) // BLOCK_TOKENS]
        cached = names[: self.pool.match(names)]
        self.pool.hold(cached)
        missing = _blocks_of(sequence) - len(cached)
        if not self.pool.take(missing):
            self.pool.release(cached, 0)
            return False
        sequence.named, sequence.unnamed = len(cached), missing
        sequence.computed = sequence.cached_tokens = len(cached) * BLOCK_TOKENS
        self.counts.prompt_tokens += sequence.prompt_tokens
        self.counts.cached_tokens += sequence.cached_tokens
        return True

    def _name_blocks(self, sequence: Sequence) -> None:
        while sequence.named < sequence.computed // BLOCK_TOKENS:
            self.pool.fill(sequence.names[sequence.named])
            sequence.named += 1
            sequence.unnamed -= 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.names[: sequence.named], sequence.unnamed)


def _blocks_of(sequence: Sequence) -> int:
    return -(-(sequence.prompt_tokens + sequence.answer_tokens) // BLOCK_TOKENS)
