"""The cost of an ask on a unit, by the load there: seconds that it and others wait for its going there. Pure.

    its own first token   prompts ahead and its own uncached tokens, over the prefill rate; a slot, KV cache
    its own answer        expected tokens, times a decoding step with all sequences there
    others beside it      their steps get longer by one sequence, and pause while its prompt is computed
    later requests        its place in a line for a slot; what it evicts from the prefix cache; less, for what
                          they will find there

Latency, errors, doubt and distance are added.

`cost_terms` combines what changes slowly, a few times a second and at each report; `terms` adds this gate's
present requests. Rules: a cost is positive and finite; more work never makes it less; a unit without reports
counts as neither idle nor lost, but like its peers, and a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from cellgate.router.backlog import Backlog
from cellgate.router.learning import FIRST_ANSWER_TOKENS, Rates
from cellgate.router.nouns import Load

KV_MAX_S = 60.0
"""The longest predicted wait for KV cache: for an ask that does not fit at all."""

LINE = 9.0
"""What a second in line for a slot costs those who come later. Without it long answers, which a faster unit
saves seconds of, would fill its slots, and all would wait for their first tokens. From 4 to 19 it makes
little difference.
"""

MORE = 0.125
"""Others may have more sequences by this share: their number is a mean, and old. Without it several gates
fill a fast unit beyond its slots.
"""

LONG_DECODE = 4.0
"""A plain answer whose decoding takes this many times as long as its prompt counts as decoded at once, while
the prefill rate is a guess: its end tells how it was decoded, and nothing of its prompt, and a queue of such
would be larger than all that is known of the unit. 2 is too few where prompts are long.
"""

_COST_TOKENS_MAX = 1e9


PREFILL_BESIDE = 0.3
"""What a second of prefill costs each sequence that is decoded meanwhile. Less than a second, because waiting
for a first token is worse than a pause in an answer.
"""
NEW_EVICT_SHARE = 0.5
"""Tokens new to a prefix cache evict as many, a share of which must be computed again: this share if the
recent writes are those of the unit's peers, less if there were fewer. Without it, a unit that holds a common
prefix gets all conversations, and other caches stay unused.
"""
WRITTEN_MOST = 2.0
"""But no more than of so many times the writes of its peers: after a quiet time nobody has written much."""
REPORT_HALF_LIFE_S = 2.0
"""At this age a report counts half, and the median of the unit's peers the other half."""
COST_UNKNOWN_S, REPORT_FRESH_S = 0.02, 4.0
"""The first is added for a unit whose report is too old to count; nothing up to the second, because idle
units are probed every 3 s.
"""
COST_ERROR_S, COST_ERROR_MAX_S = 5.0, 60.0
"""COST_ERROR_S * p / (1 - p) is added for a share p of failures, and no more than the second."""
FOREIGN_TOKENS = 1000.0
"""The uncached prompt of another client's request, if the engine does not report it."""
LEAST_SEQUENCE_SHARE = 0.002
"""Each more sequence makes a step longer by at least this share, so that idle units are preferred even if
batching costs nothing.
"""


class OtherLoad(NamedTuple):
    """An engine's report apart from this gate's requests: requests of others, and its KV cache in use.

    `waiting_tokens` is None where the engine counts requests only. `kv_use` is a share, 0 to 1.
    """

    waiting: float
    running: float
    kv_use: float
    age_s: float
    waiting_tokens: float | None = None


class Facts(NamedTuple):
    """The state of a unit apart from this gate's own work there.

    `error_share` is 0 to 1, `far_s` what being in another cell costs, `kv_tokens` the size of its KV cache
    (0: unknown), `written_tokens` as Work has it.
    """

    rates: Rates
    report: OtherLoad | None = None
    error_share: float = 0.0
    far_s: float = 0.0
    kv_tokens: int = 0
    written_tokens: float = 0.0
    slots: float = inf


class Expected(NamedTuple):
    """What is expected of an ask at any unit.

    `answer_tokens` is how long its answer will be. Of the first `shared_blocks` of its prompt, which some
    unit holds, those that a unit lacks are charged at `charged` (0 to 1) of their price: others will find
    them there.
    """

    answer_tokens: float = FIRST_ANSWER_TOKENS
    shared_blocks: int = 0
    charged: float = 1.0

    def spared_blocks(self, held: int) -> float:
        """How many blocks of the prompt are not charged where so many are held."""
        return max(self.shared_blocks - held, 0) * (1.0 - self.charged)


