"""The state of one unit on the Board, and of each attempt on it. What follows from it is decided elsewhere.

A lease is the right to spend one attempt on one unit. It closes exactly once, when the stream ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from cellgate.router import panic
from cellgate.router.adapters import Adapters
from cellgate.router.backlog import Beside, Job, Prefilled
from cellgate.router.cost import Expected
from cellgate.router.cost_model import CostModel
from cellgate.router.engine_nouns import UNKNOWN_BUILD, Urgency
from cellgate.router.in_rotation import InRotation
from cellgate.router.known_answers import ANSWER_FAULT, AnswerRecord
from cellgate.router.node_nouns import AGENT, UnitFacts
from cellgate.router.nouns import Ask, Case, Cell, Evidence, Load, ModelCards, Rules, Unit, Use
from cellgate.router.outliers import Outlier, Speed
from cellgate.router.ranks import Ranks
from cellgate.router.split_nouns import SplitPlan
from cellgate.router.step_times import LARGE_TOKENS, WAIT_LEAST_S, StepTimes

FULL_S = 1.0
"""How long a unit gets no requests after it has refused the only one it had."""
LIMIT_GROWTH = 1.025
ERRORS_TOGETHER_S = 1.0
"""Errors this close together, without progress between them, mean an engine that answers only errors."""
BUSY_S = 10.0
"""How long a 503 is remembered: a later report of the engine shows whether it was really busy."""
SLOW_START_LEAST = 0.1
STALLS_KEPT = 256
PREFILLING_MOST = 0.25
"""The gaps of a unit that computes prompts for a larger part of the time are not used as its speed."""
SPEED_BATCH = 0.1
"""The speed of a unit with fewer requests on average is not compared."""
SHORTEST_STALL_S = 0.25
"""Shorter stalls are not recorded."""


class UnitState(InRotation):
    """What the Board keeps of one unit.

    `life_at` is when the unit last made progress, `heard_at` when anything of it last answered, `work_at`
    since when it has had requests without a break, `counters_at` when its engine's counters were last read
    (0: never), `stall_reported_at` when a stall was last reported as evidence, `cleared_at` when a canary
    last cleared it of one. `is_alone`: no other unit of its pool is in rotation. `seats_shown` is the most
    requests beside which a canary was answered. `fell_unseen`: it last went DOWN because of a time-out of
    ours, and nothing else spoke against it. `occupied_until`: a probe of the gate keeps it busy until then at
    most. While `peer_canary_at` is not before the last progress, another gate sends the
    next canary.
    `last_evidence` is the last evidence of each (node, source), `stalls` are the last stalls (since,
    seconds), `learnt_limit` is how many requests its engine takes, known from refusals, `prefilling` the
    recent share of time in which it had prompts to compute. `hold`: it stands still on purpose, or has yet to
    show work after that; `held_until` is when the last hold ended, `can_hold`: its engine says whether it
    stands still, `is_hold_spent`: it has said so for longer than it is believed (see hold.py). `build` is
    what its engine says that it is, `other_builds` are units of its cell and model that say something else,
    `answers` what it answered to the known prompt, `urgency` is how soon it is to be asked again.
    `asks_next`: the kind of request that the next canary is to be.
    `cards` are what it says of its models,
    `facts` what the agents of its nodes report. `moves_blocks`: units of its cell pass KV blocks to each
    other; `meets`: both of a pair get a request at the same time; `needs_prefiller`: then its engine computes
    no prompt at all.
    """

    __slots__ = (
        "adapters",
        "answers",
        "asks_next",
        "batch",
        "build",
        "busy_at",
        "can_hold",
        "cards",
        "cleared_at",
        "cool_until",
        "costs",
        "counters_at",
        "engine",
        "facts",
        "far_s",
        "fell_unseen",
        "foreign",
        "full_until",
        "gaps_ms",
        "heard_at",
        "held_until",
        "is_alone",
        "is_hold_spent",
        "last_error_at",
        "last_evidence",
        "last_lease_at",
        "learnt_limit",
        "leases",
        "life_at",
        "limit",
        "load",
        "meets",
        "moves_blocks",
        "needs_prefiller",
        "occupied_until",
        "other_builds",
        "outlier",
        "peer_canary_at",
        "prefilling",
        "ranks",
        "seats_shown",
        "stall_reported_at",
        "stalls",
        "step_times",
        "unit",
        "urgency",
        "weight",
        "work_at",
    )

    def __init__(self, unit: Unit, cell: Cell, case: Case) -> None:
        super().__init__(case, frozenset(unit.models))
        self.learnt_limit = inf
        self.apply(unit, cell)
        self.adapters = Adapters()
        self.cards: ModelCards = {}
        self.ranks = Ranks()
        self.engine = unit.engine
        self.build = UNKNOWN_BUILD
        self.other_builds: tuple[str, ...] = ()
        self.answers: AnswerRecord | None = None
        self.asks_next: Use | None = None
        self.urgency = Urgency.ROUTINE
        self.facts = UnitFacts()
        self.load: Load | None = None
        self.foreign = 0
        self.cool_until = 0.0
        self.life_at = 0.0
        self.heard_at = 0.0
        self.work_at = 0.0
        self.counters_at = 0.0
        self.last_error_at = 0.0
        self.stall_reported_at = 0.0
        self.peer_canary_at = -1.0
        self.last_lease_at = 0.0
        self.cleared_at = -inf
        self.stalls: deque[tuple[float, float]] = deque(maxlen=STALLS_KEPT)
        self.batch = 0.0
        self.prefilling = 0.0
        self.busy_at = -BUSY_S
        self.outlier = Outlier()
        # A dict for its order: evictions happen in the order the leases were opened.
        self.leases: dict[Lease, None] = {}
        self.step_times = StepTimes()
        self.costs = CostModel(self.step_times.rates, unit)
        # The same list, a step nearer for the byte path.
        self.gaps_ms = self.step_times.gaps_ms
        self.last_evidence: dict[tuple[str | None, str], Evidence] = {}
        self.full_until = 0.0
        self.held_until = 0.0
        self.can_hold = self.is_hold_spent = False
        self.is_alone = self.fell_unseen = False
        self.seats_shown = 0
        self.occupied_until = 0.0

    def apply(self, unit: Unit, cell: Cell) -> None:
        """Apply the configuration of the unit and of its cell."""
        self.unit = unit
        self.weight = unit.weight * cell.weight
        self.far_s = cell.spill_s
        self.moves_blocks = cell.transfer != "none"
        self.meets = cell.transfer == "sglang"
        self.needs_prefiller = self.meets and unit.role == "decode"
        self.limit = min(self.learnt_limit, unit.max_in_flight)

    @property
    def in_flight(self) -> int:
        """Open leases on this unit."""
        return len(self.leases)

    @property
    def quiet_since(self) -> float:
        """Since when it has had requests without progress."""
        return max(self.life_at, self.work_at)

    def gives_blocks(self) -> bool:
        """Whether it computes prompts for others. An engine of SGLang does nothing else, or does not at
        all.
        """
        role = self.unit.role
        return self.moves_blocks and (role == "prefill" if self.meets else role != "decode")

    def takes_blocks(self) -> bool:
        """Whether it answers requests whose prompt another unit has computed."""
        return self.moves_blocks and (self.needs_prefiller or not self.meets)

    def is_halted(self) -> bool:
        """True while an agent says that a process of the unit has ended or is stopped."""
        return any(source == AGENT for _, source in self.case.faults)

    def serves(self, ask: Ask) -> bool:
        """Whether it serves the model of `ask`, and is the unit and the build that `ask` is bound to."""
        if ask.unit is not None and ask.unit != self.unit.name:
            return False
        if ask.build is not None and ask.build != self.build.key:
            return False
        return self.serves_model(ask.model)

    def base_models(self) -> frozenset[str]:
        """The models that it serves, without adapters."""
        return self.models.difference(self.adapters.bases)

    def is_out_for_answers(self) -> bool:
        """True when its answers to the known prompt were proven wrong, until one is right."""
        return ANSWER_FAULT in self.case.faults

    def has_odd_answers(self) -> bool:
        """True while its answers to the known prompt differ from those of others, or from its own."""
        return self.is_out_for_answers() or (self.answers is not None and self.answers.is_confirmed)

    def is_restart_suspected(self) -> bool:
        """True when a restart is suspected and the unit has made no progress since."""
        return self.restart_suspected_at >= self.life_at

    def is_unreachable(self, now: float) -> bool:
        """True when neither its leader nor any other node answers."""
        return panic.is_unreachable(max(self.heard_at, self.life_at), now)

    @property
    def steady_weight(self) -> float:
        """The unit's weight: less while it is degraded."""
        return self.weight * (1.0 - self.outlier.degraded)

    def ramp(self, now: float, rules: Rules) -> float:
        """The share of requests for which it is a candidate: less than all in slow start."""
        risen_s = now - self.risen_at
        return max(SLOW_START_LEAST, risen_s / rules.slow_start_s) if risen_s < rules.slow_start_s else 1.0

    def share(self, now: float, rules: Rules) -> float:
        """Its present share by weight: less while it is degraded or in slow start."""
        return self.steady_weight * self.ramp(now, rules)

    def record_large_prompt(self, tokens: int, sent_at: float) -> None:
        """A large prompt, sent at `sent_at`, was computed: record how long the engine's counters did not
        move.
        """
        if self.counters_at:
            ended = (still_s for since, still_s in self.stalls if since + still_s >= sent_at)
            self.step_times.record_stall(tokens, max(ended, default=0.0))

    def record_wait(self, done: Prefilled, sent_at: float, now: float) -> None:
        """A prompt, sent at `sent_at`, was computed, which took a while: record for how long nothing moved.

        Where steps are counted that is what a prompt like it may do again. Elsewhere it may have been
        computed beside streams that went on, and may do the same alone: then the whole wait counts, but not
        that for others to end.
        """
        ended = (still_s for since, still_s in self.stalls if since + still_s >= sent_at)
        wait_s = max(now - max(self.quiet_since, sent_at), max(ended, default=0.0))
        if not self.counters_at and done.had_seat:
            wait_s = max(wait_s, done.span_s)
        is_whole = done.had_seat or self.counters_at > 0.0
        self.step_times.waited(done.tokens, wait_s, is_whole=is_whole)

    def show_plain(self, now: float) -> None:
        """Count the prompts of plain answers as computed when they are due, because that is not visible."""
        for lease in self.leases:
            if not (lease.ask.stream or lease.committed) and now >= lease.opened_at + lease.job.ttft_s:
                self.costs.expect_shown(lease, now)

    def lower_limit(self, now: float) -> None:
        """The engine has refused a request as full: lower the limit to its present requests."""
        self.learnt_limit = self.limit = float(max(1, len(self.leases)))
        if not self.leases:
            self.full_until = now + FULL_S

    def raise_limit(self) -> None:
        """A tick has passed: raise the limit a little, up to the configured one."""
        if self.learnt_limit < self.unit.max_in_flight:
            self.learnt_limit = self.learnt_limit * LIMIT_GROWTH + 0.25
            self.limit = min(self.learnt_limit, self.unit.max_in_flight)

    def has_room(self, now: float, overcommit: float) -> bool:
        """Whether the limits allow one more request."""
        return len(self.leases) < self.limit * (1.0 + overcommit) and now >= self.full_until

    def record_stall(self, still_s: float) -> None:
        """Record a stall."""
        since = self.quiet_since
        if self.stalls and self.stalls[-1][0] == since:
            self.stalls.pop()
        self.stalls.append((since, still_s))

    def longest_stall_s(self) -> float:
        """The longest recent stall that ended by itself, in ticks, plus one."""
        since = self.quiet_since
        return max((still_s for at, still_s in self.stalls if at != since), default=0.0) + SHORTEST_STALL_S

    def has_only_errors(self, now: float) -> bool:
        """Record an error of the unit; True when the last thing it did, a moment ago, was another one.

        Its engine may have just died, and then it answers only errors.
        """
        again = self.last_error_at > self.life_at and now - self.last_error_at < ERRORS_TOGETHER_S
        self.last_error_at = now
        return again

    def is_falsely_busy(self, now: float) -> bool:
        """Record a 503 of the unit; True when its engine has reported itself as idle since the previous
        one.
        """
        if now - self.busy_at > BUSY_S:
            self.busy_at = now
            return False
        load = self.load
        is_idle = load is not None and load.at > self.busy_at and load.running + load.waiting == 0
        return is_idle and len(self.leases) <= 1

    def still_open(self, since: float) -> int:
        """How many requests were there at `since`, and occupy the engine still."""
        return sum(
            lease.opened_at < since and not lease.paused and (lease.ask.stream or not lease.committed)
            for lease in self.leases
        )

    def shows_work(self) -> bool:
        """Whether a stream of this gate would make progress if the unit worked."""
        return any(lease.committed and lease.ask.stream and not lease.paused for lease in self.leases)

    def speed(self) -> Speed | None:
        """Its speed for a comparison; None with too few recent tokens."""
        # Counting the gaps takes a tenth of a millisecond, and there are many idle units.
        if self.batch < SPEED_BATCH or not self.is_usable() or self.prefilling > PREFILLING_MOST:
            return None
        if (gap_s := self.step_times.gap_s(0.5)) is None:
            return None
        return Speed(gap_s, self.batch, self.load.kv_use if self.load is not None else 0.0, self.weight)

    def __repr__(self) -> str:
        return f"<UnitState {self.unit.name} {self.case.verdict.value} in_flight={self.in_flight}>"


