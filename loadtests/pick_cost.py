"""What it costs to read a request and pick a unit for it: CPU of `read_ask` and `Router.pick`, and memory.

`python -m loadtests.pick_cost` measures inside of the product, for what it measures takes microseconds. Of
many short rounds the fastest counts, in CPU time of the process, since whatever else runs on the machine can
only make one slower. The exit code is 1 when a limit is passed.
"""

from __future__ import annotations

import gc
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from time import process_time_ns
from typing import TypeVar

import orjson

from cellgate.policies import POLICIES
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.prompt import read_prompt
from cellgate.router.board import Board
from cellgate.router.cost_model import SURE
from cellgate.router.nouns import Ask, Evidence, Fleet, Load, Rules, Sign, Strength, Unit
from cellgate.router.pick import Router
from cellgate.router.prefix import PrefixCache
from cellgate.router.queue import FairRules, Queue
from cellgate.router.unit_state import Lease

ROUNDS = 60
AT_ONCE = 32
"""Calls in a round; a unit has room for all of them."""
PROMPTS = 8
"""As many different ones take turns, whose first half is common to all: some is cached, some is not."""
IN_FLIGHT = 4
"""Requests that each unit has already: one that is idle is cheaper to look at."""
BLOCKS, CACHES = 2_000_000, 16
NOW = 100.0

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: what was measured, and what it may be at most."""

    what: str
    value: float
    unit: str
    limit: float

    def __str__(self) -> str:
        verdict = "" if self.value <= self.limit else "  TOO MUCH"
        return f"{self.what:<48} {self.value:8.1f} {self.unit}  limit {self.limit:g}{verdict}"


def main() -> int:
    """Measures all and prints it; 1 when anything passes its limit."""
    if sys.argv[1:] == ["--index"]:
        print(_index())
        return 0
    small, large = _bodies(1 << 10), _bodies(400 << 10)
    read_small, read_large = _reading_us(small), _reading_us(large)
    pick_small, pick_large, pick_many = _picking_us(small, 8), _picking_us(large, 64), _picking_us(small, 500)
    figures = [
        Figure("read_ask + pick: prompt of 1 kB, 8 units", read_small + pick_small, "us", 19.0),
        Figure("read_ask + pick: prompt of 400 kB, 64 units", read_large + pick_large, "us", 2000.0),
        Figure("pick: prompt of 1 kB, 500 units", pick_many, "us", 150.0),
        Figure("2 million blocks of prompts indexed", _indexed_mb(), "MB", 300.0),
    ]
    parts = {
        "read_ask, 1 kB": read_small,
        "  of that JSON": _least_us(orjson.loads, small),
        "  of that the blocks of the prompt": _least_us(read_prompt, [orjson.loads(body) for body in small]),
        "pick, 1 kB, 8 units": pick_small,
        "  of that the lease": _leasing_us(small),
        "read_ask, 400 kB": read_large,
        "pick, 400 kB, 64 units": pick_large,
    }
    print(*figures, *(f"  {what:<46} {value:8.1f} us" for what, value in parts.items()), sep="\n")
    return int(any(figure.value > figure.limit for figure in figures))


def _bodies(size: int) -> list[bytes]:
    """Chat requests of different prompts of so many bytes."""
    rng = random.Random(size)
    common = _text(rng, size // 2)
    return [
        orjson.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": common},
                    {"role": "user", "content": _text(rng, size // 2)},
                ],
                "stream": True,
                "max_tokens": 256,
            }
        )
        for _ in range(PROMPTS)
    ]


def _text(rng: random.Random, size: int) -> str:
    return " ".join(f"{rng.getrandbits(28):07x}" for _ in range(size // 8))


def _router(units: int) -> Router:
    """Units that are UP, well known, and have some work. None is too busy for more."""
    board = Board(Rules(slow_start_s=0.001))
    names = [f"u{number}" for number in range(units)]
    fleet = Fleet(units=tuple(Unit(name, "c", f"http://{name}:1", ("m",)) for name in names))
    board.configure(fleet, 0.0)
    for name in names:
        board.observe(Evidence(name, Sign.GOOD, Strength.STRONG, "canary", "well", 0.0))
        board.report(Load(name, NOW, running=IN_FLIGHT, kv_use=0.3, kv_tokens=500_000))
        board.units[name].costs.rates.followed = SURE
        for _ in range(IN_FLIGHT):
            board.open(name, Ask("m", stream=True, prompt_tokens=500, prompt_bytes=2000), NOW, retry=False)
    board.tick(NOW)
    return Router(board, POLICIES["prefix_affinity"](), random.Random(1), Queue(FairRules(backlog_s=1e6)))


def _reading_us(bodies: list[bytes]) -> float:
    return _least_us(read_ask, bodies)


def _picking_us(bodies: list[bytes], units: int) -> float:
    """With the lease that is opened; it is closed again outside of what is measured."""
    router = _router(units)

    def pick(ask: Ask) -> Lease:
        lease = router.pick(ask, NOW)
        assert isinstance(lease, Lease)
        return lease

    return _least_us(pick, _asks(bodies), lambda lease: _end(router.board, lease))


def _leasing_us(bodies: list[bytes]) -> float:
    board = _router(8).board
    return _least_us(
        lambda ask: board.open("u1", ask, NOW, retry=False), _asks(bodies), lambda lease: _end(board, lease)
    )


def _end(board: Board, lease: Lease) -> None:
    """It went well: what was recorded of its prompt stays."""
    lease.commit(NOW)
    board.close(lease, NOW)


def _asks(bodies: list[bytes]) -> list[Ask]:
    return [ask for body in bodies if isinstance(ask := read_ask(body), Ask)]


def _least_us(
    call: Callable[[Given], Made], given: list[Given], undo: Callable[[Made], None] | None = None
) -> float:
    """Microseconds of CPU for a call in the fastest round; `undo` is not counted."""
    # As the gate does (proxy/app.py).
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    turns: Iterator[Given] = cycle(given)
    rounds = []
    for _ in range(ROUNDS):
        these = [next(turns) for _ in range(AT_ONCE)]
        began = process_time_ns()
        made = [call(one) for one in these]
        rounds.append(process_time_ns() - began)
        if undo is not None:
            for one in made:
                undo(one)
    return min(rounds) / AT_ONCE / 1000.0


def _indexed_mb() -> float:
    """In a process of its own, whose memory nothing else has used and given back."""
    done = subprocess.run(
        [sys.executable, "-m", "loadtests.pick_cost", "--index"], capture_output=True, check=True, text=True
    )
    return float(done.stdout)


def _index() -> float:
    """MB that the caches take when all are full, after half of what was held has been replaced."""
    rng, before = random.Random(1), _resident_mb()
    caches = [PrefixCache(BLOCKS // CACHES) for _ in range(CACHES)]
    for cache in caches:
        for _ in range(int(1.5 * BLOCKS / CACHES / 100)):
            prompt = tuple(rng.getrandbits(60) for _ in range(100))
            cache.prove(prompt, cache.record(prompt))
    assert sum(map(len, caches)) > 0.95 * BLOCKS
    return (_resident_mb() - before) * BLOCKS / sum(map(len, caches))


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


if __name__ == "__main__":
    sys.exit(main())
