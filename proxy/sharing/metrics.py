"""What a scrape shows of the gate's line to Redis."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import counter, gauge
from cellgate.proxy.sharing.redis_link import LinkState, RedisLink
from cellgate.router.board import Board
from cellgate.router.cost_model import NOTHING_ELSEWHERE

_COUNTS = {
    "connects": "Times that a connection was made and answered.",
    "failures": "Times that there was none, or that one was given up.",
    "documents_written": "Documents about units that Redis has taken.",
    "writes_refused": "Documents that it did not take: it is full, or read-only.",
    "documents_read": "Documents of other gates that were read.",
    "documents_refused": "What was there or was heard, and is no document that counts.",
    "flips_sent": "Changes of verdict that others were told of at once.",
    "flips_heard": "Changes of verdict that others told of.",
    "bans_sent": "Refused prompts, or that one is refused no more, that others were told of at once.",
    "bans_heard": "The same, told by others.",
    "bans_refused": "What was told as such, and does not count.",
    "prefixes_sent": "Hashes of cached prompts that others were told of.",
    "prefixes_heard": "Hashes of cached prompts that were read of others.",
    "prefixes_refused": "Documents that should hold such hashes, and do not count.",
}


class RedisMetrics(Collector):
    """The line to Redis, and what other gates have open on our units."""

    def __init__(self, link: RedisLink, board: Board) -> None:
        self._link = link
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """All families."""
        link = self._link
        is_well = link.state is LinkState.WELL
        yield gauge("redis_up", "1: Redis answers, and takes what it is told.", (), [((), is_well)])
        yield gauge("redis_peers", "Other gates that were heard of just now.", (), [((), link.peers())])
        known = len(self._board.remote) if self._board.remote is not None else 0
        yield gauge("redis_prefixes", "Hashes of cached prompts that others have told of.", (), [((), known)])
        yield gauge(
            "in_flight_elsewhere",
            "Attempts that other gates have open on a unit.",
            ("unit",),
            (
                ((name,), self._board.elsewhere.get(name, NOTHING_ELSEWHERE).in_flight)
                for name in self._board.units
            ),
        )
        for name, text in _COUNTS.items():
            yield counter(f"redis_{name}", text, (), [((), link.counts[name])])
