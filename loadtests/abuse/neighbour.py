"""The neighbour: a well-behaved client in a process of its own, which asks 50 times a second, come what may.

It asks for streams of the same units as abusers do, from an address of its own.

`python -m loadtests.abuse.neighbour PORT MODEL ADDRESS KEY` prints a line of JSON for each answer.
What must stay true: a request is due by the clock, whether those before it were answered or not, and goes
out on a connection on which nothing else waits; so a gate that stands still is seen by each request that
it would have served.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from loadtests.wire.client import Connections
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

PER_S = 50
PATIENCE_S = 30.0
ADDRESS = "127.0.0.9"
TOKENS = 4
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it was due (`time.monotonic`), how late it was sent, how long it waited for its first
    token. `status` is 0 for a stream without a proper end.
    """

    due_at: float
    late_s: float
    wait_s: float
    status: int


class Neighbour:
    """The neighbour's process, as the suite knows it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self._asked: list[Asked] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, port: int, model: str, key: str = "", address: str = ADDRESS) -> Neighbour:
        """Start one that asks the gate at `port` for `model`, with a key where there are any."""
        command = (sys.executable, "-m", "loadtests.abuse.neighbour", str(port), model, address, key)
        pipe = asyncio.subprocess.PIPE
        # In the session of the abuser it would be late whenever that, the gate and the units are busy.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, cwd=_ROOT, start_new_session=True
        )
        return cls(process)

    async def stop(self) -> None:
        """End it."""
        self._process.terminate()
        await self._process.wait()
        await self._reading

    async def between(self, since: float, until: float) -> list[Asked]:
        """All requests that were due then, once each of them has its answer or has given up."""
        wanted = round((until - since) * PER_S)
        give_up_at = time.monotonic() + PATIENCE_S + 5.0
        while True:
            due = [asked for asked in self._asked if since <= asked.due_at < until]
            if len(due) >= wanted - 1 or time.monotonic() > give_up_at:
                return due
            await asyncio.sleep(0.02)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._asked.append(Asked(**json.loads(line)))


def worst_wait_s(asked: Iterable[Asked]) -> float:
    """The longest wait of all."""
    return max((each.wait_s for each in asked), default=PATIENCE_S)


def p99_wait_s(asked: Iterable[Asked]) -> float:
    """The wait that one in a hundred exceeds."""
    waits = sorted(each.wait_s for each in asked)
    return waits[int(0.99 * len(waits))] if waits else PATIENCE_S


async def _ask(gate: Connections, request: bytes, due_at: float) -> None:
    sent_at, said = time.monotonic(), bytearray()
    first_at = 0.0

    def take(data: bytes) -> None:
        nonlocal first_at
        first_at = first_at or time.monotonic()
        said.extend(data)

    reply = Reply(take)
    with suppress(OSError):
        async with asyncio.timeout(PATIENCE_S):
            await gate.exchange(request, reply)
    status = reply.status if reply.is_whole and (reply.status != 200 or b"[DONE]" in said) else 0
    wait_s = (first_at or time.monotonic()) - sent_at
    line = {"due_at": due_at, "late_s": sent_at - due_at, "wait_s": wait_s, "status": status}
    print(json.dumps(line), flush=True)


async def _ask_for_ever(port: int, model: str, address: str, key: str) -> None:
    asked = {"model": model, "messages": [{"role": "user", "content": "Why?"}]}
    body = json.dumps(asked | {"max_tokens": TOKENS, "stream": True}).encode()
    lines = f"authorization: Bearer {key}\r\n" if key else ""
    gate, request = Connections(f"http://127.0.0.1:{port}", source=address), post(body, lines=lines)
    due_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while True:
            due_at += 1 / PER_S
            await asyncio.sleep(due_at - time.monotonic())
            group.create_task(_ask(gate, request, due_at))


def main() -> None:
    """Ask until told to end."""
    uvloop.run(_ask_for_ever(int(sys.argv[1]), *sys.argv[2:]))


if __name__ == "__main__":
    main()
