"""What KV events cost a gate: CPU to follow 8 units at 20,000 blocks a second in all, and a pick among them.

`python -m loadtests.kv_events_cost` publishes from a process of its own, as vLLM does: per step a prompt of
100 blocks, a block each of 25 streams, and a removal of its own for each block that had to go. Followers,
index and sockets are the product's, in this process. The exit code is 1 when a limit is passed.
"""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import time
from collections import Counter, deque
from typing import Any

import msgpack
import uvloop
import zmq

from cellgate.extras.kv_events.follow import RankFollower
from cellgate.extras.kv_events.wire import KvDecoder, Publisher, ZmqLink, events
from cellgate.policies import POLICIES
from cellgate.router.board import Board
from cellgate.router.kv_index import Lessons
from cellgate.router.nouns import Ask, Evidence, Fleet, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.prefix import PREFIX_LATE_S, Computed, KnownPrefixes, PrefixCache
from cellgate.router.queue import FairRules, Queue
from cellgate.router.unit_state import Lease
from loadtests.kit import progress
from loadtests.kit.processes import free_port

UNITS = 8
BLOCKS_S = 20_000
"""Blocks stored in a second, by all units; as many are removed."""
PROMPT, STREAMS, HELD = 100, 25, 2_000
SECONDS = 10
"""The cheapest of them counts: whatever else runs on the machine can only make one dearer."""
CPU_LIMIT, PICK_LIMIT_US = 0.1, 25.0
PICKS, ROUNDS = 32, 60
BLOCK_TOKENS = 16


def main() -> int:
    """Measures both, or publishes."""
    if len(sys.argv) > 1:
        _publish([int(port) for port in sys.argv[1:]])
        return 0
    # As the gate does (proxy/app.py).
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    with progress.shown("kv-events-cost"):
        share, blocks_s = uvloop.run(_following())
        pick_us = _pick_us()
    followed = f"{blocks_s:,.0f} blocks a second of {UNITS} units"
    print(f"followed {followed}: {share:.1%} of a core, limit {CPU_LIMIT:.0%}")
    print(f"pick of one of {UNITS} units, known by events: {pick_us:.1f} us, limit {PICK_LIMIT_US:g}")
    return int(share > CPU_LIMIT or pick_us > PICK_LIMIT_US or blocks_s < 0.9 * BLOCKS_S)


