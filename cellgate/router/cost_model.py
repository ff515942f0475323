"""The cost model of one unit: how fast it is, its backlog for this gate, what its prefix cache holds.

The cost of an ask there, in seconds, follows from them (cost.py). Rules:
1. An attempt is added when its lease opens and removed when it closes; sums are exact.
2. Rates survive a restart of the unit as estimates; the contents of its cache do not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import exp, inf
from typing import NamedTuple, Protocol

from cellgate.router.backlog import Backlog, Concurrency, CostInputs, Job, Prefilled, QueuedWork
from cellgate.router.cost import (
    NEW_EVICT_SHARE,
    Cost,
    CostTerms,
    Expected,
    Facts,
    FixedCost,
    OtherLoad,
    Slots,
    Terms,
    Usual,
    cost_terms,
    evict_share,
    price,
    terms,
)
from cellgate.router.error_share import Errors
from cellgate.router.learning import FIRST_ANSWER_TOKENS, STEPS_LEAST, Rates
from cellgate.router.nouns import Ask, Load
from cellgate.router.prefix import DEFAULT_KV_TOKENS, Computed, KnownPrefixes, PrefixCache, blocks_for

BLOCK_BYTES = 512
"""Bytes of prompt that one block hash of an ask stands for (proxy/request/prompt.py): about 128 tokens."""
ALL_BLOCKS = 2 << 20
"""All prefix caches together are believed to hold at most so many blocks: 300 to 460 MB."""
_new = tuple.__new__
"""What a named tuple's own constructor calls, in half the time."""

SURE = 16
"""After this many prompts that were computed right after another, the prefill rate counts as measured."""
MISS = 2.0
"""An ask is given up when its first token is predicted this many times later than its deadline."""
MISJUDGED = 1.25
MISJUDGED_S = 0.05
"""A forecast that is wrong by so many times, or seconds, is made anew."""
RATES = 4
"""So many rates of a unit can be guesses."""
PREFILL_MOST = 0.5
PLAIN_SPAN_S = 4.0
"""Over so long it hardly counts how long the last answer was decoded."""


