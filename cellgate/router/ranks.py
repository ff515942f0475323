"""The data parallel ranks of a unit: places within it, each with its own requests and prefix cache. Pure.

An engine with `--data-parallel-size n` has n schedulers behind one API. It obeys `X-data-parallel-rank`
(vLLM, SGLang), so the gate can send a prompt to the rank that holds its beginning. All ranks are one unit,
because the server ends when one of them does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cellgate.router.backlog import Job
from cellgate.router.cost import Expected, Forecast
from cellgate.router.nouns import Ask, RankLoad
from cellgate.router.prefix import PrefixCache

RANKS_MAX = 256
"""Further ranks of one unit are not known to the gate."""


class Ranked(Protocol):
    """An attempt on a unit: a lease. `rank_record` is that of its prompt in the cache of its rank."""

    ask: Ask
    job: Job
    committed: bool
    rank: int
    rank_record: int


class Rank:
    """One rank. `moved_at` is when its engine was last seen to make a step, or had nothing to do."""

    __slots__ = (
        "foreign",
        "in_flight",
        "moved_at",
        "prefixes",
        "progress",
        "queued_tokens",
        "running",
        "waiting",
    )

    def __init__(self, blocks: int) -> None:
        self.prefixes = PrefixCache(blocks)
        self.in_flight = 0
        self.queued_tokens = 0
        """Prompt tokens that this gate has sent and that are not computed yet, as estimated."""
        self.foreign = 0
        self.running = self.waiting = 0
        self.progress = 0.0
        self.moved_at = 0.0


@dataclass(frozen=True, slots=True)
class Standstill:
    """A rank with requests that has made no step for `still_s` seconds."""

    rank: int
    requests: int
    still_s: float


class Ranks:
    """The ranks of one unit, none of an engine that has one scheduler only."""

    __slots__ = ("count", "ranks")

    def __init__(self) -> None:
        self.count = 0
        self.ranks: list[Rank] = []
        """Never fewer than before, because leases refer to them; the first `count` exist now."""

    def report(self, loads: tuple[RankLoad, ...], blocks: int, at: float) -> None:
        """Apply the engine's report on its ranks; `blocks` of prompts fit into the caches of all."""
        self.count = count = min(len(loads), RANKS_MAX)
        while len(self.ranks) < count:
            self.ranks.append(Rank(max(blocks // count, 1)))
        for rank, load in zip(self.ranks, loads[:count], strict=False):
            if load.progress != rank.progress or not rank.running + rank.waiting:
                # It has made a step, or had nothing to do when it was last seen.
                rank.moved_at, rank.progress = at, load.progress
            rank.running, rank.waiting = load.running, load.waiting
            rank.foreign = max(0, load.running + load.waiting - rank.in_flight)

    def choose(self, ask: Ask, expected: Expected, prices: Forecast) -> int:
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

    def open(self, lease: Ranked, expected: Expected, prices: Forecast) -> None:
        """Choose the rank of a lease that was just opened; `prices` are those of its unit."""
        lease.rank = self.choose(lease.ask, expected, prices)
        rank = self.ranks[lease.rank]
        rank.in_flight += 1
        rank.queued_tokens += lease.job.uncached_tokens
        lease.rank_record = rank.prefixes.record(lease.ask.blocks)

    def show(self, lease: Ranked) -> None:
        """The first token of a lease has come."""
        rank = self.ranks[lease.rank]
        rank.queued_tokens -= lease.job.uncached_tokens
        rank.prefixes.prove(lease.ask.blocks, lease.rank_record)

    def close(self, lease: Ranked) -> None:
        """A lease has ended."""
        rank = self.ranks[lease.rank]
        rank.in_flight -= 1
        if not lease.committed:
            rank.queued_tokens -= lease.job.uncached_tokens
            rank.prefixes.forget(lease.ask.blocks, lease.rank_record)

    def forget(self) -> None:
        """The unit has restarted: its caches are empty, and it may have another number of ranks."""
        self.count = 0
        for rank in self.ranks:
            rank.prefixes.purge()

    def standstill(self, at: float) -> Standstill | None:
        """The rank with requests that has made no step for longest, as of a report at `at`."""
        worst: Standstill | None = None
        for number, rank in enumerate(self.ranks[: self.count]):
            requests, still_s = rank.running + rank.waiting, at - rank.moved_at
            if requests and rank.moved_at and (worst is None or still_s > worst.still_s):
                worst = Standstill(number, requests, still_s)
        return worst
