"""The state of one unit on the Board, in rotation or not, and of each attempt on it. What follows from it is
decided elsewhere.

A lease is the right to spend one attempt on one unit. It closes exactly once, when the stream ends.

In this order: `UnitState`, `_nobody`, `Ranks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from cellgate.router import outliers
from cellgate.router.adapters import Adapters
from cellgate.router.backlog import Concurrency, Job, Prefilled, Stalled, Unread
from cellgate.router.cost import CostTerms, Expected
from cellgate.router.cost_model import CostModel, tokens_there
from cellgate.router.judge import ignores_good_evidence
from cellgate.router.known_answers import ANSWER_FAULT, AnswerRecord
from cellgate.router.learning import JOINED_S, LARGE_TOKENS, WAIT_LEAST_S, StepTimes
from cellgate.router.nouns import (
    AGENT,
    UNKNOWN_BUILD,
    USABLE,
    Ask,
    Build,
    Case,
    Cell,
    Evidence,
    Hold,
    Kept,
    Load,
    ModelCards,
    RankLoad,
    Rules,
    SplitPlan,
    Unit,
    UnitFacts,
    Urgency,
    Use,
    Verdict,
)
from cellgate.router.outliers import Outlier, Speed
from cellgate.router.pauses import OVERTAKEN_MAX_S, STILL_WAITS_MAX_S, LongWaits, Pauses
from cellgate.router.prefix import PrefixCache


class InRotation:
    """The part of a unit's state that every request asks for. `on_change` is called when any of it has
    changed, `on_faults` when its faults have; `is_healthy_unchanged`: good evidence would change nothing.
    """

    def __init__(self, case: Case, models: frozenset[str]) -> None:
        self._case, self._models = case, models
        self.is_healthy_unchanged = ignores_good_evidence(case)
        self._drained = self.retired = False
        self.drained_at = self.slow_since = 0.0
        """When it was drained, and found to be slow; 0: before this process."""
        self._hold: Hold | None = None
        self._restart_suspected_at = -1.0
        self._up_since = 0.0
        self.on_change = self.on_faults = _nobody
        self.is_in = case.verdict in USABLE
        """UP or SUSPECT, not on hold and not drained."""

    def _change(self) -> None:
        self.is_in = self._case.verdict in USABLE and self._hold is None and not self._drained
        self.on_change()

    @property
    def case(self) -> Case:
        """What the judge knows of it."""
        return self._case

    @case.setter
    def case(self, case: Case) -> None:
        before, self._case = self._case, case
        self.is_healthy_unchanged = ignores_good_evidence(case)
        if case.verdict is not before.verdict:
            self._change()
        if case.faults != before.faults:
            self.on_faults()

    def extend(self, case: Case) -> None:
        """The judge knows more good evidence of a unit that was well, which changes nothing."""
        self._case = case

    @property
    def drained(self) -> bool:
        """Whether an operator has taken it out."""
        return self._drained

    @drained.setter
    def drained(self, drained: bool) -> None:
        self._drained = drained
        self._change()

    @property
    def hold(self) -> Hold | None:
        """Whether it stands still on purpose (see health.py)."""
        return self._hold

    @hold.setter
    def hold(self, hold: Hold | None) -> None:
        self._hold = hold
        self._change()

    @property
    def restart_suspected_at(self) -> float:
        """When a restart was last suspected; below 0: never, or it was not confirmed."""
        return self._restart_suspected_at

    @restart_suspected_at.setter
    def restart_suspected_at(self, at: float) -> None:
        self._restart_suspected_at = at
        self.on_change()

    @property
    def up_since(self) -> float:
        """When it last came up."""
        return self._up_since

    @up_since.setter
    def up_since(self, at: float) -> None:
        self._up_since = at
        self.on_change()

    @property
    def models(self) -> frozenset[str]:
        """The models that it serves; none: not known."""
        return self._models

    @models.setter
    def models(self, models: frozenset[str]) -> None:
        self._models = models
        self.on_change()

    def is_usable(self) -> bool:
        """True when it may get new requests: it is UP or SUSPECT, not on hold, drained or removed."""
        return self.is_in and not self.retired

    def steady_at(self, slow_start_s: float) -> float:
        """From when on no other goes before it: not while it is SUSPECT, or in slow start."""
        return self._up_since + slow_start_s if self._case.verdict is Verdict.UP else inf

    def serves_model(self, model: str | None) -> bool:
        """Whether it serves a model; one whose models are not known may serve any."""
        return model is None or not self._models or model in self._models


class UnitState(InRotation):
    """What the Board keeps of one unit."""

    # Its requests.
    leases: dict[Lease, None]
    """In the order in which they were opened: so they are evicted."""
    held_back: dict[Lease, float]
    """Those whose engine has to wait for their clients: since when; infinite: they hold no slot any more."""
    parked: int
    """How many hold none."""
    learnt_limit: float
    """How many requests its engine takes, known from refusals. `limit` has the parked ones in addition."""
    work_at: float
    """Since when it has had requests without a break."""
    progress_at: float
    """When it last made progress."""
    batch: float
    """How many requests it has had recently, on average."""
    prefilling: float
    """The share of recent time in which it had prompts to compute."""
    canary_refused: str
    """Why its refused canaries do not count; empty: they do, or are not refused."""
    waits_inside: str
    """How many requests wait inside its engine that could wait in the gate; empty: none do."""
    refusals: dict[str, tuple[str, float]]
    """Kinds of requests that it refused recently and others served: the words, and when that was found."""
    models_said: tuple[str, float]
    """What it has said of its models while it ran, last, and when."""
    gaps_ms: list[int]
    """Those of `step_times`, a step nearer for the byte path."""
    # What its engine is, and reports.
    build: Build
    """What its engine says that it is."""
    other_builds: tuple[str, ...]
    """Units of its cell and model that say something else."""
    cards: ModelCards
    """What it says of its models."""
    foreign: int
    """Requests of others that its engine reports."""
    counters_at: float
    """When its engine's counters were last read; 0: never."""
    facts: UnitFacts
    """What the agents of its nodes report."""
    # Probes and evidence.
    last_evidence: dict[tuple[str | None, str], Evidence]
    """By node and source."""
    answered_at: float
    """When anything of it last answered."""
    asked_at: float
    """When it, or a node of it, was first asked something since the last answer; inf: all is answered, -inf:
    it has never answered."""
    calm_since: float
    """Since when a unit of a large fleet has rested; inf: it does not (see attention.py)."""
    stalls: deque[Stalled]
    """The last ones."""
    pauses: Pauses
    """Those that ended by themselves, here or at a peer."""
    stall_reported_at: float
    """When a stall was last reported as evidence."""
    cleared_at: float
    """When a canary last cleared it of one."""
    peer_canary_at: float
    """While this is not before the last progress, another gate sends the next canary."""
    asks_next: Use | None
    """The kind of request that the next canary is to be."""
    slots_shown: int
    """The most requests beside which a canary was answered."""
    canary_answered_at: float
    """When the last one was sent that was answered."""
    occupied_until: float
    """A probe of the gate keeps it busy until then at most."""
    is_awaited: bool
    """Of a worker's replica: requests wait for its pool at the control process."""
    is_alone: bool
    """No other unit of its pool does better."""
    kept: Kept | None
    """It is not configured any more (see kept.py)."""
    fell_unseen: bool
    """It last went DOWN because of a time-out of ours, and nothing else spoke against it."""
    answers: AnswerRecord | None
    """What it answered to the known prompt."""
    urgency: Urgency
    """How soon it is to be asked that again."""
    # Holds: it stands still on purpose (see health.py).
    held_until: float
    """When the last one ended."""
    can_hold: bool
    """Its engine says whether it stands still."""
    is_hold_spent: bool
    """It has said so for longer than it is believed."""
    # How it passes KV blocks on.
    moves_blocks: bool
    """Units of its cell pass them to each other."""
    meets: bool
    """Both of a pair get a request at the same time."""
    needs_prefiller: bool
    """Then its engine computes no prompt at all."""

    def __init__(self, unit: Unit, cell: Cell, case: Case) -> None:
        super().__init__(case, frozenset(unit.models))
        self.learnt_limit, self.parked = inf, 0
        self.apply(unit, cell)
        self.leases, self.held_back = {}, {}
        self.unread = Unread()
        self.refusals, self.models_said = {}, ("", -inf)
        self.canary_refused = self.waits_inside = ""
        self.ends_known: dict[tuple[str, frozenset[str]], EventEnds] = {}
        """Those of all units, by engine and models: streams of equals have one form."""
        self.waits_known: dict[tuple[str, frozenset[str]], LongWaits] = {}
        """Long waits, as those."""
        self.progress_at = self.work_at = self.last_lease_at = 0.0
        self.cool_until = self.full_until = self.batch = self.prefilling = 0.0
        self.engine, self.build, self.other_builds = unit.engine, UNKNOWN_BUILD, ()
        self.cards = {}
        self.adapters, self.ranks, self.facts = Adapters(), Ranks(), UnitFacts()
        self.load: Load | None = None
        self.foreign, self.counters_at = 0, 0.0
        self.step_times, self.outlier = StepTimes(), Outlier()
        self.gaps_ms = self.step_times.gaps_ms
        self.costs = CostModel(self.step_times.rates)
        self.last_evidence = {}
        self.asked_at, self.calm_since = -inf, inf
        self.answered_at = self.last_error_at = self.stall_reported_at = 0.0
        self.stalls, self.pauses = deque(maxlen=STALLS_KEPT), Pauses()
        self.busy_at, self.cleared_at, self.peer_canary_at = -BUSY_S, -inf, -1.0
        self.asks_next, self.slots_shown, self.occupied_until = None, 0, 0.0
        self.canary_answered_at = -inf
        self.answers, self.urgency = None, Urgency.ROUTINE
        self.is_awaited = self.is_alone = self.fell_unseen = self.can_hold = self.is_hold_spent = False
        self.held_until, self.kept = 0.0, None

    def succeed(self, old: UnitState) -> None:
        """This is the unit that had another name until now: what was known and learnt of it goes on here.

        Its open leases stay with `old`, and share what is learnt.
        """
        self.case, self.hold = old.case, old.hold
        self.models = frozenset(self.unit.models) or old.models
        self.engine, self.build, self.cards = self.unit.engine or old.engine, old.build, old.cards
        self.adapters, self.outlier = old.adapters, old.outlier
        self.step_times, self.costs, self.gaps_ms = old.step_times, old.costs, old.gaps_ms
        self.load, self.foreign, self.counters_at = old.load, old.foreign, old.counters_at
        self.progress_at, self.answered_at, self.up_since = old.progress_at, old.answered_at, old.up_since

    def apply(self, unit: Unit, cell: Cell) -> None:
        """Apply the configuration of the unit and of its cell."""
        self.unit = unit
        self.weight = unit.weight * cell.weight
        self.far_s = cell.spill_s
        self.moves_blocks = cell.transfer != "none"
        self.meets = cell.transfer == "sglang"
        self.needs_prefiller = self.meets and unit.role == "decode"
        self._set_limit()

    def _set_limit(self) -> None:
        self.limit = min(self.learnt_limit, self.unit.max_in_flight) + self.parked

    @property
    def usual_ends(self) -> EventEnds:
        """How the events of its streams end."""
        return self.ends_known.get((self.engine, self._models), NO_ENDS)

    @usual_ends.setter
    def usual_ends(self, ends: EventEnds) -> None:
        if len(self.ends_known) >= FORMS_KEPT:
            self.ends_known.clear()
        self.ends_known[self.engine, self._models] = ends

    @property
    def overtaken(self) -> LongWaits:
        """How long requests have lately waited for their first token while later ones were answered."""
        like = self.engine, self._models
        if (waits := self.waits_known.get(like)) is None:
            if len(self.waits_known) >= FORMS_KEPT:
                self.waits_known.clear()
            waits = self.waits_known[like] = LongWaits()
        return waits

    @property
    def in_flight(self) -> int:
        """Open leases on this unit that hold a slot."""
        return len(self.leases) - self.parked

    @property
    def quiet_since(self) -> float:
        """Since when it has had requests without progress."""
        return max(self.progress_at, self.work_at)

    def gives_blocks(self) -> bool:
        """Whether it computes prompts for others: an engine of SGLang does only that, or never."""
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
        return self.restart_suspected_at >= self.progress_at

    def is_unreachable(self, now: float) -> bool:
        """True when neither its leader nor any other node answers."""
        silent_since = max(self.answered_at, self.progress_at)
        return outliers.is_unreachable(silent_since, self.asked_at, now)

    @property
    def steady_weight(self) -> float:
        """The unit's weight: less while it is degraded."""
        return self.weight * (1.0 - self.outlier.degraded)

    def ramp(self, now: float, rules: Rules) -> float:
        """The share of requests for which it is a candidate: less than all in slow start."""
        risen_s = now - self.up_since
        return max(SLOW_START_LEAST, risen_s / rules.slow_start_s) if risen_s < rules.slow_start_s else 1.0

    def share(self, now: float, rules: Rules) -> float:
        """Its present share by weight: less while it is degraded or in slow start."""
        return self.steady_weight * self.ramp(now, rules)

    def record_large_prompt(self, tokens: int, sent_at: float) -> None:
        """A large prompt, sent at `sent_at`, was computed: record for how long no counter moved."""
        if self.counters_at:
            ended = (each.still_s for each in self.stalls if each.since + each.still_s >= sent_at)
            self.step_times.record_stall(tokens, max(ended, default=0.0))

    def record_wait(self, done: Prefilled, lease: Lease, now: float) -> None:
        """A prompt was computed, which took a while: record for how long nothing moved.

        Where no steps are counted, it may have been computed beside streams that went on, and may do the
        same alone: then the whole wait counts, but not that for others to end.
        """
        since = max(self.quiet_since, lease.opened_at)
        waits = [stall for stall in self.stalls if stall.since + stall.still_s >= lease.opened_at]
        waits.append(Stalled(now - since, since, tokens_there(self.leases, self._joins_until(since), lease)))
        if not self.counters_at and done.had_slot:
            since = now - done.span_s
            waits.append(Stalled(done.span_s, since, tokens_there(self.leases, since + JOINED_S, lease)))
        longest, is_whole = max(waits), done.had_slot or self.counters_at > 0.0
        beside = max(0, longest.tokens - done.tokens)
        at_once = tokens_there(self.leases, longest.since, lease)
        step_times = self.step_times
        step_times.waited(done.tokens, longest.still_s, is_whole=is_whole, beside=beside, at_once=at_once)
        if not self.counters_at:
            self._record_overtaken(lease, now)

    def _record_overtaken(self, lease: Lease, now: float) -> None:
        """A stream begins."""
        if self.unread.until > lease.opened_at:
            self.overtaken.add(min(now - lease.opened_at, OVERTAKEN_MAX_S), now)
        self.unread.until = lease.opened_at
        self.overtaken.add(self.overtaken_s(now), now)

    def overtaken_s(self, now: float) -> float:
        """How long the first request without a token has waited that a later one (a canary, too) overtook."""
        first_at = next((lease.opened_at for lease in self.leases if not lease.committed), now)
        is_overtaken = max(self.unread.until, self.canary_answered_at) > first_at
        return min(now - first_at, STILL_WAITS_MAX_S) if is_overtaken else 0.0

    def _joins_until(self, since: float) -> float:
        """What came until then may be in the present step; when that began is known where steps count."""
        return since if self.counters_at else since + JOINED_S

    def show_plain(self, now: float) -> None:
        """Count the prompts of plain answers as computed when they are due, because that is not visible."""
        for lease in self.leases:
            if not (lease.ask.stream or lease.committed) and now >= lease.opened_at + lease.job.ttft_s:
                self.costs.backlog.show(lease, now, tells=False)

    def lower_limit(self, now: float) -> None:
        """The engine has refused a request as full: lower the limit to its present requests."""
        self.learnt_limit = float(max(1, self.in_flight))
        self._set_limit()
        if not self.leases:
            self.full_until = now + FULL_S

    def raise_limit(self, ticks: int = 1) -> None:
        """Ticks have passed: raise the limit a little for each, up to the configured one."""
        for _ in range(ticks):
            self.learnt_limit = self.learnt_limit * LIMIT_GROWTH + 0.25
        self._set_limit()

    def park(self, now: float) -> None:
        """A tick has passed: leases whose engine has waited for their clients for long hold no slot any more.
        It has computed what it could, and what it has not shows as work of others.
        """
        for lease, since in self.held_back.items():
            if not since:
                self.held_back[lease] = now
            elif now - since >= HELD_BACK_S and lease.committed:
                self.held_back[lease] = inf
                self.parked += 1
                self.costs.remove(lease, now)
        self._set_limit()

    def unpark(self, lease: Lease) -> None:
        """The client of a lease reads again, or it is over."""
        if self.held_back.pop(lease, 0.0) == inf:
            self.parked -= 1
            self._set_limit()

    def has_room(self, now: float, overcommit: float) -> bool:
        """Whether the limits allow one more request."""
        return len(self.leases) < self.limit * (1.0 + overcommit) and now >= self.full_until

    def record_stall(self, still_s: float) -> None:
        since = self.quiet_since
        if self.stalls and self.stalls[-1].since == since:
            self.stalls.pop()
        there = tokens_there(self.leases, self._joins_until(since))
        self.stalls.append(Stalled(still_s, since, there))

    def longest_stall_s(self) -> float:
        """The longest recent stall that ended by itself, in ticks, plus one."""
        since = self.quiet_since
        return (
            max((each.still_s for each in self.stalls if each.since != since), default=0.0) + SHORTEST_STALL_S
        )

    def has_only_errors(self, now: float) -> bool:
        """Record an error of the unit; True when the last thing it did, a moment ago, was another one.

        Its engine may have just died, and then it answers only errors.
        """
        again = self.last_error_at > self.progress_at and now - self.last_error_at < ERRORS_TOGETHER_S
        self.last_error_at = now
        return again

    def is_falsely_busy(self, now: float) -> bool:
        """Record a 503 of the unit; True when its engine has reported idleness since the previous one."""
        if now - self.busy_at > BUSY_S:
            self.busy_at = now
            return False
        load = self.load
        is_idle = load is not None and load.at > self.busy_at and load.at_engine == 0
        return is_idle and self.in_flight <= 1

    def record_slots(self, asked_at: float) -> None:
        """A canary that was sent at `asked_at` is answered: it had a slot beside the requests that occupy the
        engine still. One that was sent just before it, and shows nothing, may have arrived after it.
        """
        beside = sum(
            not lease.paused
            and (lease.ask.stream if lease.committed else lease.opened_at < asked_at - JOINED_S)
            for lease in self.leases
        )
        self.slots_shown, self.canary_answered_at = max(self.slots_shown, beside), asked_at

    def speed(self) -> Speed | None:
        """Its speed for a comparison; None with too few recent tokens."""
        # Counting the gaps takes a tenth of a millisecond, and there are many idle units.
        if self.batch < UNIT_SPEED_BATCH or not self.is_usable() or self.prefilling > PREFILLING_MOST:
            return None
        if (gap_s := self.step_times.gap_s(0.5)) is None:
            return None
        return Speed(gap_s, self.batch, self.load.kv_use if self.load is not None else 0.0, self.weight)

    def __repr__(self) -> str:
        return f"<UnitState {self.unit.name} {self.case.verdict.value} in_flight={self.in_flight}>"