class CostModel:
    """Everything about one unit that determines how soon it answers."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.backlog = Backlog()
        self.other_gates = OtherGates()
        self.prefixes = PrefixCache(1)
        self.known: KnownPrefixes | None = None
        """What its KV events tell; None: it publishes none."""
        self.cache: PrefixCache | KnownPrefixes = self.prefixes
        """What is asked for the blocks that the unit holds: `known`, else `prefixes`."""
        self.errors = Errors()
        self.slots = Slots()
        self.kv_tokens = 0
        self.last_plain: tuple[Attempted, Usage | None, float] | None = None
        """The plain answer that ended last, and when, until something was learnt from it."""
        self._plain_mark = 0.0, 0
        """When such a one was sent, and the tokens of all prompts that were computed when it had ended."""
        self.facts = Facts(rates)
        """What the last forecast was made from."""
        self.known_guesses = -1
        """How many `guesses` there were when peers last learnt of it; -1: they have not."""
        self.set_terms(cost_terms([self.facts])[0])
        self.size(None, ALL_BLOCKS)

    def size(self, load: Load | None, share: int) -> None:
        """Set the size of the KV cache, as reported; at most `share` blocks of it are kept."""
        self.kv_tokens = (load.kv_tokens if load is not None else 0) or self.kv_tokens
        limit = blocks_for(self.kv_tokens or DEFAULT_KV_TOKENS, self.rates.bytes_per_token.value, BLOCK_BYTES)
        limit = min(limit, share)
        # The measured bytes per token change a little all the time.
        if not 0.8 <= self.prefixes.limit / limit <= 1.25:
            self.prefixes.resize(limit)

    def set_terms(self, one: CostTerms) -> None:
        """Set the forecast."""
        self.cost_terms: CostTerms = one
        self._price: FixedCost = price(one, self.rates, is_sure=self.is_sure())
        self.backlog.cost_inputs = None

    def is_misjudged(self, usual: Usual) -> bool:
        """Whether more is known than when the forecast was made."""
        own, rates = self.cost_terms, self.rates
        return (
            not 1.0 / MISJUDGED < rates.prefill_tokens_s.reckoned / own.tokens_s < MISJUDGED
            or not 1.0 / MISJUDGED < rates.steps.reckoned[0] / own.step_s < MISJUDGED
            or abs(rates.latency.reckoned_s(own.tokens_s) - own.latency_s) > MISJUDGED_S
            or abs(evict_share(self.facts, usual) - own.evict_share) > (MISJUDGED - 1.0) * NEW_EVICT_SHARE
        )

    def cost_inputs(self) -> CostInputs:
        """What an ask costs here with the work that is there, until that changes, or a tick passes."""
        (
            tokens_s, token_s, fixed_s, step_s, sequence_s, uncached_s, slowdown_of_others_s, kv_room,
            slot_room,
            byte_tokens, sure_tokens_s, hidden, _, _, _,
        ) = self._price  # fmt: skip
        front: QueuedWork | None = None
        backlog = self.backlog
        batch, front_tokens = backlog.batch, backlog.front_tokens
        if backlog.queued_tokens:
            behind = backlog.queued_tokens - hidden - front_tokens
            front = behind, front_tokens, backlog.front_since, tokens_s, token_s, sure_tokens_s
        backlog.cost_inputs = cost_inputs = (
            kv_room - backlog.kv_tokens if batch < slot_room else -inf,
            fixed_s,
            step_s + sequence_s * batch,
            uncached_s + slowdown_of_others_s * batch,
            byte_tokens,
            front,
        )
        return cost_inputs

    def estimate(
        self, ask: Ask, held: int, expected: Expected, now: float, like: CostModel | None = None
    ) -> CostEstimate:
        """What `ask` would cost on this unit now, which holds `held` blocks of its prompt. `like`: if it were
        as fast as that unit.
        """
        own, pace = self.cost_terms, like or self
        if like is not None:
            fast = like.cost_terms
            own = own._replace(
                tokens_s=fast.tokens_s,
                token_s=fast.token_s,
                step_s=fast.step_s,
                sequence_s=fast.sequence_s,
                slowdown_of_others_s=fast.slowdown_of_others_s,
                latency_s=fast.latency_s,
            )
        bytes_per_token = pace.rates.bytes_per_token.value
        tokens = ask.prompt_bytes / bytes_per_token
        block_tokens = BLOCK_BYTES / bytes_per_token
        cached = held * block_tokens * self.prefixes.trust
        spared = pace.spared_tokens(held, expected)
        reckoned = terms(own, self.backlog, tokens, cached, spared, expected.answer_tokens, now)
        return _new(CostEstimate, (reckoned, tokens, cached))

    def spared_tokens(self, held: int, expected: Expected) -> float:
        """What is not charged of a prompt of which the unit holds so many blocks (see Expected)."""
        return expected.spared_blocks(held) * BLOCK_BYTES / self.rates.bytes_per_token.value

    def is_sure(self) -> bool:
        """Whether its prefill rate was measured."""
        return self.rates.followed >= SURE

    def guessed(self) -> list[str]:
        """Which values are guesses, by configuration, engine or peers, and were not measured yet."""
        rates = self.rates
        known = {
            "prefill rate": rates.prefill_tokens_s.seen,
            "step": rates.steps.seen,
            "latency": rates.latency.seen,
            "bytes per token": rates.bytes_per_token.seen,
        }
        return [name for name, seen in known.items() if not seen]

    def guesses(self) -> int:
        """How many these are."""
        rates = self.rates
        seen = 1 if rates.prefill_tokens_s.seen else 0
        if rates.steps.seen:
            seen += 1
        if rates.latency.seen:
            seen += 1
        return RATES - seen - (1 if rates.bytes_per_token.seen else 0)

    def backlog_s(self, now: float) -> float:
        """Seconds of this gate's prompts that the unit has to compute; 0 until its rate was measured."""
        if not self.is_sure():
            return 0.0
        tokens_s = self.cost_terms.tokens_s
        return self.backlog.backlog_tokens(now, tokens_s, self.cost_terms.latency_s) / tokens_s

    def add(self, key: object, ask: Ask, expected: Expected, held: int, now: float) -> Job:
        """An attempt is sent to the unit, which holds `held` blocks of its prompt."""
        backlog, rates, price = self.backlog, self.rates, self._price
        bytes_per_token = rates.bytes_per_token.value
        left = tokens = ask.prompt_bytes / bytes_per_token
        cached, record = 0.0, 0
        answer_tokens, shared, charged = expected
        if held:
            cached = held * BLOCK_BYTES / bytes_per_token * self.prefixes.trust
            left -= cached
        if left < 1.0:
            left = 1.0
        room = (backlog.cost_inputs or self.cost_inputs())[0]
        if has_slot := tokens + answer_tokens <= room:
            ahead = left
            if backlog.queued_tokens:
                ahead += backlog.backlog_tokens(now, price.tokens_s, self.cost_terms.latency_s)
            ttft_s = price.ahead_s + ahead * price.token_s
            if batch := backlog.batch:
                has_slot = batch + price.foreign_batch < backlog.peak_batch
        else:
            ttft_s = Cost(*terms(self.cost_terms, backlog, tokens, cached, 0.0, answer_tokens, now)).ttft_s
        if blocks := ask.blocks:
            record = self.prefixes.record(blocks)
        uncached = int(left)
        job = _new(
            Job,
            (
                uncached,
                uncached + int(answer_tokens),
                now,
                now + rates.latency.value,
                has_slot,
                int(tokens),
                int(cached),
                held,
                record,
                ttft_s,
                answer_tokens,
                shared,
                charged,
                ask.stream,
            ),
        )
        if ask.stream or answer_tokens <= left * price.long_answer or answer_tokens == FIRST_ANSWER_TOKENS:
            backlog.open(key, job, now)
        else:
            backlog.open_computed(key, job, now)
        return job

    def show(self, attempt: Attempted, now: float, tells: bool = True) -> Prefilled | None:
        """The first token of an attempt has come; `tells`: it says how its prompt was computed."""
        if record := attempt.job.record:
            self.prefixes.prove(attempt.ask.blocks, record)
        return self.backlog.show(attempt, now, self._price.foreign_batch, tells)

    def remove(self, attempt: Attempted, now: float) -> Concurrency:
        """An attempt is over; returns the jobs while it was decoded."""
        if not attempt.committed:
            self.withdraw(attempt)
        return self.backlog.close(attempt, now)

    def withdraw(self, attempt: Attempted) -> None:
        """The prompt of an attempt may not have been computed."""
        if attempt.job.record:
            self.prefixes.forget(attempt.ask.blocks, attempt.job.record)

    def streamed(self, tokens: int, stream_s: float, beside: Concurrency) -> None:
        """A stream has sent so many tokens behind its first one in so many seconds, beside others.

        While their prompts were computed nothing was decoded; where that was most of the time, what is left
        says little.
        """
        prefill_s = beside.tokens / self.rates.prefill_tokens_s.value
        if tokens >= STEPS_LEAST and prefill_s < PREFILL_MOST * stream_s:
            # A sequence that waits for a decode slot does not make steps longer.
            batch = min(beside.batch + self._price.foreign_batch, self.slots.limit)
            self.rates.steps.learn((stream_s - prefill_s) / tokens, batch)

    def learn_plain(self) -> None:
        """A tick has passed: learn from the plain answer that ended last.

        When it showed its first token is not known, so this counts only while no stream has shown more. All
        the time of an answer of one token went before it; of a longer one, as much as was predicted. And all
        prompts that were sent between two of them were computed until the second one ended.
        """
        if self.last_plain is None:
            return
        attempt, usage, at = self.last_plain
        self.last_plain = None
        if self.rates.followed:
            return
        since, before = self._plain_mark
        if attempt.opened_at > since and at - since >= PLAIN_SPAN_S:
            computed = self.backlog.computed_tokens
            self.rates.did(computed - before, at - since)
            self._plain_mark = attempt.opened_at, computed
        if usage is None:
            return
        ttft_s, took_s = attempt.job.ttft_s, at - attempt.opened_at
        if usage.answer_tokens > 1:
            if ttft_s < PREFILL_MOST * took_s:
                self.streamed(usage.answer_tokens - 1, took_s - ttft_s, attempt.beside)
        elif took_s > 0.0:
            self.rates.plain_tokens_s.learn(self.rates.prefill_tokens_s.value * ttft_s / took_s)

    def used(self, ask: Ask, job: Job, usage: Usage) -> None:
        """An answer has reported its usage."""
        if (found := usage.cached_tokens) is not None and job.record:
            expected = job.cached_blocks * BLOCK_BYTES / self.rates.bytes_per_token.value
            self.prefixes.correct(expected, float(found))
        self.rates.used(ask.prompt_bytes, usage.prompt_tokens)

    def computed(self, ask: Ask, usage: Usage, since: float, until: float) -> None:
        """The prompt of an answer was computed between these times."""
        if self.known is not None and ask.prompt_bytes:
            length = ask.prompt_bytes / BLOCK_BYTES
            self.known.note(
                Computed(ask.blocks, length, usage.prompt_tokens, usage.cached_tokens, since, until)
            )

    def follow(self, known: KnownPrefixes | None) -> None:
        """Its KV events are followed from now on; None: no more."""
        self.known = known
        self.cache = self.prefixes if known is None else known

    def on_up(self) -> None:
        """The unit has come back: measurements from before do not count."""
        self.errors = Errors()
        self.rates.reset()

    def is_too_slow(self, ask: Ask, ttft_s: float, now: float) -> bool:
        """Whether a first token so many seconds from now would miss the ask's deadline.

        Never before the rate was measured.
        """
        return self.is_sure() and ttft_s > MISS * (ask.deadline_at - now)

    def forget(self) -> None:
        """The unit has restarted."""
        self.prefixes.purge()
        if self.known is not None:
            self.known.forget()
        self.rates.reset()
        self.slots.reset()
        self.backlog.forget_peak()
        self.kv_tokens = 0

    def line(self, reported: RemoteLoad | None, now: float) -> Line:
        """What the unit has to compute, as `reported` has it of other gates."""
        tokens_s = self.rates.prefill_tokens_s.reckoned
        own = self.backlog.backlog_tokens(now, tokens_s)
        return Line(own / tokens_s, reported.uncached_tokens / tokens_s if reported is not None else 0.0)

    def learn_facts(
        self, load: Load | None, reported: RemoteLoad | None, others_s: float, far_s: float, now: float
    ) -> None:
        """Take down what a forecast is made from; other gates' prompts there will take `others_s`."""
        decoding = self.other_gates.hear(_others_decoding(load, reported, others_s), now)
        tokens = others_s * self.rates.prefill_tokens_s.reckoned
        self.facts = Facts(
            self.rates,
            _report(load, decoding, tokens, self.backlog.queued, now),
            self.errors.excess(now),
            far_s,
            self.kv_tokens,
            self.backlog.written_tokens(now),
            self.slots.limit,
        )


