"""Retries the ranks of an engine: asks its own fault tolerance to recover those that are not healthy.

vLLM takes `POST .../fault_tolerance/apply {"instruction": "retry", "params": {}, "request_id": "..."}` at the
API of each rank, answers 202 with the id that it goes by, and does it in the background; the status tells
when it is done (healthy), or that it has failed (`ft_error`, of `last_ft_request_id`). A rank takes it only
while it is unhealthy, and then waits for the others, which build their group anew together: often they fail
only once it has left theirs. So each is asked when it says that it is unhealthy, and never before. An engine
gives up after 120 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple
from uuid import uuid4

import orjson

from cellgate.probes.base import Fetch, FetchError
from cellgate.probes.engines import engine, parsed
from cellgate.probes.fault_status import ASK_S, DEAD, FAULTY, ranks_in, status_servers
from cellgate.proxy.http.fetch import ProbeTransport
from cellgate.router.unit_state import UnitState

ROUNDS = 3
"""A round that fails may succeed when it is tried again: the link that was gone is back."""
ROUND_S = 30.0
"""So long a round is given, unless a rank says sooner that it has failed; all of them together less than the
120 s after which the engine gives up."""
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
    asked: dict[str, str] = {}
    for _ in range(ROUNDS):
        was_asked, asked = bool(asked), {}
        is_well = await _round(servers, paths, asked)
        if is_well is not None:
            return is_well and (was_asked or bool(asked))
        await asyncio.sleep(POLL_S)
    return False


async def _round(
    servers: Mapping[str, Fetch], paths: Mapping[str, str], asked: dict[str, str]
) -> bool | None:
    """Whether all ranks are healthy after a round (False: no other one helps); None: another may be tried.
    `asked` gets the id of the round at each API server that was asked.
    """
    name = str(uuid4())
    for _ in range(POLLS):
        said = {node: await _said(servers[node], path) for node, path in paths.items()}
        statuses = {status for each in said.values() for status in each.statuses}
        if not statuses or DEAD in statuses:
            return not statuses
        if any(said[node].statuses and said[node].failed == round_id for node, round_id in asked.items()):
            return None
        faulty = [node for node in paths if node not in asked and said[node].statuses & FAULTY]
        for node in faulty:
            if round_id := await _ask(servers[node], paths[node], name):
                asked[node] = round_id
        if faulty and not asked:
            return False
        await asyncio.sleep(POLL_S)
    return None


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


class _Said(NamedTuple):
    """What the ranks of an API server say: the statuses of those that are not healthy, and the last round
    that has failed. A server that is silent has a rank that is not healthy.
    """

    statuses: frozenset[str]
    failed: str = ""


async def _said(fetch: Fetch, path: str) -> _Said:
    try:
        reply = await fetch("GET", path, timeout_s=ASK_S)
    except FetchError as error:
        return _Said(frozenset({str(error)}))
    return _Said(frozenset(fault.status for fault in ranks_in(reply.body)), _failed(parsed(reply.body)))


def _failed(page: object) -> str:
    """The id of the round that a rank says has failed."""
    engines = page.get("engines") if isinstance(page, dict) else None
    for each in engines if isinstance(engines, list) else ():
        if isinstance(each, dict) and each.get("ft_error"):
            return str(each.get("last_ft_request_id") or "")
    return ""


async def _ask(fetch: Fetch, path: str, name: str) -> str:
    """Ask a rank to retry; the id by which its status tells of it, empty where it has not begun to. Some take
    the `name` of the round, others answer with an id of their own.
    """
    body = orjson.dumps({"instruction": "retry", "params": {}, "request_id": name})
    try:
        reply = await fetch("POST", path.removesuffix("status") + "apply", body=body, timeout_s=ASK_S * 10)
    except FetchError:
        return ""
    if reply.status not in RANK_ACCEPTED:
        return ""
    answered = parsed(reply.body)
    own = answered.get("request_id") if isinstance(answered, dict) else None
    return own if isinstance(own, str) and own else name
