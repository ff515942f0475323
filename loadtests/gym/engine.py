"""The model of one unit: continuous batching, chunked prefill, seats, a prefix-cached KV cache. Pure.

Scheduling follows vLLM V1: a step computes one token for each decoding sequence, then prompts in their order
in chunks; the youngest sequence gives its KV blocks up when there are too few, and is computed again. What
must stay true: steps follow one another without a gap while there is work; tokens in use never exceed
`kv_tokens` but for one sequence alone. Steps in which nothing but decoding happens are taken many at once.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil

from loadtests.gym.kv import BLOCK_TOKENS, KvCache
from loadtests.gym.sequences import Model, Sequence, Shown

STEPS_AT_ONCE = 64
"""Steps of one length; the context, and with it a step, grows meanwhile."""


class Engine:
    """The queue, the batch and the KV cache of one unit. `at` is when the present steps began."""

    def __init__(self, model: Model, gates: int = 1) -> None:
        self.model = model
        self.at = 0.0
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.prefilling: list[Sequence] = []
        self.decoding = 0
        self.by_gate = [0] * gates
        self.context = 0.0
        """Tokens of the contexts of those that decode."""
        self.pending = 0
        """Uncached tokens of prompts that are here, or on their way, and not computed."""
        self.coming = 0
        self.steps = 0
        self.preemptions = self.prefilled = self.answered = self.hit_tokens = self.asked_tokens = 0
        self.busy_s = 0.0
        self._due: list[tuple[int, int, Sequence]] = []
        self._order = 0
        self.kv = KvCache(model.kv_tokens)
        self._many = 0
        """Steps that are under way, each of `_step_s`; 0: nothing is."""
        self._step_s = 0.0
        self._chunks: list[tuple[Sequence, int]] = []

    # -- what others see -----------------------------------------------------------------------------------

    @property
    def kv_use(self) -> float:
        """The share of the KV cache in use, 0 to 1, as vLLM's gauge has it."""
        return min(self.kv.used / self.model.kv_tokens, 1.0)

    @property
    def count(self) -> int:
        """Requests that are here or on their way."""
        return len(self.running) + len(self.waiting) + self.coming

    @property
    def next_at(self) -> float | None:
        """When the present steps end; None: there is nothing to do."""
        return self.at + self._many * self._step_s if self._many else None

    @property
    def step_at(self) -> float | None:
        """When the first of the present steps ends; None: there is nothing to do."""
        return self.at + self._step_s if self._many else None

    def cached(self, names: tuple[int, ...], prompt_tokens: int) -> int:
        """How many tokens of a prompt are in the cache."""
        return self.kv.find(names, prompt_tokens) * BLOCK_TOKENS

    def dues(self) -> list[int]:
        """In how many steps the sequences that decode will end, in no order."""
        return [step - self.steps for step, _, sequence in self._due if sequence.ends_step == step]

    def made(self, sequence: Sequence) -> int:
        """How many tokens of an answer have been shown."""
        left = sequence.ends_step - self.steps
        return sequence.answer_tokens - left if sequence.ends_step else sequence.made

    # -- what comes ----------------------------------------------------------------------------------------

    def expect(self, sequence: Sequence) -> None:
        """A prompt is on its way through the front end."""
        self.coming += 1
        held = max(self.cached(sequence.names, sequence.prompt_tokens), sequence.fetched)
        sequence.reckoned = sequence.goal - held
        self.pending += sequence.reckoned

    def take(self, sequence: Sequence, now: float) -> list[Shown]:
        """A prompt that was expected is here. What has come of the steps until then."""
        self.coming -= 1
        shown = self.advance(now)
        blocked = bool(self.waiting) or len(self.running) >= self.model.seats
        self.waiting.append(sequence)
        if not self._many:
            self._plan(now)
        elif not (blocked or self._chunks):
            # The step that runs ends first.
            self._many = min(self._many, max(1, ceil((now - self.at) / self._step_s - 1e-9)))
        return shown

    def drop(self, sequence: Sequence) -> None:
        """Whoever asked has left; the step that runs is no shorter for it. Nothing for one that has ended."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.pending -= sequence.reckoned
        elif sequence in self.running:
            self._unseat(sequence)
            self._many = min(self._many, 1)

    def clear(self) -> list[Sequence]:
        """The processes are gone, and with them all that was there. Who was there."""
        lost, publish = [*self.running, *self.waiting], self.kv.publish
        self.__init__(self.model, len(self.by_gate))  # type: ignore[misc]
        self.kv.publish = publish
        return lost

    def advance(self, now: float) -> list[Shown]:
        """Take all steps that end by `now`; those that follow begin when they end."""
        shown = []
        while self._many and self.at + self._many * self._step_s <= now + 1e-9:
            shown.append(self._take_steps(self._many))
            self._plan(self.at)
        if self._many > 1:
            done = int((now - self.at) / self._step_s + 1e-9)
            if done:
                shown.append(self._take_steps(done))
        return shown

    # -- steps ---------------------------------------------------------------------------------------------

    def _take_steps(self, steps: int) -> Shown:
        shown = Shown(self.at + steps * self._step_s, steps, self._step_s, self.by_gate.copy())
        self.at = shown.at
        self._many -= steps
        self.steps += steps
        self.busy_s += steps * self._step_s
        self.answered += steps * self.decoding
        self.context += steps * self.decoding
        self.kv.private += steps * self.decoding
        self.kv.evict()
        while self._due and self._due[0][0] <= self.steps:
            step, _, sequence = heappop(self._due)
            if sequence.ends_step == step:
                sequence.made = sequence.answer_tokens
                self._leave(sequence)
                shown.ended.append(sequence)
        for sequence, tokens in self._chunks:
            self.prefilled += tokens
            if sequence.computed == sequence.goal:
                self._next_token(sequence, shown)
        self._chunks = []
        return shown

    def _next_token(self, sequence: Sequence, shown: Shown) -> None:
        self.prefilling.remove(sequence)
        sequence.made += 1
        self.answered += 1
        if sequence.made == 1:
            shown.first.append(sequence)
        if sequence.made >= sequence.answer_tokens:
            self._leave(sequence)
            shown.ended.append(sequence)
            return
        sequence.ends_step = self.steps + sequence.answer_tokens - sequence.made
        self._order += 1
        heappush(self._due, (sequence.ends_step, self._order, sequence))
        self.decoding += 1
        self.context += sequence.computed
        if sequence.gate >= 0:
            self.by_gate[sequence.gate] += 1

    def _plan(self, at: float) -> None:
        model, preemptions = self.model, self.preemptions
        self.at = at
        while self.decoding and self.kv.used + self.decoding > model.kv_tokens and len(self.running) > 1:
            self._preempt()
        budget = model.step_tokens - self.decoding
        prefilled = 0
        for sequence in list(self.prefilling):
            if budget <= prefilled or sequence not in self.running:
                continue
            prefilled += self._carry_on(sequence, budget - prefilled)
        if self.preemptions == preemptions:
            while self.waiting and prefilled < budget and len(self.running) < model.seats:
                tokens = self._admit(self.waiting[0], budget - prefilled)
                if not tokens:
                    break
                prefilled += tokens
        if not self.running:
            self._many = 0
            return
        # Nobody is given a seat in the step in which one has lost it, but perhaps in the next.
        is_calm = not self._chunks and self.preemptions == preemptions
        self._many = self._undisturbed() if is_calm else 1
        context = self.context + 0.5 * self.decoding * (self._many - 1)
        prefilled = sum(tokens for _, tokens in self._chunks)
        pairs = sum(tokens * (sequence.computed - 0.5 * tokens) for sequence, tokens in self._chunks)
        self._step_s = model.step_s(prefilled, self.decoding, context) + model.per_pair_s * pairs
        self.kv.evict()

    def _undisturbed(self) -> int:
        """How many steps of nothing but decoding can be taken at once."""
        while self._due and self._due[0][2].ends_step != self._due[0][0]:
            heappop(self._due)
        room = (self.model.kv_tokens - self.kv.used) // max(self.decoding, 1)
        first = self._due[0][0] - self.steps if self._due else 1
        return max(1, min(STEPS_AT_ONCE, first, room))

    def _carry_on(self, sequence: Sequence, budget: int) -> int:
        """Compute the next chunk of a prompt, at the price of the youngest if need be; how many tokens."""
        tokens = min(sequence.goal - sequence.computed, budget)
        while self.kv.used + tokens + self.decoding > self.model.kv_tokens and len(self.running) > 1:
            if self._preempt() is sequence:
                return 0
        self._compute(sequence, tokens)
        return tokens

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Give the first of those who wait a seat; its first chunk of tokens, 0 when there is no room."""
        held = sequence.names[: self.kv.find(sequence.names, sequence.goal)]
        hits = len(held) * BLOCK_TOKENS
        cached = max(hits, sequence.fetched)
        tokens = min(sequence.goal - cached, budget)
        # All of the prompt, as in vLLM (scheduler_reserve_full_isl): else many begin, and few come to an end.
        needed = self.kv.idle_among(held) + sequence.goal - hits + self.decoding
        if self.kv.used + needed > self.model.kv_tokens and self.running:
            return 0
        self.waiting.popleft()
        self.kv.hold(held)
        sequence.named, sequence.computed = len(held), cached
        # Whoever loses it has to compute it.
        self.kv.private, sequence.fetched = self.kv.private + cached - hits, 0
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = hits
            self.hit_tokens += hits
            self.asked_tokens += sequence.prompt_tokens
        self.pending += sequence.goal - cached - sequence.reckoned
        self.running[sequence] = None
        self.prefilling.append(sequence)
        self._compute(sequence, tokens)
        return tokens

    def _compute(self, sequence: Sequence, tokens: int) -> None:
        """A chunk is in the step that begins; as in vLLM, its full blocks can be found from now on."""
        sequence.computed += tokens
        self.pending -= tokens
        self.kv.private += tokens
        self._chunks.append((sequence, tokens))
        self._name(sequence)

    def _name(self, sequence: Sequence) -> None:
        full = sequence.names[sequence.named : sequence.computed // BLOCK_TOKENS]
        if full:
            self.kv.store(full, sequence.names[: sequence.named])
            self.kv.private -= len(full) * BLOCK_TOKENS
            sequence.named += len(full)

    def _preempt(self) -> Sequence:
        """Take the KV cache of the youngest away; it waits in front of all others."""
        youngest = next(reversed(self.running))
        self.preemptions += 1
        self._chunks = [chunk for chunk in self._chunks if chunk[0] is not youngest]
        self._unseat(youngest)
        youngest.reckoned = youngest.goal
        self.pending += youngest.reckoned
        self.waiting.appendleft(youngest)
        return youngest

    def _unseat(self, sequence: Sequence) -> None:
        """One that has not ended gives up its seat."""
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
            self.pending -= sequence.goal - sequence.computed
        else:
            sequence.made = sequence.answer_tokens - (sequence.ends_step - self.steps)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A sequence gives up its seat; its full blocks stay until room is needed, the end goes first."""
        if sequence.ends_step:
            # The last token was shown, and never computed.
            computed = sequence.prompt_tokens + sequence.made - 1
            self.decoding -= 1
            self.context -= computed
            if sequence.gate >= 0:
                self.by_gate[sequence.gate] -= 1
            sequence.computed, sequence.ends_step = computed, 0
            self._name(sequence)
        del self.running[sequence]
        self.kv.private -= sequence.computed - sequence.named * BLOCK_TOKENS
        self.kv.release(sequence.names[: sequence.named])
        sequence.named = sequence.computed = 0
