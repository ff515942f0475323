"""The leader's side of the collective: start the followers, and in each step wait for every one of them.

What must stay true: nothing here watches a follower outside a step. An idle leader does not know that one has
died, as a real one does not; it learns of it when the next step meets the end of the connection.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtests.simunit.follower import HELLO, MESSAGE, REPLY, Op

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 20.0


class CollectiveBrokenError(Exception):
    """A follower's connection ended during a step."""


@dataclass(frozen=True, slots=True)
class Follower:
    """One follower process and the leader's connection to it."""

    rank: int
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, op: Op, step: int = 0, seconds: float = 0.0) -> None:
        """Send one message; never waits, there is one at a time."""
        self.writer.write(MESSAGE.pack(op.value, step, seconds))


class Collective:
    """All followers of one leader. With none, a step is only the leader's own time."""

    def __init__(self, followers: list[Follower]) -> None:
        self.followers = followers
        self._step = 0
        self._outstanding: dict[int, float] = {}
        self._dropped = False
        self._spinning: int | None = None

    async def step(self, seconds: float, slow_ranks: Mapping[int, float]) -> None:
        """Let every rank compute for `seconds` (a slow one for its factor of that) and wait for all replies.

        Waits for ever if a follower never replies. Raises CollectiveBrokenError when one is gone.
        """
        self._step += 1
        self._outstanding = {f.rank: seconds * slow_ranks.get(f.rank, 1.0) for f in self.followers}
        self._send_outstanding()
        own_part = asyncio.sleep(max(0.0, seconds))
        await asyncio.gather(own_part, *(self._reply_of(follower) for follower in self.followers))

    def drop_messages(self, dropped: bool) -> None:
        """Lose all messages between leader and followers; when that ends, send again what was lost."""
        healed = self._dropped and not dropped
        self._dropped = dropped
        if healed:
            self._send_outstanding()

    def spin(self, rank: int | None) -> None:
        """Make the follower `rank` burn its processor and answer nothing; None ends that."""
        if rank != self._spinning:
            for follower in self.followers:
                if follower.rank == rank:
                    follower.send(Op.SPIN)
                elif follower.rank == self._spinning:
                    follower.send(Op.REST)
        self._spinning = rank

    def pids(self) -> list[dict[str, int]]:
        """The follower processes, for whoever wants to hurt or watch them."""
        return [{"rank": follower.rank, "pid": follower.process.pid} for follower in self.followers]

    async def close(self) -> None:
        """Kill the followers and wait until they are gone."""
        for follower in self.followers:
            with contextlib.suppress(ProcessLookupError):
                follower.process.kill()
        await asyncio.gather(*(follower.process.wait() for follower in self.followers))

    def _send_outstanding(self) -> None:
        if self._dropped:
            return
        for follower in self.followers:
            if follower.rank in self._outstanding:
                follower.send(Op.STEP, self._step, self._outstanding[follower.rank])

    async def _reply_of(self, follower: Follower) -> None:
        """Read until this step's reply: an earlier step's was sent twice, one on a dropped link is lost."""
        answered = False
        while not answered:
            try:
                (step,) = REPLY.unpack(await follower.reader.readexactly(REPLY.size))
            except (asyncio.IncompleteReadError, OSError) as error:
                raise CollectiveBrokenError(f"follower {follower.rank} left step {self._step}") from error
            answered = step == self._step and not self._dropped
        del self._outstanding[follower.rank]


async def start_collective(count: int) -> Collective:
    """Start `count` follower processes and wait for each to connect. Raises TimeoutError if one does not."""
    arrivals: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *streams: arrivals.put_nowait(streams), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    processes = [await _start_follower(rank, port) for rank in range(1, count + 1)]
    followers = []
    async with asyncio.timeout(START_TIMEOUT_S):
        for _ in range(count):
            reader, writer = await arrivals.get()
            (rank,) = HELLO.unpack(await reader.readexactly(HELLO.size))
            followers.append(Follower(rank, processes[rank - 1], reader, writer))
    server.close()
    return Collective(sorted(followers, key=lambda follower: follower.rank))


async def _start_follower(rank: int, port: int) -> Process:
    arguments = ("-m", "loadtests.simunit.follower", "--rank", str(rank), "--leader-port", str(port))
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL
    )