async def _following() -> tuple[float, float]:
    """The share of a core, and the blocks that were stored in a second."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lessons, counts, loop = Lessons(), Counter[str](), asyncio.get_running_loop()
    ports = [free_port() for _ in range(UNITS)]
    followers = []
    for port in ports:
        known, address = KnownPrefixes(PrefixCache(1), lessons), Publisher(f"tcp://127.0.0.1:{port}")
        follower = RankFollower(
            f"unit-{port}", 0, known, _linked(context, address), loop.time, counts, KvDecoder()
        )
        followers.append(asyncio.create_task(follower.run()))
    command = [sys.executable, "-m", "loadtests.kv_events_cost", *map(str, ports)]
    publisher = await asyncio.to_thread(subprocess.Popen, command)
    try:
        await asyncio.sleep(3.0)
        seconds = [await _second(counts) for _ in range(SECONDS)]
        # One that made up for others before it had larger batches, which are cheaper.
        steady = [one for one in seconds if abs(one[1] / BLOCKS_S - 1.0) < 0.1]
        return min(steady or seconds)
    finally:
        publisher.kill()
        publisher.wait()
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        context.destroy(linger=0)


async def _second(counts: Counter[str]) -> tuple[float, float]:
    """What one second takes at BLOCKS_S blocks, and how many there were."""
    began, cpu, before = time.monotonic(), time.process_time(), counts["messages"]
    await asyncio.sleep(1.0)
    took = time.monotonic() - began
    blocks_s = (counts["messages"] - before) * (PROMPT + STREAMS) / took
    return (time.process_time() - cpu) / took * BLOCKS_S / max(blocks_s, 1.0), blocks_s


def _linked(context: zmq.Context[zmq.Socket[bytes]], address: Publisher) -> Any:
    return lambda: ZmqLink(context, address)


def _publish(ports: list[int]) -> None:
    """One step of each unit in turn, until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in ports]
    for socket, port in zip(sockets, ports, strict=True):
        socket.bind(f"tcp://127.0.0.1:{port}")
    steps = [_Steps(number) for number in range(len(ports))]
    period_s, due, number = (PROMPT + STREAMS) / BLOCKS_S, time.monotonic(), 0
    while True:
        frames = [b"kv", (number // len(ports)).to_bytes(8, "big"), steps[number % len(ports)].next()]
        sockets[number % len(ports)].send_multipart(frames)
        number, due = number + 1, due + period_s
        time.sleep(max(0.0, due - time.monotonic()))


class _Steps:
    """The batches of one unit."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._held: deque[int] = deque()

    def next(self) -> bytes:
        """What one step stores and removes."""
        names = [self._rng.getrandbits(64) for _ in range(PROMPT)]
        stored = [self._stored(names, None)]
        stored += [self._stored([self._rng.getrandbits(64)], names[-1]) for _ in range(STREAMS)]
        self._held += [name for event in stored for name in event["block_hashes"]]
        gone = [self._held.popleft() for _ in range(max(0, len(self._held) - HELD))]
        removed = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in gone]
        packed: bytes = msgpack.packb([time.time(), [*removed, *stored], 0])
        return packed

    def _stored(self, names: list[int], parent: int | None) -> dict[str, Any]:
        tokens = [self._rng.randrange(128_000) for _ in range(len(names) * BLOCK_TOKENS)]
        event = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": tokens,
        }
        more = {"block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None}
        return event | more | {"extra_keys": [None] * len(names), "kv_cache_spec_kind": "full_attention"}


def _pick_us() -> float:
    """Microseconds of CPU in the fastest round."""
    board = Board(Rules(slow_start_s=0.001))
    board.configure(
        Fleet(units=tuple(Unit(f"u{n}", "c", f"http://u{n}:1", ("m",)) for n in range(UNITS))), 0.0
    )
    ask = Ask("m", stream=True, prompt_tokens=256, prompt_bytes=1024, blocks=(11, 12))
    lessons = Lessons()
    for state in board:
        board.observe(Evidence(state.unit.name, Sign.GOOD, Strength.STRONG, "canary", "well", 0.0))
        state.costs.follow(_full(state.costs.prefixes, lessons, ask))
    router = Router(board, POLICIES["prefix_affinity"](), random.Random(1), Queue(FairRules(backlog_s=1e6)))
    assert all(board.held(state, ask.blocks) == 2 for state in board)
    return min(_round(router, ask) for _ in range(ROUNDS)) * 1e6 / PICKS


def _round(router: Router, ask: Ask) -> float:
    began = time.process_time()
    leases = [router.pick(ask, 100.0) for _ in range(PICKS)]
    took = time.process_time() - began
    for lease in leases:
        assert isinstance(lease, Lease)
        lease.commit(100.0)
        router.board.close(lease, 100.0)
    return took


def _full(believed: PrefixCache, lessons: Lessons, ask: Ask) -> KnownPrefixes:
    """A unit that has proven its events with this prompt, and holds it."""
    known, steps = KnownPrefixes(believed, lessons), _Steps(1)
    known.rank(0, 1 << 20)
    known.resume(0)
    for at in range(4):
        for event in events(steps.next()):
            known.apply(0, event, float(at))
        computed = Computed(ask.blocks if not at else (), 2.0, PROMPT * BLOCK_TOKENS, 0, float(at), float(at))
        known.note(computed)
        known.tick(at + PREFIX_LATE_S)
    return known


if __name__ == "__main__":
    sys.exit(main())
