"""Pairs of prefiller and decoder: which unit computes a prompt for which, in seconds. Pure.

    whole    the decoder computes the prompt: its cost there, as ever
    split    the prompt's cost at the prefiller, and its transfer over the link of the pair, and the rest of
             the cost at the decoder, as if the prompt were cached there

A request is split where that is the cheaper one by a margin. Long prompts beside many answers are: a prompt
that is computed between their tokens delays them all. A prompt that is short, or cached at the decoder, is
not. A decoder of SGLang computes no prompt at all, so that its requests are always split. Units pair within a
cell only.

The link between two units: how fast KV blocks move from a prefiller to a decoder, and whether they
arrive.

A transfer that fails is the fault of the link, not of either unit: this pair is avoided, and both units
stay in rotation for others. Rules:
1. The first failure closes the link for AVOID_S; each further one in a row for twice as long, up to
AVOID_MOST_S. Then one request at a time tries it.
2. A slow link is not closed: its price rises, until splitting does not pay there.
3. One request at a time goes over a link that was never used: engines connect first, for seconds.
4. What was not confirmed for STALE_S is forgotten, so that a link that was slow gets another chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp, inf, log
from typing import NamedTuple

from cellgate.router.cost import Cost, Expected
from cellgate.router.nouns import (
    LINK_FAILED,
    TRANSFERRED,
    Ask,
    Candidate,
    Refusal,
    SplitPlan,
    SplitStep,
    Verdict,
)
from cellgate.router.unit_state import UnitState

AVOID_S = 5.0
AVOID_MOST_S = 60.0
STALE_S = 60.0
FIRST_S = 20.0
"""The first transfer of a pair may take so long: its engines connect (vLLM on CPU: 3 to 10 s)."""
FIRST_TOKENS_S = 50_000.0
"""Tokens a second of a link of which nothing is known: 10 GB/s at 200 kB a token."""
SETUP_S = 0.01
"""What a transfer takes apart from its tokens."""
_LINK_WEIGHT = 0.5
_LINK_CLIP = 4.0


class Pairs:
    """The units of a board by role, and the links between them.

    `decoders` are all units that requests may be sent to; one that only computes prompts gets a whole request
    only when it names the unit. Without roles, they are all units. `prefillers` are those that compute
    prompts for others, by cell. `has_needy`: some decoder computes no prompts.
    """

    def __init__(self) -> None:
        self.decoders: dict[str, UnitState] = {}
        self.links: dict[tuple[str, str], TransferLink] = {}
        self.not_paying = 0
        """Requests that had a prefiller, and were not split because it would not have paid."""
        self.prefillers: dict[str, list[UnitState]] = {}
        self.has_needy = False

    def configure(self, units: dict[str, UnitState]) -> None:
        """Apply the roles of these units."""
        self.prefillers = {}
        for state in units.values():
            if state.gives_blocks():
                self.prefillers.setdefault(state.unit.cell, []).append(state)
                _grant_slots(state)
        self.has_needy = any(state.needs_prefiller for state in units.values())
        has_only_prefill = any(state.unit.role == "prefill" for state in units.values())
        self.decoders = (
            {name: state for name, state in units.items() if state.unit.role != "prefill"}
            if has_only_prefill
            else units
        )
        self.links = {pair: link for pair, link in self.links.items() if set(pair) <= units.keys()}

    def forget(self, state: UnitState) -> None:
        """The unit has restarted: what is known of its links is out of date."""
        unit = state.unit.name
        for pair in [pair for pair in self.links if unit in pair]:
            del self.links[pair]
        _grant_slots(state)

    def link(self, prefiller: str, decoder: str) -> TransferLink:
        return self.links.setdefault((prefiller, decoder), TransferLink())

    def apply(self, step: SplitStep, now: float) -> bool:
        """Learn from a step. True when a link was open until now and has failed."""
        if step.prefiller and step.kind == TRANSFERRED:
            self.link(step.prefiller, step.decoder).learn(step.tokens, self._transfer_s(step), now)
        return step.kind == LINK_FAILED and self.link(step.prefiller, step.decoder).fail(step.reason, now)

    def _transfer_s(self, step: SplitStep) -> float:
        """What of the time until the first token was the transfer. 0: nobody knows, because the decoder had
        prompts of its own to compute, or no decode slot.
        """
        state = self.decoders.get(step.decoder)
        if state is None or not step.seconds:
            return 0.0
        costs = state.costs
        if costs.backlog.queued or costs.backlog.batch + state.foreign > costs.slots.limit:
            return 0.0
        return max(step.seconds - costs.cost_terms.latency_s, SHORTEST_S)

    # -- prices --------------------------------------------------------------------------------------------

    def splits(
        self, ask: Ask, rows: list[Candidate], states: Mapping[str, UnitState], expected: Expected, now: float
    ) -> tuple[list[Candidate], Mapping[str, SplitPlan]]:
        """The rows with what they cost if split, where that is less or where nothing else is possible; and
        the splits, by decoder.
        """
        if not (ask.blocks or self.has_needy):
            return rows, _NO_SPLITS
        legs = self._legs(ask, {states[row.unit].unit.cell for row in rows}, now)
        found: dict[str, SplitPlan] = {}
        priced = []
        for row in rows:
            state = states[row.unit]
            best = self._best(ask, state, row, legs.get(state.unit.cell, ()), expected, now)
            if best is None or not row.has_room:
                priced.append(row)
                continue
            weighed, rest = best
            if weighed.pays:
                found[row.unit] = self._split(ask, state, weighed, rest, row.cached_blocks)
                priced.append(row._replace(cost_s=weighed.split_s or row.cost_s))
            else:
                priced.append(row)
        self.not_paying += bool(legs and ask.blocks) and not found
        return priced, found

    def served(
        self, ask: Ask, known: list[tuple[str, UnitState, int]], why_none: Refusal, now: float
    ) -> tuple[list[tuple[str, UnitState, int]], Refusal]:
        """The units that can serve an ask now: not decoders that need a prefiller, while none has room. And
        what to say when there is none.
        """
        # Looked at once a cell, however many decoders it has.
        cells = {state.unit.cell for _, state, _ in known if state.needs_prefiller} if ask.splits else set()
        ready = {cell for cell in cells if self._ready(cell, ask, now)}
        served = [one for one in known if not one[1].needs_prefiller or one[1].unit.cell in ready]
        may_wait = any(state.is_usable() for cell in cells for state in self.prefillers.get(cell, ()))
        return served, Refusal.FULL if may_wait else why_none

    def weigh(self, ask: Ask, row: Candidate, state: UnitState, expected: Expected, now: float) -> Weighed:
        """Both prices at one decoder, for an explanation."""
        legs = self._legs(ask, {state.unit.cell}, now) if ask.splits else {}
        best = self._best(ask, state, row, legs.get(state.unit.cell, ()), expected, now)
        return best[0] if best is not None else Weighed(row.cost_s)

    def _legs(self, ask: Ask, cells: Iterable[str], now: float) -> dict[str, list[_Leg]]:
        """What the prompt costs at the prefillers of these cells."""
        found = {}
        for cell in cells:
            states = self._ready(cell, ask, now)
            if len(states) > PREFILLERS_MOST:
                states = sorted(states, key=lambda state: state.in_flight)[:PREFILLERS_MOST]
            if states:
                found[cell] = [_Leg(state.unit.name, _prompt_s(state, ask, now)) for state in states]
        return found

    def _ready(self, cell: str, ask: Ask, now: float) -> list[UnitState]:
        """The prefillers of a cell that can take a prompt now: SUSPECT ones only while no other can."""
        anywhere = ask._replace(unit=None, build=None)
        ready = [state for state in self.prefillers.get(cell, ()) if _may_prefill(state, anywhere, now)]
        return [state for state in ready if state.case.verdict is Verdict.UP] or ready

    def _best(
        self, ask: Ask, state: UnitState, row: Candidate, legs: Iterable[_Leg], expected: Expected, now: float
    ) -> tuple[Weighed, Cost] | None:
        """The cheapest split at a decoder, and what is left to do there."""
        decoder, must = state.unit.name, state.needs_prefiller
        if not (must or (0 < ask.prompt_bytes <= PROMPT_BYTES and ask.blocks and state.takes_blocks())):
            return None
        tokens = _moved_tokens(ask, state, row.cached_blocks)
        # A link that is avoided is better than none.
        ways = [
            (leg.seconds + link.seconds(tokens, now) + link.closed_s(now), leg, link)
            for leg in legs
            if leg.unit != decoder
            and ((link := self.links.get((leg.unit, decoder), _UNKNOWN_LINK)).is_open(now) or must)
        ]
        if not ways:
            return None
        both_s, leg, link = min(ways, key=_first)
        rest = Cost(*state.costs.estimate(ask, len(ask.blocks), expected, now).terms)
        spared_s = row.cost_s - rest.total_s
        transfer_s = link.seconds(tokens, now)
        weighed = Weighed(
            row.cost_s,
            leg.unit,
            rest.total_s + both_s,
            leg.seconds,
            transfer_s,
            rest.total_s,
            must or both_s < PAYS * spared_s,
        )
        return weighed, rest

    def _split(self, ask: Ask, state: UnitState, weighed: Weighed, rest: Cost, held: int) -> SplitPlan:
        due_s, together = weighed.transfer_s + rest.ttft_s, state.needs_prefiller
        is_first = not self.link(weighed.prefiller, state.unit.name).transferred
        least_s = TOGETHER_MIN_S if together else LIMIT_MIN_S
        limit_s = max(FIRST_S if is_first else least_s, LIMIT_TIMES * due_s)
        if together:
            limit_s += LIMIT_TIMES * weighed.prefill_s
        if not ask.stream:
            limit_s += PLAIN_LIMIT_S + LIMIT_TIMES * rest.decode_s
        tokens = _moved_tokens(ask, state, held)
        return SplitPlan(weighed.prefiller, tokens, weighed.prefill_s, due_s, limit_s, is_first, together)


class TransferLink:
    """One pair. `failures` are those in a row, `last_failure` is what was said of the last one.

    `tokens_s` is its learnt speed; `seen` counts the transfers that were measured.
    """

    def __init__(self) -> None:
        self.avoided_until = 0.0
        self.failures = 0
        self.last_failure = ""
        self.last_failure_at = 0.0
        self.tokens_s = FIRST_TOKENS_S
        self.seen = 0
        self.seen_at = 0.0
        self.transferred = 0
        self.failed = 0

    def is_open(self, now: float) -> bool:
        """Whether a request may use it now."""
        return now >= self.avoided_until

    def closed_s(self, now: float) -> float:
        """For how long it is still avoided."""
        return max(0.0, self.avoided_until - now)

    def seconds(self, tokens: float, now: float) -> float:
        """How long a transfer of so many tokens is expected to take."""
        speed = self.tokens_s if now - self.seen_at < STALE_S else max(self.tokens_s, FIRST_TOKENS_S)
        return SETUP_S + tokens / speed

    def use(self, now: float) -> None:
        """A request goes over it. After a failure, and at first, it is the only one for a while."""
        if self.failures or not self.transferred:
            self.avoided_until = now + (AVOID_S if self.failures else FIRST_S)

    def learn(self, tokens: int, seconds: float, now: float) -> None:
        """A transfer has arrived; `seconds` 0: how long it took is not known."""
        self.failures, self.avoided_until = 0, 0.0
        self.transferred += 1
        if seconds <= 0.0 or not tokens or self.transferred == 1:
            return
        if now - self.seen_at >= STALE_S:
            self.tokens_s = max(self.tokens_s, FIRST_TOKENS_S) if self.seen else FIRST_TOKENS_S
        sample = tokens / max(seconds - SETUP_S, 1e-4)
        # Between a factor of 4 slower and faster, so that one sample moves little.
        step = min(max(log(sample / self.tokens_s), -log(_LINK_CLIP)), log(_LINK_CLIP))
        self.tokens_s *= exp(_LINK_WEIGHT * step)
        self.seen += 1
        self.seen_at = now

    def fail(self, reason: str, now: float) -> bool:
        """A transfer has failed. True when the link was open until now."""
        was_open = not self.failures
        # Requests that were on their way together fail together, and count once.
        if now - self.last_failure_at > AVOID_S or was_open:
            self.failures += 1
        self.failed += 1
        self.last_failure, self.last_failure_at = reason, now
        avoid_s = min(AVOID_S * 2.0 ** (self.failures - 1), AVOID_MOST_S)
        self.avoided_until = now + avoid_s
        return was_open


PAYS = 0.9
"""A split has to cost at most this share of what it spares the decoder."""
PROMPT_BYTES = 1 << 20
"""A larger prompt is not split where its body would have to be parsed once more."""
PREFILLERS_MOST = 16
"""A prompt is priced at so many prefillers of a cell: those that can take it, with the fewest requests."""
LIMIT_MIN_S = 2.0
TOGETHER_MIN_S = 10.0
"""The least where the decoder has to wait for the prompt as well."""
LIMIT_TIMES = 4.0
"""A transfer that takes longer than this, and this many times as long as expected, counts as failed."""
SHORTEST_S = 1e-3
"""A transfer is never taken to be shorter."""
PLAIN_LIMIT_S = 10.0
"""The same for an answer that comes as a whole, after what it should take altogether."""

_PROMPT_ONLY = Expected(1.0)
_NO_SPLITS: Mapping[str, SplitPlan] = {}
_UNKNOWN_LINK = TransferLink()
"""Of a pair that has had no request; it is never changed."""


class _Leg(NamedTuple):
    """What the prompt costs at a prefiller."""

    unit: str
    seconds: float


class Weighed(NamedTuple):
    """Both prices of a request at a decoder, for people. `split_s` None: no prefiller can take it."""

    whole_s: float
    prefiller: str = ""
    split_s: float | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    pays: bool = False


def _grant_slots(state: UnitState) -> None:
    """A unit that only computes prompts has a decode slot for each: so how long they take is always its
    prefill rate. Prompts that wait there would else look like sequences that wait for others to end.
    """
    if state.unit.role == "prefill":
        state.costs.backlog.peak_batch = inf


def _first(way: tuple[float, _Leg, TransferLink]) -> float:
    return way[0]


def _may_prefill(state: UnitState, ask: Ask, now: float) -> bool:
    is_ready = state.is_usable() and not state.is_restart_suspected() and state.has_room(now, 0.0)
    # One that answers as well takes no second prompt: with that it would have no room (see Bounds).
    is_free = state.unit.role == "prefill" or not state.costs.backlog.queued
    return is_ready and is_free and state.cool_until <= now and state.serves(ask)


def _prompt_s(state: UnitState, ask: Ask, now: float) -> float:
    """What it costs to compute a prompt: what others on a pure prefiller wait is in their own queues."""
    cost = Cost(*state.costs.estimate(ask, state.costs.cache.match(ask.blocks), _PROMPT_ONLY, now).terms)
    slowdown_of_others_s = 0.0 if state.unit.role == "prefill" else cost.slowdown_of_others_s
    return cost.ttft_s + cost.eviction_s + cost.error_s + cost.unknown_s + slowdown_of_others_s


def _moved_tokens(ask: Ask, state: UnitState, held: int) -> int:
    """Tokens of KV cache that the decoder lacks."""
    share = 1.0 - held / len(ask.blocks) if ask.blocks else 1.0
    return int(ask.prompt_bytes / state.costs.rates.bytes_per_token.value * share)
