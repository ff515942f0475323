"""Where a unit publishes its KV events: as configured, or as its engine tells. Pure.

vLLM's `GET /kv_event_sources` is {rank: {"endpoint": ..., "replay_endpoint": ..., ...}}; SGLang's
`GET /server_info` has `kv_events`: {"endpoint_host": ..., "endpoint_port_base": n, "dp_size": n,
"replay_endpoint_port_base": n or null, ...}, where a rank is at the base plus its number. A host that stands
for all addresses of the engine's machine is that of the unit's URL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from cellgate.proxy.kv_events.link import Publisher
from cellgate.router.nouns import KvEvents

RANKS_MAX = 64
"""A unit has at most so many data-parallel ranks."""
PATHS = {"vllm": "/kv_event_sources", "sglang": "/server_info"}
"""What an engine is asked, by its name."""

Publishers = dict[int, Publisher]
"""By data-parallel rank."""

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/]+):(?P<port>\d{1,5})")
_EVERYWHERE = frozenset({"*", "0.0.0.0", "[::]", "::"})


def configured(keys: KvEvents) -> Publishers:
    """The ranks of a configured endpoint: each has the port behind the one before."""
    return {
        rank: Publisher(_shifted(keys.endpoint, rank), _shifted(keys.replay_endpoint, rank))
        for rank in range(keys.ranks)
    }


def told(engine: str, answer: Any, url: str) -> Publishers:
    """The ranks that an engine tells of in JSON; none where it publishes nothing, or nothing that is
    understood.
    """
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    if not isinstance(answer, Mapping):
        return {}
    found = _by_rank(answer) if engine == "vllm" else _by_base(answer.get("kv_events"))
    publishers = {
        rank: Publisher(_at(host, endpoint), _at(host, replay)) for rank, (endpoint, replay) in found.items()
    }
    return {rank: publisher for rank, publisher in publishers.items() if publisher.endpoint}


def _by_rank(answer: Mapping[str, Any]) -> dict[int, tuple[Any, Any]]:
    rows = {rank: row for rank, row in answer.items() if str(rank).isdecimal() and isinstance(row, Mapping)}
    return {
        int(rank): (row.get("endpoint"), row.get("replay_endpoint"))
        for rank, row in rows.items()
        if int(rank) < RANKS_MAX and row.get("publisher", "zmq") == "zmq"
    }


def _by_base(row: Any) -> dict[int, tuple[Any, Any]]:
    if not isinstance(row, Mapping) or row.get("publisher") != "zmq":
        return {}
    host, base, replay = (
        row.get(name) for name in ("endpoint_host", "endpoint_port_base", "replay_endpoint_port_base")
    )
    ranks = row.get("dp_size") or 1
    if not (isinstance(base, int) and isinstance(ranks, int) and 0 < ranks <= RANKS_MAX):
        return {}
    return {
        rank: (f"tcp://{host}:{base + rank}", f"tcp://{host}:{replay + rank}" if replay else "")
        for rank in range(ranks)
    }


def _at(host: str, endpoint: Any) -> str:
    """The endpoint as it is reached from here; empty if it is none by TCP."""
    match = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if match is None or not 0 < int(match["port"]) < 65536:
        return ""
    return f"tcp://{host if match['host'] in _EVERYWHERE else match['host']}:{match['port']}"


def _shifted(endpoint: str, rank: int) -> str:
    match = _TCP.fullmatch(endpoint)
    return f"tcp://{match['host']}:{int(match['port']) + rank}" if match else ""