HELD_BACK_S = 1.0
"""A stream whose engine has waited for its client for so long needs no slot."""
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
UNIT_SPEED_BATCH = 0.1
"""The speed of a unit with fewer requests on average is not compared."""
SHORTEST_STALL_S = 0.25
"""Shorter stalls are not recorded."""


class EventEnds(NamedTuple):
    """How `events` end, without their line ends, that only add to a text of a stream; and HTTP `chunks` that
    hold one. The latest are first.
    """

    events: tuple[bytes, ...]
    chunks: tuple[bytes, ...]


NO_ENDS = EventEnds((), ())
FORMS_KEPT = 256
"""Engines and lists of models whose ends are known."""


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

    job: Job
    beside: Concurrency
    # From `Ranks.open` on.
    rank_record: int

    def __init__(self, state: UnitState, ask: Ask, now: float, retry: bool) -> None:
        self.unit_state = state
        self.unit = state.unit.name
        self.build = state.build
        self.ask = ask
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

    def make_wait(self, *, held: bool) -> None:
        """Its engine has to wait for its client, or no more."""
        self.paused, self.was_paused = held, True
        if held:
            self.unit_state.held_back.setdefault(self, 0.0)
        else:
            self.unit_state.unpark(self)

    def commit(self, now: float) -> None:
        """The unit has sent its first token (or the head of a plain body)."""
        self.committed = True
        self.first_at = now
        state = self.unit_state
        if self.rank >= 0:
            state.ranks.show(self)
        # A plain answer arrives when all of it is computed, which says little about its prompt.
        tells = self.ask.stream and not self.was_paused
        done = state.costs.show(self, now, tells)
        if done is not None:
            state.step_times.prefilled(done)
            if done.span_s > WAIT_LEAST_S:
                state.record_wait(done, self, now)
            if done.tokens >= LARGE_TOKENS:
                state.record_large_prompt(done.tokens, self.opened_at)
        state.unread.until = self.opened_at

    def commit_in_doubt(self, now: float) -> None:
        """The unit has sent what nothing is learnt from: its prompt may not have been computed."""
        if self.rank >= 0:
            self.unit_state.ranks.withdraw(self)
        self.unit_state.costs.withdraw(self)
        self.committed, self.first_at = True, now

    def __repr__(self) -> str:
        state = "closed" if self.closed else "evicted" if self.evicted else "open"
        return f"<Lease {self.unit} {state} committed={self.committed}>"