class Usable(NamedTuple):
    """Units that are in rotation, for requests of one model. `is_sure`: no restart of any is suspected;
    `steady_at`: from when on none of them goes behind the others, but for errors.
    """

    states: Mapping[str, UnitState]
    is_sure: bool
    steady_at: float


class Lease:
    """One attempt on one unit, held from the pick until the stream has ended.

    `build` is that of the unit when it was opened; `evicted` is set when the unit went DOWN; `on_evict` is
    called once at that moment. `first_at` is when something was first sent to the client; `paused` while the
    client reads nothing; `job` is its work at the unit, with the prediction; `rank` the data parallel rank it
    is sent to (-1: the engine chooses); `beside` are the jobs while it was decoded, once it is closed;
    `lines` are header lines for the client: an explanation, if the request wants one, and its limits; `split`
    names the unit that is to compute the prompt for this one.
    """

    __slots__ = (
        "ask",
        "beside",
        "build",
        "closed",
        "committed",
        "evicted",
        "first_at",
        "job",
        "lines",
        "on_evict",
        "opened_at",
        "paused",
        "rank",
        "rank_record",
        "retry",
        "split",
        "unit",
        "unit_state",
        "was_paused",
    )

    beside: Beside
    # From `Ranks.open` on.
    rank_record: int

    def __init__(
        self, state: UnitState, ask: Ask, expected: Expected, held: int, now: float, retry: bool
    ) -> None:
        self.unit_state = state
        self.unit = state.unit.name
        self.build = state.build
        self.ask = ask
        self.job: Job = state.costs.add(self, ask, expected, held, now)
        self.opened_at = now
        self.rank = -1
        self.retry = retry
        self.committed = False
        self.evicted = False
        self.closed = False
        self.lines = b""
        self.paused = False
        self.was_paused = False
        self.first_at = 0.0
        self.split: SplitPlan | None = None
        self.on_evict: Callable[[], None] | None = None

    def commit(self, now: float) -> None:
        """The unit has sent its first token (or the head of a plain body)."""
        self.committed = True
        self.first_at = now
        if self.rank >= 0:
            self.unit_state.ranks.show(self)
        # A plain answer arrives when all of it is computed, which says little about its prompt.
        tells = self.ask.stream and not self.was_paused
        done = self.unit_state.costs.show(self, now, tells)
        if done is not None:
            self.unit_state.step_times.prefilled(done)
            if done.span_s > WAIT_LEAST_S:
                self.unit_state.record_wait(done, self.opened_at, now)
            if done.tokens >= LARGE_TOKENS:
                self.unit_state.record_large_prompt(done.tokens, self.opened_at)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "evicted" if self.evicted else "open"
        return f"<Lease {self.unit} {state} committed={self.committed}>"
