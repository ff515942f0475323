"""Metrics of requests whose prompt one unit computes and another one answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import counter, gauge, summary
from cellgate.router.board import Board

_PAIR = ("prefiller", "decoder")


@dataclass(slots=True)
class PairTally:
    """The transfers of one pair: those that were timed, their seconds, and the tokens of all."""

    timed: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Blocks have arrived; `seconds` 0: not timed."""
        self.tokens += tokens
        self.timed += seconds > 0.0
        self.seconds += seconds


class SplitCounts(Protocol):
    """What is counted (proxy/control/link_watch.py)."""

    @property
    def steps(self) -> Counter[tuple[str, str, str]]: ...
    @property
    def pairs(self) -> Mapping[tuple[str, str], PairTally]: ...

    def orphans(self) -> int: ...


class SplitMetrics(Collector):
    """Renders the counts of one gate; nothing where no unit has a role."""

    def __init__(self, board: Board, counts: SplitCounts, now: Callable[[], float]) -> None:
        self._board = board
        self._counts = counts
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """All families."""
        counts, pairs = self._counts, self._board.pairs
        if not pairs.prefillers and not counts.steps:
            return
        yield counter(
            "split_steps",
            "Steps of split requests by what became of them.",
            (*_PAIR, "step"),
            counts.steps.items(),
        )
        yield counter(
            "splits_not_paying",
            "Requests that could have been split, and were not because it would not have paid.",
            (),
            [((), pairs.not_paying)],
        )
        yield summary(
            "transfer_seconds",
            "Time from a decoder's request to its first token, after its prompt was computed elsewhere.",
            _PAIR,
            [(pair, tally.timed, tally.seconds) for pair, tally in counts.pairs.items()],
        )
        yield counter(
            "transfer_tokens",
            "Tokens of KV cache that were moved from prefillers to decoders, as estimated.",
            _PAIR,
            [(pair, tally.tokens) for pair, tally in counts.pairs.items()],
        )
        yield gauge(
            "link_open",
            "1 while requests may be split between the pair; 0 while it is avoided because transfers failed.",
            _PAIR,
            [(pair, link.is_open(self._now())) for pair, link in pairs.links.items()],
        )
        yield gauge(
            "split_orphans",
            "Computed prompts whose blocks are held for nobody.",
            (),
            [((), counts.orphans())],
        )