# What decides whether a unit is in rotation, and whether others go before it: its verdict, a hold, a drain,
# a suspected restart, a slow start; and the models it serves.
#
# These change seldom and are needed for each request. So they tell of each change, and whoever has prepared
# something from them (`Board.usable`) makes it again.


def _nobody() -> None:
    """Nothing was prepared."""


# The data parallel ranks of a unit: places within it, each with its own requests and prefix cache. Pure.
#
# An engine with `--data-parallel-size n` has n schedulers behind one API. It obeys `X-data-parallel-rank`
# (vLLM, SGLang), so the gate can send a prompt to the rank that holds its beginning. All ranks are one unit,
# because the server ends when one of them does.


UNIT_RANKS_MAX = 256
"""Further ranks of one unit are not known to the gate."""


_NO_LOAD = RankLoad(0)


class Rank:
    """One rank. `moved_at` is when its engine was last seen to make a step, or had nothing to do."""

    def __init__(self, blocks: int) -> None:
        self.prefixes = PrefixCache(blocks)
        self.in_flight = 0
        self.queued_tokens = 0
        """Prompt tokens that this gate has sent and that are not computed yet, as estimated."""
        self.foreign = 0
        self.load = _NO_LOAD
        self.moved_at = 0.0


@dataclass(frozen=True, slots=True)
class StillRank:
    """A rank with requests that has made no step for `still_s` seconds."""

    rank: int
    requests: int
    still_s: float