class CostTerms(NamedTuple):
    """The side of a cost that changes slowly. `token_s`, `step_s` and `sequence_s` are seconds for each
    uncached token, decoding step, and sequence in it; `tokens_s` is its prefill rate;
    `slowdown_of_others_s` is what an uncached token costs each sequence there.
    """

    tokens_s: float
    token_s: float
    step_s: float
    sequence_s: float
    slowdown_of_others_s: float
    slots: float
    foreign_tokens: float
    foreign_batch: float
    kv_tokens: int
    kv_reported: float
    evict_share: float
    error_s: float
    unknown_s: float
    far_s: float
    latency_s: float


class FixedCost(NamedTuple):
    """What of a forecast a total needs, with all that is of others added up.

    `fixed_s` is what depends on neither ask nor work, of which `ahead_s` comes before the first token;
    `step_s` is for each token of the answer, and `sequence_s` for each of them and sequence of ours there;
    `uncached_s` is for each uncached token of the ask, and `slowdown_of_others_s` for each of them and
    sequence of ours there; `kv_room` are the tokens of KV cache that others leave for prompts and answers,
    `slot_room` the sequences of ours beyond which one
    waits (both infinite where not known); `byte_tokens` are those of a byte of prompt, `sure_tokens_s` is
    `tokens_s`, or infinite while that is a guess, `hidden_tokens` are computed while the latency of a prompt
    behind them lasts. `long_answer` is how many tokens a long plain answer has for each uncached one of its
    prompt (see LONG_DECODE); infinite where the prefill rate is known.
    """

    tokens_s: float
    token_s: float
    fixed_s: float
    step_s: float
    sequence_s: float
    uncached_s: float
    slowdown_of_others_s: float
    kv_room: float
    slot_room: float
    byte_tokens: float
    sure_tokens_s: float
    hidden_tokens: float
    ahead_s: float
    foreign_batch: float
    long_answer: float


class Cost(NamedTuple):
    """Predicted seconds, term by term; `total_s` is their sum, and what policies compare.

    `shared_s` is what is not charged (see Expected), and so never above 0.
    """

    total_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    slowdown_of_others_s: float
    kv_s: float
    slot_s: float
    queue_penalty_s: float
    eviction_s: float
    shared_s: float
    error_s: float
    unknown_s: float
    far_s: float
    latency_s: float

    @property
    def ttft_s(self) -> float:
        """When the first token is due, as far as work and latency go."""
        return self.queue_s + self.prefill_s + self.kv_s + self.slot_s + self.latency_s


Terms = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float, float
]

_IDLE = OtherLoad(waiting=0.0, running=0.0, kv_use=0.0, age_s=0.0)


class Usual(NamedTuple):
    """What is usual of the units of a fleet. `written` is the mean of recent writes into their prefix caches,
    relative to the sizes of these if all are known (`is_sized`).
    """

    report: OtherLoad
    is_sized: bool
    written: float


def usual_of(units: Sequence[Facts]) -> Usual:
    reports = [facts.report for facts in units if facts.report is not None]
    fresh = [report for report in reports if report.age_s <= REPORT_HALF_LIFE_S]
    is_sized = all(facts.kv_tokens for facts in units)
    written = sum(written_part(facts, is_sized=is_sized) for facts in units)
    return Usual(_usual(fresh or reports or [_IDLE]), is_sized, written / max(len(units), 1))


def cost_terms(units: Sequence[Facts], usual: Usual | None = None) -> list[CostTerms]:
    """The forecasts of units that stand in for each other; `usual`: of their fleet, if it has more."""
    usual = usual or usual_of(units)
    others = _waiting_tokens(usual.report)
    return [_terms_of(facts, usual.report, others, evict_share(facts, usual)) for facts in units]


