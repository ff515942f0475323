"""Retries the ranks of an engine: asks its own fault tolerance to recover those that are not healthy.

vLLM takes `POST .../fault_tolerance/apply {"instruction": "retry", "params": {}, "request_id": "..."}` at the
API of each rank, with one `request_id` for a round; it answers 202 and does it in the background, and the
status tells when it is done. An engine takes commands only while it is unhealthy, and gives up after 120 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from uuid import uuid4

import orjson

from cellgate.probes.base import Fetch, FetchError
from cellgate.probes.engines import engine
from cellgate.probes.fault_status import ASK_S, DEAD, ranks_in, status_servers
from cellgate.proxy.http.fetch import ProbeTransport
from cellgate.router.unit_state import UnitState

ROUNDS = 3
"""A round that fails may succeed when it is tried again: the link that was gone is back."""
ROUND_S = 30.0
"""So long a round is given; all of them together less than the 120 s after which the engine gives up."""
POLL_S = 0.5
POLLS = int(ROUND_S / POLL_S)
RANK_ACCEPTED = (HTTPStatus.OK, HTTPStatus.ACCEPTED)


async def retry_ranks(state: UnitState, transport: ProbeTransport) -> bool:
    """Whether all ranks say that they are healthy again. False at once where the engine has no such status,
    all are healthy already, or one is dead: a process that is gone only a restart brings back.
    """
    servers = status_servers(state.unit, transport.fetch, transport.net)
    paths = await _paths(servers, engine(state.engine).faults)
    if not paths.get(""):
        return False
    for _ in range(ROUNDS):
        said = await _said(servers, paths)
        if not said or DEAD in said.values() or not await _begun(servers, paths):
            return False
        for _ in range(POLLS):
            await asyncio.sleep(POLL_S)
            if not (said := await _said(servers, paths)):
                return True
            if DEAD in said.values():
                return False
    return False


async def _paths(servers: Mapping[str, Fetch], known: tuple[str, ...]) -> dict[str, str]:
    """The path of the status at each API server that has it."""
    found: dict[str, str] = {}
    for node, fetch in servers.items():
        for path in known:
            try:
                reply = await fetch("GET", path, timeout_s=ASK_S)
            except FetchError:
                break
            if reply.status == HTTPStatus.OK:
                found[node] = path
                break
    return found


async def _said(servers: Mapping[str, Fetch], paths: Mapping[str, str]) -> dict[str, str]:
    """What the ranks that are not healthy say, by node and number; a server that is silent is such a one."""
    said: dict[str, str] = {}
    for node, path in paths.items():
        try:
            reply = await servers[node]("GET", path, timeout_s=ASK_S)
        except FetchError as error:
            said[node] = str(error)
            continue
        said |= {f"{node} {fault.rank}": fault.status for fault in ranks_in(reply.body)}
    return said


async def _begun(servers: Mapping[str, Fetch], paths: Mapping[str, str]) -> bool:
    """Ask all ranks to retry, as one round; whether the leader's has begun to."""
    body = orjson.dumps({"instruction": "retry", "params": {}, "request_id": str(uuid4())})
    begun = False
    for node, path in paths.items():
        target = path.removesuffix("status") + "apply"
        try:
            reply = await servers[node]("POST", target, body=body, timeout_s=ASK_S * 10)
        except FetchError:
            continue
        begun |= reply.status in RANK_ACCEPTED and not node
    return begun
