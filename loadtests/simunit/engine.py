"""The model of time and memory: continuous batching, chunked prefill, a prefix-cached KV cache. No I/O.

A step is: `plan` a batch, let its `duration_s` pass, `apply` it. Scheduling follows vLLM V1: running
sequences first, in order of arrival; then waiting ones while tokens, slots and KV blocks last; the youngest
yields its blocks to the others.
"""

from collections import deque

from loadtests.simunit.prefix_cache import BlockPool
from loadtests.simunit.sequence import (
    Batch,
    Counts,
    FinishReason,
    Moved,
    Output,
    Part,
    Sequence,
    Timing,
)
from loadtests.simunit.text import BLOCK_TOKENS


class Engine:
    """The scheduler's queues and the KV cache."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.pool = BlockPool(timing.num_gpu_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counts = Counts()
        self.moved = Moved()
        self.held_over: int | None = None
        """While it is a number, what was asked for more tokens than that goes on and on."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Forget a sequence and free its blocks; False if it had already ended."""
        if sequence.ended:
            return False
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._end(sequence, "abort")
        return True

    def clear(self) -> list[Sequence]:
        """Forget everything; return what was there."""
        everything = [*self.running, *self.waiting]
        for sequence in everything:
            self.abort(sequence)
        return everything

    def plan(self, stall_after: int | None = None, *, admits: bool = True) -> Batch | None:
        """Choose the next step's work, or None. No sequence gets more than `stall_after` tokens; a new one is
        begun only if the engine `admits` any.
        """
        preemptions = self.counts.preemptions
        parts, budget = self._carry_on(stall_after)
        if admits and self.counts.preemptions == preemptions:
            parts += self._admit(budget)
        return self._batch(parts) if parts else None

    def apply(self, batch: Batch) -> list[Output]:
        """The step is done: account what was computed, sample a token where the whole text has been."""
        self.counts.steps += 1
        outputs: list[Output] = []
        for sequence, tokens in batch.parts:
            if sequence.ended:
                continue
            sequence.computed += tokens
            self._name_blocks(sequence)
            if sequence.computed == sequence.context.tokens:
                outputs.append(self._sample(sequence))
        return outputs

    def _carry_on(self, stall_after: int | None) -> tuple[list[Part], int]:
        parts: list[Part] = []
        budget = self.timing.max_num_batched_tokens
        position = 0
        while position < len(self.running) and budget:
            sequence = self.running[position]
            position += 1
            if stall_after is not None and sequence.generated >= stall_after:
                continue
            tokens = min(sequence.context.tokens - sequence.computed, budget)
            if self._make_room(sequence, tokens):
                parts.append((sequence, tokens))
                budget -= tokens
        return parts, budget

    def _admit(self, budget: int) -> list[Part]:
        parts: list[Part] = []
        while self.waiting and budget and len(self.running) < self.timing.max_num_seqs:
            sequence = self.waiting[0]
            tokens = self._claim_blocks(sequence, budget)
            if tokens is None:
                break
            self.running.append(self.waiting.popleft())
            parts.append((sequence, tokens))
            budget -= tokens
        return parts

    def _claim_blocks(self, sequence: Sequence, budget: int) -> int | None:
        """Hold what is cached, reserve the rest of the first chunk; its tokens, or None if it does not fit.

        The last token is always computed, cached or fetched or not, since sampling needs it.
        """
        context = sequence.context
        reusable = context.block_hashes[: (context.tokens - 1) // BLOCK_TOKENS]
        cached = reusable[: self.pool.match(reusable)]
        hits = len(cached) * BLOCK_TOKENS
        computed = max(hits, sequence.fetched)
        tokens = min(context.tokens - computed, budget)
        self.pool.hold(cached)
        reserved = _blocks_for(computed + tokens) - len(cached)
        if not self.pool.take(reserved):
            self.pool.release(cached, 0)
            return None
        sequence.blocks_named, sequence.blocks_unnamed = len(cached), reserved
        sequence.computed = computed
        # Whoever loses them has to compute them.
        sequence.fetched = 0
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hits
            self.counts.prefix_queries += context.tokens
            self.counts.prefix_hits += hits
            self.moved.fetched_tokens += computed - hits
        return tokens

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve blocks for `tokens` more; the youngest yields its own, False if that is `sequence`."""
        held = sequence.blocks_named + sequence.blocks_unnamed
        needed = _blocks_for(sequence.computed + tokens) - held
        while needed > 0 and not self.pool.take(needed):
            youngest = self.running.pop()
            self._release(youngest)
            self.waiting.appendleft(youngest)
            self.counts.preemptions += 1
            if youngest is sequence:
                return False
        sequence.blocks_unnamed += max(0, needed)
        return True

    def _batch(self, parts: list[Part]) -> Batch:
        timing = self.timing
        tokens = sum(count for _, count in parts)
        prefill_tokens = tokens - len(parts)
        step_s = (timing.step_ms + timing.per_sequence_ms * len(parts)) / 1000
        return Batch(tuple(parts), step_s + prefill_tokens / timing.prefill_tokens_per_s, tokens)

    def _name_blocks(self, sequence: Sequence) -> None:
        while sequence.blocks_named < sequence.computed // BLOCK_TOKENS:
            self.pool.fill(sequence.context.block_hashes[sequence.blocks_named])
            sequence.blocks_named += 1
            sequence.blocks_unnamed -= 1

    def _sample(self, sequence: Sequence) -> Output:
        text = ""
        if sequence.generated == 0:
            self.counts.prompt_tokens += sequence.prompt_tokens
        if sequence.max_tokens:
            text = (
                sequence.context.say(sequence.script.pop(0)) if sequence.script else sequence.context.extend()
            )
            sequence.generated += 1
            self.counts.generation_tokens += 1
        finish = self._finish_reason(sequence)
        if finish:
            self.running.remove(sequence)
            self._end(sequence, finish)
        return Output(sequence, text, finish)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        if sequence.max_tokens == 0:
            return "stop"
        if self.held_over is not None and sequence.max_tokens > self.held_over:
            return "length" if sequence.context.tokens >= self.timing.max_model_len else None
        if sequence.generated >= sequence.max_tokens or sequence.context.tokens >= self.timing.max_model_len:
            return "length"
        if sequence.script is not None:
            return None if sequence.script else "stop"
        may_end = sequence.natural_end and sequence.generated >= sequence.min_tokens
        return "stop" if may_end and sequence.context.ends_here(self.timing.mean_answer_tokens) else None

    def _end(self, sequence: Sequence, how: FinishReason) -> None:
        sequence.ended = True
        self.counts.ended[how] += 1
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.context.block_hashes[: sequence.blocks_named], sequence.blocks_unnamed)
        sequence.blocks_named = sequence.blocks_unnamed = sequence.computed = 0


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
