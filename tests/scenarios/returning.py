"""A client that loses its connection in the middle of a stream, and comes back for the rest."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from random import Random
from typing import Any

from tests.scenarios.harness import CHAT, Stage
from tests.scenarios.visit import Visit
from tests.sim.client import Manner
from tests.sim.conversation import End, Reply

ON = {"x-cellgate-resume": "on"}
LEAVES_MOST = 4
_ID = re.compile(rb"\nid: (\S+)(?=\n\n)")


def last_id(reply: Reply) -> str:
    """The id of the last event that came whole; that of the head where there was none."""
    found = _ID.findall(whole_events(reply))
    return found[-1].decode() if found else reply.headers.get("x-cellgate-resume", "")


def whole_events(reply: Reply) -> bytes:
    """What came, without the begin of an event."""
    return reply.body[: reply.body.rfind(b"\n\n") + 2]


def joined(parts: list[Reply]) -> Reply:
    """What a client makes of the parts of a stream: all that came, without the ids."""
    body = b"".join(map(whole_events, parts[:-1])) + parts[-1].body
    events = [event for part in parts for event in part.events]
    comments = sum(part.comments for part in parts)
    last = parts[-1]
    body = _ID.sub(b"", body)
    return replace(parts[0], body=body, events=events, comments=comments, end=last.end, ended_s=last.ended_s)


async def ask_returning(
    stage: Stage, rng: Random, *, path: str = CHAT, away_s: float = 1.0, **fields: Any
) -> Visit:
    """One generation of a client that hangs up at random points, a few times, and then reads on."""
    fields.setdefault("max_tokens", rng.randrange(8, 48))
    visit = await stage.ask(path=path, headers=ON, manner=_leaving(rng), **fields)
    parts, event_id = [visit.reply], last_id(visit.reply)
    while parts[-1].end is End.LEFT and event_id:
        await asyncio.sleep(rng.uniform(0.0, away_s))
        manner = _leaving(rng) if len(parts) < LEAVES_MOST else Manner()
        headers = ON | {"last-event-id": event_id}
        parts.append(await stage.client.request("POST", path, b"", headers, manner))
        if parts[-1].events:
            # Where nothing came, what came before still counts.
            event_id = last_id(parts[-1])
    visit.reply = joined(parts)
    return visit


def _leaving(rng: Random) -> Manner:
    if rng.random() < 0.5:
        return Manner(leave_after_events=rng.randrange(1, 20))
    return Manner(leave_after_s=rng.uniform(0.0, 1.5), read_every_s=rng.choice((0.0, 0.05)))