class Usage(NamedTuple):
    """The token usage of an answer. `cached_tokens` is None if the engine does not report it."""

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None = None


class CostEstimate(NamedTuple):
    """The cost of an ask on a unit: the terms (see Cost), and what they were computed from."""

    terms: Terms
    prompt_tokens: float
    cached_tokens: float


class Attempted(Hashable, Protocol):
    """An attempt on a unit, the key of its job: a lease. `committed`: it has sent something; `beside` is
    there once it is closed.
    """

    ask: Ask
    job: Job
    committed: bool
    opened_at: float
    beside: Concurrency


def tokens_there(attempts: Iterable[Attempted], until: float, shown: Attempted | None = None) -> int:
    """The tokens of all prompts that came until then and have shown nothing, and of the one just shown."""
    there = [each for each in attempts if each is shown or not (each.committed or each.opened_at > until)]
    # Plain ones that came earlier may have been computed before.
    first_at = min((each.opened_at for each in there if each.ask.stream), default=inf)
    return sum(each.job.uncached_tokens for each in there if each.opened_at >= first_at)


def _foreign(load: Load | None) -> int:
    """Requests of others that the engine reports; one may be a canary."""
    return max(load.foreign - 1, 0) if load is not None else 0


def _others_decoding(load: Load | None, reported: RemoteLoad | None, others_s: float) -> float | None:
    """What other gates tell, and requests past all gates. Prompts to be computed count as such."""
    if reported is None:
        return float(_foreign(load)) if others_s else None
    return float(max(_foreign(load), reported.in_flight) - reported.prefilling)


