"""Metrics of the gate's connection to Redis."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cellgate.proxy.metrics.families import counter, gauge
from cellgate.proxy.sharing.redis_link import LinkState, RedisLink
from cellgate.router.board import Board
from cellgate.router.other_gates import NOTHING_ELSEWHERE

_COUNTS = {
    "connects": "Connections to Redis that were established.",
    "failures": "Connections to Redis that failed or were given up.",
    "beats": "Heartbeats of this gate: what it knows was written, and what others know was read.",
    "beats_read": "Heartbeats of other gates that were read.",
    "documents_written": "Documents about units that Redis accepted.",
    "writes_refused": "Documents that Redis did not accept: it is full or read-only.",
    "documents_read": "Documents of other gates that were read.",
    "documents_refused": "Documents and messages that were invalid and were ignored.",
    "flips_sent": "Changes of verdict that were published to other gates.",
    "flips_heard": "Changes of verdict that other gates published.",
    "bans_sent": "Bans of prompts, and ends of bans, that were published to other gates.",
    "bans_heard": "Bans of prompts, and ends of bans, that other gates published.",
    "bans_refused": "Messages about bans that were invalid and were ignored.",
    "prefixes_sent": "Hashes of cached prompts that were published to other gates.",
    "prefixes_heard": "Hashes of cached prompts that were read from other gates.",
    "prefixes_refused": "Documents of hashes that were invalid and were ignored.",
}


class RedisMetrics(Collector):
    """The connection to Redis, and the attempts of other gates on shared units."""

    def __init__(self, link: RedisLink, board: Board) -> None:
        self._link = link
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """All families."""
        link = self._link
        is_well = link.state is LinkState.WELL
        yield gauge("redis_up", "1 while Redis answers and accepts writes.", (), [((), is_well)])
        yield gauge("redis_peers", "Other gates that have reported recently.", (), [((), link.peers())])
        known = len(self._board.remote) if self._board.remote is not None else 0
        yield gauge(
            "redis_prefixes", "Hashes of cached prompts that are known from other gates.", (), [((), known)]
        )
        yield gauge(
            "in_flight_elsewhere",
            "Attempts of other gates in flight at a unit.",
            ("unit",),
            (
                ((name,), self._board.elsewhere.get(name, NOTHING_ELSEWHERE).in_flight)
                for name in self._board.units
            ),
        )
        for name, text in _COUNTS.items():
            yield counter(f"redis_{name}", text, (), [((), link.counts[name])])
