"""Stored responses that gates share: who made one, at which unit, so that each gate finds it.

A key for each, of which its maker and its id cannot be read: a hash of both. Its value names the unit, and
is signed as all that gates say (redis_client/signing.py). Written at once, and again where Redis came back
empty; a gate that does not know a response asks here before it says that there is none. Rules:
1. No other request waits for Redis, and this one STORED_ANSWER_S at most.
2. What a gate forgets it removes: Redis has no more than the gates together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from itertools import islice

import orjson

from cellgate.extras.redis_client.connect import Connect
from cellgate.extras.redis_client.redis_names import Names
from cellgate.extras.redis_client.servers import Command
from cellgate.extras.redis_client.signing import Signer
from cellgate.proxy.control.stored_responses import StoredResponse, StoredResponses
from cellgate.proxy.process.tasks import end_tasks

STORED_ANSWER_S = 0.5
STORED_KEPT_S = 86_400
AT_ONCE, WAITING_MAX = 64, 65_536
STORED_LOOK_EVERY_S = 2.0
"""How often the newest one is looked for: where it is missing, Redis came back empty."""
STORED_PAUSE_S = 0.5


class SharedResponses:
    """The part of one gate."""

    def __init__(self, stored: StoredResponses, connect: Connect, names: Names, signer: Signer) -> None:
        self._stored = stored
        self._client, self._asking = connect(), connect()
        self._names = names
        self._signer = signer
        self._due: dict[StoredResponse, bool] = {}
        """To be written, or (False) removed."""
        self._newest: StoredResponse | None = None
        self.written = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        stored.on_made.append(self._made)
        stored.on_forgotten.append(self._forgotten)

    def start(self) -> None:
        """Begin, and run until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._forever(), name="redis responses")

    async def close(self) -> None:
        """End, with what is still to be written."""
        if self._task is not None:
            with suppress(Exception):
                await self._write()
            await end_tasks(self._task)
        for client in (self._client, self._asking):
            with suppress(Exception):
                await client.disconnect()

    async def find(self, response: str, payer: str) -> StoredResponse | None:
        """What gates know of a response. Never raises."""
        key = self._key(response, payer)
        try:
            (found,) = await self._asking.exchange([("GET", key)], STORED_ANSWER_S)
            if not isinstance(found, bytes) or not self._signer.believes(key, found, age_s=STORED_KEPT_S):
                return None
            unit = orjson.loads(found).get("unit")
        except Exception:  # Whatever is wrong there, the request is refused as one that nobody knows.
            with suppress(Exception):
                await self._asking.disconnect()
            return None
        return StoredResponse(response, payer, unit) if isinstance(unit, str) else None

    def _made(self, one: StoredResponse) -> None:
        self._newest = one
        self._put(one, is_kept=True)

    def _forgotten(self, one: StoredResponse) -> None:
        self._put(one, is_kept=False)

    def _put(self, one: StoredResponse, *, is_kept: bool) -> None:
        if len(self._due) < WAITING_MAX:
            self._due[one] = is_kept
        self._wake.set()

    async def _forever(self) -> None:
        while True:
            try:
                await self._write()
                self._wake.clear()
                if not self._due:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(STORED_LOOK_EVERY_S):
                            await self._wake.wait()
                if not self._due and self._newest is not None and await self._is_gone(self._newest):
                    self._due |= dict.fromkeys(self._stored, True)
            except Exception:  # The link says what is wrong with Redis.
                with suppress(Exception):
                    await self._client.disconnect()
                await asyncio.sleep(STORED_PAUSE_S)

    async def _write(self) -> None:
        while self._due:
            part = dict(islice(self._due.items(), AT_ONCE))
            await self._client.exchange(list(self._commands(part.items())))
            self.written += len(part)
            for one, is_kept in part.items():
                if self._due.get(one) is is_kept:
                    del self._due[one]

    async def _is_gone(self, one: StoredResponse) -> bool:
        (found,) = await self._client.exchange([("GET", self._key(one.id, one.payer))])
        return found is None

    def _commands(self, rows: Iterable[tuple[StoredResponse, bool]]) -> Iterable[Command]:
        for one, is_kept in rows:
            key = self._key(one.id, one.payer)
            if is_kept:
                document = self._signer.sign(key, orjson.dumps({"v": 1, "unit": one.unit}))
                yield "SET", key, document, "PX", STORED_KEPT_S * 1000
            else:
                yield "DEL", key

    def _key(self, response: str, payer: str) -> str:
        owner = self._stored.owner(response, payer)
        return self._names.response(blake2b(f"{owner}\n{response}".encode(), digest_size=16).hexdigest())