def _report(
    load: Load | None, decoding: float | None, tokens: float, queued: int, now: float
) -> OtherLoad | None:
    """Other people's requests at an engine. What other gates tell counts where they do: it is fresher than
    what the engine says, and in tokens.
    """
    if decoding is not None:
        return OtherLoad(0.0, decoding, load.kv_use if load is not None else 0.0, 0.0, tokens)
    if load is None:
        return None
    foreign = _foreign(load)
    waiting = min(max(load.waiting - queued, 0), foreign)
    return OtherLoad(float(waiting), float(foreign - waiting), load.kv_use, now - load.at)


# What other gates have at units. Pure.
#
# What they tell is 0.25 s old on average, and all gates act on it at once, unseen by each other. If the last
# word counted, all would choose the unit that was idle, and where requests are short it no longer is.
#
# Of prompts to be computed, their next ones count as well: meanwhile units compute, and as much work comes
# again, to where the least is left, as water fills a vessel from its bottom. So units that were idle look
# alike, and those with a long line stay apart. (Dahlin, Interpreting Stale Load Information, 1999.)
#
# Of sequences being decoded the mean counts. It keeps what lasts: a fast unit has more than a slow one.


MODEL_UNSEEN_S = 0.5
"""What others send within this time is not known: what they tell is up to a heartbeat old, and used until the
next. From 0.4 to 0.8 s it makes no difference (docs/evidence/gym.md).
"""
MEAN_S = 5.0
"""The mean follows within about this time. Chosen in the gym (docs/evidence/gym.md)."""
_NO_SHARE = 0.05
"""So few sequences on average are none."""