def terms(
    unit: CostTerms,
    work: Backlog,
    prompt_tokens: float,
    cached_tokens: float,
    spared_tokens: float,
    answer_tokens: float,
    now: float,
) -> Terms:
    """The fields of a Cost as a bare tuple, total first, for a prompt of which `cached_tokens` are in the
    unit's prefix cache and `spared_tokens` of the others are not charged, with an answer of so many tokens.
    """
    # The last token is always computed: it gives the first one of the answer.
    uncached, there = max(prompt_tokens - cached_tokens, 1.0), work.batch + unit.foreign_batch
    charged = max(uncached - spared_tokens, 0.0)
    backlog = work.backlog_tokens(now, unit.tokens_s, unit.latency_s) + unit.foreign_tokens
    prefill_s, step_s = uncached * unit.token_s, unit.step_s + unit.sequence_s * (there + 1.0)
    slowdown_of_others_s = there * (answer_tokens * unit.sequence_s + charged * unit.slowdown_of_others_s)
    kv_s = 0.0
    needed = prompt_tokens + answer_tokens
    # Usually there is room even if the engine's count does not include this gate's requests.
    if unit.kv_tokens and work.kv_tokens + unit.kv_reported + needed > unit.kv_tokens:
        kv_s = _kv_s(unit, work, needed, answer_tokens * step_s)
    slot_s = _slot_s(unit, there + MORE * unit.foreign_batch, answer_tokens)
    some = (
        backlog * unit.token_s,
        prefill_s,
        answer_tokens * step_s,
        slowdown_of_others_s,
        kv_s,
        slot_s,
        _queue_penalty_s(slot_s, cached_tokens * unit.token_s, answer_tokens * step_s) if slot_s else 0.0,
        charged * unit.token_s * unit.evict_share,
        (charged - uncached) * unit.token_s,
        unit.error_s,
        unit.unknown_s,
        unit.far_s,
        unit.latency_s,
    )
    return sum(some), *some


def price(unit: CostTerms, rates: Rates, *, is_sure: bool) -> FixedCost:
    """The side of totals that changes slowly. `is_sure`: the prefill rate is no guess."""
    ahead_s, foreign = unit.foreign_tokens * unit.token_s + unit.latency_s, unit.foreign_batch
    # It adds one sequence for itself and for each of the others.
    step_s = unit.step_s + unit.sequence_s * (2.0 * foreign + 1.0)
    return FixedCost(
        unit.tokens_s,
        unit.token_s,
        ahead_s + unit.error_s + unit.unknown_s + unit.far_s,
        step_s,
        2.0 * unit.sequence_s,
        unit.token_s * (1.0 + unit.evict_share) + unit.slowdown_of_others_s * foreign,
        unit.slowdown_of_others_s,
        unit.kv_tokens - unit.kv_reported if unit.kv_tokens else inf,
        unit.slots - (1.0 + MORE) * foreign,
        1.0 / rates.bytes_per_token.value,
        unit.tokens_s if is_sure else inf,
        unit.tokens_s * unit.latency_s,
        ahead_s,
        foreign,
        inf if is_sure else LONG_DECODE * unit.token_s / step_s,
    )


def _usual(reports: Sequence[OtherLoad]) -> OtherLoad:
    """The median of units."""
    return OtherLoad(
        waiting=median([report.waiting for report in reports]),
        running=median([report.running for report in reports]),
        kv_use=median([report.kv_use for report in reports]),
        age_s=0.0,
        # Nothing waits at most units, and there may be thousands.
        waiting_tokens=median(
            [
                _waiting_tokens(report) if report.waiting or report.waiting_tokens else 0.0
                for report in reports
            ]
        ),
    )


def written_part(facts: Facts, *, is_sized: bool) -> float:
    """Recent writes into a prefix cache, as a part of it if sizes are known."""
    return facts.written_tokens / (facts.kv_tokens or 1) if is_sized else facts.written_tokens


def evict_share(facts: Facts, usual: Usual) -> float:
    """By what share a token that is new to a prefix cache is dearer."""
    if usual.written <= 0.0:
        return 0.0
    times = written_part(facts, is_sized=usual.is_sized) / usual.written
    return NEW_EVICT_SHARE * min(times, WRITTEN_MOST)


def _terms_of(facts: Facts, usual: OtherLoad, others: float, evicts: float) -> CostTerms:
    """`others` are the tokens that wait at a usual unit."""
    rates, own, trust, belief = facts.rates, facts.report or usual, 0.0, 0.0
    if facts.report is not None:
        trust, late_s = _trust(own.age_s), own.age_s - REPORT_FRESH_S
        belief = _trust(late_s) if late_s > 0.0 else 1.0
    base_s, sequence_s = rates.steps.reckoned
    tokens_s = rates.prefill_tokens_s.reckoned
    tokens, errors = _waiting_tokens(own), facts.error_share
    return CostTerms(
        tokens_s=tokens_s,
        token_s=1.0 / tokens_s,
        step_s=base_s,
        sequence_s=max(sequence_s, LEAST_SEQUENCE_SHARE * base_s),
        slowdown_of_others_s=PREFILL_BESIDE / tokens_s,
        slots=facts.slots,
        foreign_tokens=_blend(trust, tokens, others),
        foreign_batch=_blend(trust, own.waiting + own.running, usual.waiting + usual.running),
        kv_tokens=facts.kv_tokens,
        kv_reported=_blend(trust, own.kv_use, usual.kv_use) * facts.kv_tokens,
        evict_share=evicts,
        error_s=min(COST_ERROR_S * errors / max(1.0 - errors, 1e-9), COST_ERROR_MAX_S),
        unknown_s=COST_UNKNOWN_S * (1.0 - belief),
        far_s=facts.far_s,
        latency_s=rates.latency.reckoned_s(tokens_s),
    )