class Ranks:
    """The ranks of one unit, none of an engine that has one scheduler only."""

    def __init__(self) -> None:
        self.count = 0
        self.ranks: list[Rank] = []
        """Never fewer than before, because leases refer to them; the first `count` exist now."""

    def report(self, loads: tuple[RankLoad, ...], blocks: int, at: float) -> None:
        """Apply the engine's report on its ranks; `blocks` of prompts fit into the caches of all."""
        self.count = count = min(len(loads), UNIT_RANKS_MAX)
        while len(self.ranks) < count:
            self.ranks.append(Rank(max(blocks // count, 1)))
        for rank, load in zip(self.ranks, loads[:count], strict=False):
            if load.progress != rank.load.progress or not rank.load.at_engine:
                # It has made a step, or had nothing to do when it was last seen.
                rank.moved_at = at
            rank.load = load
            rank.foreign = max(0, load.at_engine - rank.in_flight)

    def choose(self, ask: Ask, expected: Expected, prices: CostTerms) -> int:
        """The rank where the fewest seconds follow: of equal ones, that with the least requests.

        A beginning that many requests share is charged in part only, as for units: else all of them would go
        to the rank that was first.
        """
        costs = []
        for number, rank in enumerate(self.ranks[: self.count]):
            held = rank.prefixes.match(ask.blocks) if ask.blocks else 0
            free = held + expected.spared_blocks(held)
            share = 1.0 - free / len(ask.blocks) if ask.blocks else 1.0
            beside = rank.in_flight + rank.foreign
            prompt_s = (rank.queued_tokens + ask.prompt_tokens * share) * prices.token_s
            costs.append((prompt_s + beside * expected.answer_tokens * prices.sequence_s, beside, number))
        return min(costs)[2]

    def open(self, lease: Lease, expected: Expected, prices: CostTerms) -> None:
        """Choose the rank of a lease that was just opened; `prices` are those of its unit."""
        lease.rank = self.choose(lease.ask, expected, prices)
        rank = self.ranks[lease.rank]
        rank.in_flight += 1
        rank.queued_tokens += lease.job.uncached_tokens
        lease.rank_record = rank.prefixes.record(lease.ask.blocks) if lease.ask.blocks else 0

    def show(self, lease: Lease) -> None:
        """The first token of a lease has come."""
        rank = self.ranks[lease.rank]
        rank.queued_tokens -= lease.job.uncached_tokens
        rank.prefixes.prove(lease.ask.blocks, lease.rank_record)

    def close(self, lease: Lease) -> None:
        """A lease has ended."""
        rank = self.ranks[lease.rank]
        rank.in_flight -= 1
        if not lease.committed:
            self.withdraw(lease)

    def withdraw(self, lease: Lease) -> None:
        """The prompt of a lease may not have been computed."""
        rank = self.ranks[lease.rank]
        rank.queued_tokens -= lease.job.uncached_tokens
        rank.prefixes.forget(lease.ask.blocks, lease.rank_record)

    def forget(self) -> None:
        """The unit has restarted: its caches are empty, and it may have another number of ranks."""
        self.count = 0
        for rank in self.ranks:
            rank.prefixes.purge()

    def still_rank(self, at: float) -> StillRank | None:
        """The rank with requests that has made no step for longest, as of a report at `at`."""
        worst: StillRank | None = None
        for number, rank in enumerate(self.ranks[: self.count]):
            requests, still_s = rank.load.at_engine, at - rank.moved_at
            if requests and rank.moved_at and (worst is None or still_s > worst.still_s):
                worst = StillRank(number, requests, still_s)
        return worst