class RemoteLoad(NamedTuple):
    """What other gates report of a unit: attempts, those of them whose prompts are to be computed, and the
    tokens of these; and the worst that one of them has seen: the recent share of attempts that failed, how
    much slower than its cell it is, and the usual gap between its tokens (0: unknown); `drained`: an operator
    has drained it at one of them. Its fields are those of a report (extras/redis/reports.py).
    """

    in_flight: int = 0
    prefilling: int = 0
    uncached_tokens: int = 0
    errors: float = 0.0
    degraded: float = 0.0
    itl_s: float = 0.0
    drained: bool = False

    def changed(self, old: RemoteLoad, new: RemoteLoad) -> RemoteLoad | None:
        """The same, where one gate reports `new` and no more `old`. None: it had the worst, which has to be
        found anew.
        """
        found = [known - was + now for known, was, now in zip(self[:SUMMED], old, new, strict=False)]
        if old[SUMMED:] == new[SUMMED:]:
            return _new(RemoteLoad, (*found, *self[SUMMED:]))
        for known, was, now in zip(self[SUMMED:], old[SUMMED:], new[SUMMED:], strict=True):
            if now < was == known:
                return None
            found.append(known if known >= now else now)
        return _new(RemoteLoad, found)


SUMMED = 3
"""So many of its first fields add up; of the others the worst counts."""
NO_REMOTE_LOAD = RemoteLoad()


class Line(NamedTuple):
    """Seconds that a unit needs for prompts: this gate's, and those that others told of."""

    own_s: float
    reported_s: float


def expected_s(lines: Sequence[Line]) -> list[float]:
    """Seconds of others' prompts at each unit, where all these serve the same requests."""
    reported_s = sum(line.reported_s for line in lines)
    if not reported_s:
        return [0.0] * len(lines)
    there = [line.own_s + line.reported_s for line in lines]
    computed = [min(each, MODEL_UNSEEN_S) for each in there]
    left = [each - gone for each, gone in zip(there, computed, strict=True)]
    level = _level(left, sum(computed) * reported_s / sum(there))
    return [
        max(line.reported_s - gone, 0.0) + max(level - rest, 0.0)
        for line, gone, rest in zip(lines, computed, left, strict=True)
    ]


class OtherGates:
    """Sequences of others that one unit decodes."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._received_at: float | None = None

    def hear(self, reported: float | None, now: float) -> float | None:
        """The mean, with what is told now; None: they have had nothing there for a while.

        `reported` is None while they tell of nothing.
        """
        if reported is None:
            if self._mean < _NO_SHARE:
                self._received_at = None
                return None
            reported = 0.0
        share = 1.0 if self._received_at is None else 1.0 - exp((self._received_at - now) / MEAN_S)
        self._received_at = now
        self._mean += share * (reported - self._mean)
        return self._mean


def _level(bottom: Sequence[float], amount: float) -> float:
    """How high so much fills a vessel of which each part has the same width and a bottom of its own."""
    level = below = 0.0
    for count, height in enumerate(sorted(bottom), 1):
        if height * (count - 1) - below >= amount:
            break
        below += height
        level = (amount + below) / count
    return level
