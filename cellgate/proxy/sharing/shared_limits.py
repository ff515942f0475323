"""Limits that gates share: each takes slices of counters in Redis, in the background (doors/meters.py).

1. No request waits for Redis. Without it each gate counts alone, which is said once.
2. A counter is a number with an expiry: what all gates have taken of one limit in one window of the clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from cellgate.proxy.doors.ledger import LimitLedger
from cellgate.proxy.doors.meters import Meter
from cellgate.proxy.logs.events import Action
from cellgate.proxy.sharing.connect import Connect, in_words
from cellgate.proxy.sharing.redis_client import Command, RedisClient, answered
from cellgate.proxy.sharing.unit_report import Names

PERIOD_S, SOONEST_S = 0.25, 0.02
"""How often slices are taken; and at most so often while limits run low."""
ANSWER_S = 0.3
"""Without an answer for this long, each gate counts alone: that costs nobody a request."""
SLICE = 32
"""So many counters are in one exchange."""
QUIET_BEATS = 4
"""A limit that nobody uses here is looked at once in so many periods."""
KEPT_S = 60
"""How long a counter outlives its window, for clocks that differ."""


class _Due(NamedTuple):
    """A counter to be looked at, what to take of it, and the window that it is of: the meter may go on to the
    next one before its turn comes, or before the answer does.
    """

    counter: str
    meter: Meter
    amount: int
    begins_at: float
    ends_at: float


class SharedLimits:
    """The part of one gate. `gates` gives how many share the limits; `tell` gets each change of state."""

    def __init__(
        self,
        ledger: LimitLedger,
        connect: Connect,
        names: Names,
        gates: Callable[[], int],
        tell: Callable[[Action], None],
        rng: random.Random,
    ) -> None:
        self._ledger = ledger
        self._client = connect()
        self._names = names
        self._gates = gates
        self._tell = tell
        self._rng = rng
        self._low = asyncio.Event()
        self._beats = 0
        ledger.on_low = self._low.set
        ledger.counts.shares = False
        self._was_shared: bool | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, and run until `close`."""
        self._task = asyncio.create_task(self._forever(), name="redis limits")

    async def close(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            # Only here: a task that is cancelled may already be closing connections, and leaves the others.
            with suppress(Exception):
                await self._client.disconnect()

    async def _forever(self) -> None:
        while True:
            try:
                while True:
                    await self._share(self._client)
                    await self._pause()
            except Exception as error:  # No exception may end this task, which has to reconnect.
                self._ledger.stand_alone()
                self._note(shares=False, why=in_words(error))
            with suppress(Exception):
                await self._client.disconnect()
            # With jitter, so that many gates do not reconnect at once.
            await asyncio.sleep(PERIOD_S * self._rng.uniform(0.5, 1.0))

    async def _pause(self) -> None:
        await asyncio.sleep(SOONEST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S - SOONEST_S):
                await self._low.wait()
        self._low.clear()

    async def _share(self, client: RedisClient) -> None:
        """Take slices of all limits in use, once."""
        gates, self._beats = max(1, self._gates()), self._beats + 1
        self._ledger.gates = gates
        due = list(self._due(gates))
        for part in _slices(due):
            commands: list[Command] = []
            for each in part:
                name = self._names.limit(each.counter)
                commands.append(("INCRBY", name, each.amount))
                commands.append(("EXPIREAT", name, int(each.ends_at) + KEPT_S))
            answers = await answered(client, commands, ANSWER_S)
            for each, total in zip(part, answers[::2], strict=True):
                if each.meter.begins_at == each.begins_at:
                    each.meter.took(each.amount, int(total))
        if not due:
            # Whether it answers.
            await answered(client, [("PING",)], ANSWER_S)
        self._note(shares=True)

    def _due(self, gates: int) -> Iterator[_Due]:
        """The limits to be looked at now."""
        for counter, meter in self._ledger.running():
            if not meter.spent and not meter.taken:
                continue
            amount = meter.to_take(gates)
            if amount or self._beats % QUIET_BEATS == 0:
                yield _Due(counter, meter, amount, meter.begins_at, meter.ends_at)

    def _note(self, *, shares: bool, why: str = "") -> None:
        """Say it once when it has changed."""
        self._ledger.counts.shares = shares
        if shares is not self._was_shared:
            if self._was_shared is not None or not shares:
                detail = f"Redis: {why}; at most the limit for each gate passes" if why else ""
                self._tell(Action("limits_shared" if shares else "limits_alone", "gate", detail=detail))
            self._was_shared = shares


def _slices(rows: Iterable[_Due]) -> Iterator[list[_Due]]:
    rest = iter(rows)
    while part := list(islice(rest, SLICE)):
        yield part
