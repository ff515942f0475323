"""Attackers that are made from seeds: how fast they read and write, how much, with which headers, how many.

`python -m loadtests.abuse --generated --seeds N` has each of them attack the units of the neighbour.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass

from loadtests.abuse.client import Client
from loadtests.abuse.nouns import NO_ANSWER_POSSIBLE, Abuse, Got, Place
from loadtests.wire.messages import post

ATTACK_S = 4.0
"""For so long each goes on."""
LOOK_S = 0.05
MOST_MB = 24
"""What one sends in all, at most."""
HEADERS = (
    # None says for whom it asks: this machine is trusted, as an ingress is, and would be believed. What
    # others say of that is tested with real ingresses (tests/real/test_lying_clients.py).
    "x-cellgate-unit: sim\r\n",
    "x-cellgate-explain: 1\r\n",
    "x-gateway-destination-endpoint: 127.0.0.1:1\r\n",
    "X-Haproxy-Server-State: UP; name=b/evil{n}; node=evil{n}; weight=1/2; scur=0/1; qcur=0\r\n",
    "x-gateway-inference-fairness-id: t{n}\r\n",
    "x-priority: -100\r\n",
    "x-session-id: s{n}\r\n",
    "x-request-id: r{n}\r\n",
    "x-cellgate-continue: off\r\n",
    "expect: 100-continue\r\n",
    "authorization: Bearer {n}\r\n",
)


@dataclass(frozen=True, slots=True)
class Attacker:
    """One of them. `write_s` and `read_s` pause between parts; infinite: nothing more is written, or read."""

    connections: int
    body_bytes: int
    stream: bool
    max_tokens: int
    headers: tuple[str, ...]
    part_bytes: int
    write_s: float
    read_s: float
    leaves: bool

    @classmethod
    def of(cls, seed: int) -> Attacker:
        """That of a seed."""
        rng = random.Random(seed)
        size = int(10 ** rng.uniform(2, 6.5))
        most = max(2, MOST_MB * 1_000_000 // size)
        return cls(
            connections=min(most, rng.choice((4, 16, 64, 128, 256))),
            body_bytes=size,
            stream=rng.random() < 0.7,
            max_tokens=rng.choice((1, 20, 500, 5000)),
            headers=tuple(rng.sample(HEADERS, rng.randrange(4))),
            part_bytes=rng.choice((1, 100, 16384, size)),
            write_s=rng.choice((0.0, 0.0, 0.1, 1.5)),
            read_s=rng.choice((0.0, 0.0, 1.0, ATTACK_S)),
            leaves=rng.random() < 0.3,
        )

    async def act(self, place: Place) -> Got:
        """Attack from all connections."""
        got: Got = Counter()
        loop = asyncio.get_running_loop()
        over_at = loop.time() + ATTACK_S
        await asyncio.gather(*(self._one(place, n, over_at, got) for n in range(self.connections)))
        return got

    async def _one(self, place: Place, number: int, over_at: float, got: Got) -> None:
        now = asyncio.get_running_loop().time
        while now() < over_at:
            try:
                client = await Client.open(place.gate.port)
            except OSError:
                got["refused"] += 1
                return
            try:
                await self._write(client, self._request(number), over_at)
                if self.leaves or now() + self.read_s >= over_at:
                    got["left"] += 1
                    await asyncio.sleep(max(0.0, min(self.read_s, over_at - now())))
                    continue
                await asyncio.sleep(self.read_s)
                got[await client.answer(max(0.1, over_at - now())) or "left"] += 1
            finally:
                await client.close()

    async def _write(self, client: Client, data: bytes, over_at: float) -> None:
        now = asyncio.get_running_loop().time
        for at in range(0, len(data), self.part_bytes):
            await client.send(data[at : at + self.part_bytes])
            if self.write_s:
                await asyncio.sleep(self.write_s)
            if now() > over_at:
                return
            if self.part_bytes == 1 and not self.write_s and at > 2000:
                await client.send(data[at + 1 :])
                return

    def _request(self, number: int) -> bytes:
        message = {"role": "user", "content": "a " * (self.body_bytes // 2)}
        asked = {"model": "sim", "messages": [message], "max_tokens": self.max_tokens, "stream": self.stream}
        lines = "".join(each.format(n=number % 250) for each in self.headers)
        return post(json.dumps(asked).encode(), lines=lines)


def generated(seed: int) -> Abuse:
    """The abuse of a seed."""
    attacker = Attacker.of(seed)
    return Abuse(
        f"seed-{seed}",
        str(attacker),
        attacker.act,
        megabytes=2 * MOST_MB,
        requests=20_000,
        answers=NO_ANSWER_POSSIBLE + "|hang|cut",
        is_generated=True,
    )