def _kv_s(unit: CostTerms, work: Backlog, needed: float, stay_s: float) -> float:
    """How long until enough of the KV cache is free: it is freed evenly over the time of an answer."""
    if needed >= unit.kv_tokens:
        return KV_MAX_S
    used = max(work.kv_tokens, unit.kv_reported)
    missing = used + needed - unit.kv_tokens
    return min(missing * stay_s / used, KV_MAX_S) if missing > 0.0 else 0.0


def _slot_s(unit: CostTerms, there: float, answer_tokens: float) -> float:
    """How long until a decode slot is free: in the time of one answer each slot becomes free once."""
    over = there + 1.0 - unit.slots
    if over <= 0.0:
        return 0.0
    return over * answer_tokens * (unit.step_s + unit.sequence_s * unit.slots) / unit.slots


def _queue_penalty_s(slot_s: float, saved_s: float, decode_s: float) -> float:
    """What a place in line costs those who come later. Who waits there no longer than the cached part of its
    prompt would be computed takes nothing from them; and nobody takes more than its answer: where every unit
    has a long line, the lines themselves decide, and the caches.
    """
    return min(LINE * max(slot_s - saved_s, 0.0), decode_s)


def _trust(age_s: float) -> float:
    """How much a report counts: 1 when it is new, half of it a half-life later."""
    return float(0.5 ** (max(age_s, 0.0) / REPORT_HALF_LIFE_S))


def _waiting_tokens(report: OtherLoad) -> float:
    tokens = report.waiting_tokens
    return min(report.waiting * FOREIGN_TOKENS if tokens is None else tokens, _COST_TOKENS_MAX)


def _blend(trust: float, own: float, others: float) -> float:
    return trust * own + (1.0 - trust) * others


# The number of decode slots of an engine (vLLM's `--max-num-seqs`), measured from its reports. Pure.
#
# An engine at that limit has requests that wait, and as many that run in one report as in the next, and never
# had more. While its KV cache is full it looks alike, but what fits there changes with every request.
# It looks alike by chance, too, where streams are long and somebody waits for the next step. Who believes in
# such a limit sends the unit no more than that, and never learns better: so what another unit of the same
# build has run at once counts for more.


KV_FULL_COSTS = 0.95
"""With so large a share in use, requests may wait for KV cache."""
AGAINST_PEERS = 8
"""So many reports in a row show a limit that is less than what others of the same build have run at once."""


class Slots:
    """The limit of one engine; infinite until it was met."""

    __slots__ = ("_in_a_row", "_is_proven", "_progress", "_running", "limit", "most")

    def __init__(self) -> None:
        self.limit = inf
        self.most = self._running = self._in_a_row = 0
        self._is_proven = False
        self._progress: float | None = None

    def learn(self, load: Load, among: int = 0) -> None:
        """Take over a report. `among`: the most that a unit of the same build has run at once."""
        if load.running > self.limit:
            self.limit, self._is_proven = inf, False
        self.most = max(self.most, load.running)
        if not load.waiting or load.kv_use >= KV_FULL_COSTS:
            self._running = self._in_a_row = 0
        elif load.progress is None or load.progress != self._progress:
            # Else it is the same step still: who waits could not begin.
            is_again = load.running == self._running == self.most > 0
            self._in_a_row = self._in_a_row + 1 if is_again else 0
            self._running = load.running
        self._progress = load.progress
        if self._in_a_row >= (AGAINST_PEERS if among > load.running else 1):
            self.limit, self._is_proven = float(load.running), among > load.running
        elif self.limit < among and not self._is_proven:
            self.limit = inf

    def reset(self) -> None:
        """The engine has restarted, maybe with another limit."""
        self.limit = inf
        self.most = self._running = self._in_a_row = 0
        self._is_proven, self._progress = False, None
