"""Scenes of tests/scenarios/equals.py on processes: the gate before simulated engines, in real time.

    .venv/bin/python -m tests.scenarios.equals_real --seeds 30

Units are the same function of request and chance: none may leave UP, no request is refused, and what is
computed besides is a few hundredths. One fleet serves all scenes, and each scene has a gate of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import orjson
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from loadtests.kit.gate import GateProcess
from loadtests.simunit.api import Api
from loadtests.simunit.leader import LeaderOptions, run_leader
from loadtests.simunit.nonsense import EVENTS
from loadtests.simunit.process import SimUnit
from loadtests.simunit.sequence import Counts, Timing
from loadtests.wire.blocking import fetch
from loadtests.wire.client import Connections
from loadtests.wire.messages import bearer, post
from loadtests.wire.reply import Reply
from tests.scenarios.equals import EXTRA_MOST, SUSPECT_S, Scene, Unit, fields_of
from tests.sim.engine import CANARY
from tests.sim.http_server import Request
from tests.sim.odd import KINDS, TIMING, Odd

UNITS_MAX = 4
LASTING_S = 10.0
PATIENCE_S = 60.0
FEW_TOKENS = 40
"""A scene of ten seconds has few tokens: so many besides are what a first question costs."""
_CLIENT = "visit-"


# -- an engine ---------------------------------------------------------------------------------------------


class OddUnit:
    """What one simulated engine answers in the present scene, and whom it has answered."""

    def __init__(self, number: int) -> None:
        self.counts = Counts()
        self._number = number
        self._scene: Unit | None = None
        self._seen: Counter[str] = Counter()

    def add_to(self, app: web.Application) -> None:
        """Register."""
        app.router.add_post("/sim/scene", self._begin)
        app.router.add_get("/sim/seen", self._told)
        app.middlewares.append(self._answer)

    async def _begin(self, request: web.Request) -> web.Response:
        scene = Scene(**orjson.loads(await request.read()))
        self._seen.clear()
        self._scene = Unit(scene, Random(scene.seed * 10 + self._number))
        self._scene.at_canaries = scene.canaries
        return web.Response()

    async def _told(self, _: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(self._seen))

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST" or not request.path.startswith("/v1/") or self._scene is None:
            return await handler(request)
        headers = {name.lower(): value for name, value in request.headers.items()}
        body, name = await request.read(), headers.get("x-request-id", "")
        odd = self._scene(Request("POST", request.path, headers, body))
        if odd is not None:
            return await self._play(request, odd, name)
        self._seen[name] += orjson.loads(body).get("max_tokens") or 16
        return await handler(request)

    async def _play(self, request: web.Request, odd: Odd, name: str) -> web.StreamResponse:
        await asyncio.sleep(odd.head_s)
        head, response = {"Content-Type": odd.content_type}, web.StreamResponse()
        if odd.content_type == EVENTS:
            response = web.StreamResponse(status=odd.status, headers=head)
            response.enable_chunked_encoding()
            await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            for wait_s, data, tokens in odd.pieces:
                await asyncio.sleep(wait_s)
                self._seen[name] += tokens
                # Its counters move, as those of an engine that computes it.
                self.counts.generation_tokens += tokens
                self.counts.steps += odd.status == 200
                if response.prepared:
                    await response.write(data)
        if response.prepared:
            return response
        return web.Response(status=odd.status, body=b"".join(each[1] for each in odd.pieces), headers=head)


def serve(number: int) -> int:
    """Be an engine, until standard input ends."""
    odd, add_to = OddUnit(number), Api.add_to

    def add_both(api: Api, app: web.Application) -> None:
        odd.add_to(app)
        odd.counts = api._unit.engine.counts
        add_to(api, app)

    Api.add_to = add_both  # type: ignore[method-assign, assignment]
    options = LeaderOptions(f"u{number}", "tiny", "127.0.0.1", 0, 0, 0.0, True, False)
    return uvloop.run(run_leader(options, Timing()))


@contextlib.contextmanager
def fleet() -> Iterator[list[SimUnit]]:
    """Engines as processes."""
    with contextlib.ExitStack() as stack:
        units = []
        for number in range(UNITS_MAX):
            command = [sys.executable, "-m", "tests.scenarios.equals_real", "--serve", str(number)]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
            units.append(stack.enter_context(SimUnit(f"u{number}", process, {})))
        yield [unit.wait_ready() for unit in units]


# -- a scene -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What became of a scene: requests, refusals of the gate by status, flips, how long one was suspect, and
    tokens, those besides included.
    """

    scene: Scene
    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    flips: list[str] = field(default_factory=list)
    long_s: float = 0.0
    tokens: int = 0
    besides: int = 0

    def problems(self) -> list[str]:
        """What must not be."""
        is_timing = self.scene.kind in TIMING
        found = [flip for flip in self.flips if not (is_timing and "suspect" in flip)]
        if self.long_s > SUSPECT_S:
            found.append(f"suspect for {self.long_s:.1f} s")
        if self.besides > max(FEW_TOKENS, EXTRA_MOST * self.tokens):
            found.append(f"extra load of {self.besides} tokens")
        return found + [f"{count} got {code}" for code, count in self.refused.items()]


async def play(scene: Scene, units: Sequence[SimUnit]) -> Seen:
    """One scene, with a gate of its own."""
    seen = Seen(scene)
    told = orjson.dumps({name: getattr(scene, name) for name in Scene.__slots__})
    for unit in units:
        await asyncio.to_thread(fetch, f"{unit.url}/sim/scene", told)
    with GateProcess(units) as gate:
        connections, until = Connections(gate.url), time.monotonic() + LASTING_S
        clients = (_use(connections, scene, number, until, seen) for number in range(scene.rate))
        begun_at = time.time()
        await asyncio.gather(*clients)
        connections.close()
        since: dict[str, float] = {}
        for flip in gate.flips(begun_at):
            seen.flips.append(flip["line"])
            if flip["after"] == "suspect":
                since[flip["unit"]] = flip["at"]
            else:
                seen.long_s = max(seen.long_s, flip["at"] - since.pop(flip["unit"], flip["at"]))
    await asyncio.to_thread(_count, seen, units)
    return seen


def _count(seen: Seen, units: Sequence[SimUnit]) -> None:
    """What was computed for whom: of several answers to one request, the longest was of use."""
    best = Counter[str]()
    for unit in units:
        for name, tokens in orjson.loads(fetch(f"{unit.url}/sim/seen").body).items():
            if name.startswith(CANARY):
                continue
            seen.tokens += tokens
            if name.startswith(_CLIENT):
                best[name] = max(best[name], tokens)
    seen.besides = seen.tokens - sum(best.values())


async def _use(connections: Connections, scene: Scene, number: int, until: float, seen: Seen) -> None:
    rng = Random(scene.seed * 100 + number)
    key = {"one": "one", "many": f"client-{number}"}.get(scene.clients, "")
    while time.monotonic() < until:
        seen.requests += 1
        lines = bearer(key) + f"x-request-id: {_CLIENT}{number}-{seen.requests}\r\n"
        body = orjson.dumps({"model": "tiny"} | fields_of(scene, rng))
        reply = Reply()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await connections.exchange(post(body, lines=lines), reply)
        except (OSError, TimeoutError) as error:
            seen.refused[type(error).__name__] += 1
        if reply.status >= 400 and not reply.unit:
            seen.refused[str(reply.status)] += 1
        await asyncio.sleep(rng.expovariate(4.0) if reply.is_whole else 0.05)


def main() -> int:
    """Play many."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.equals_real", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve)
    wrong = flips = tokens = besides = 0
    with fleet() as units:
        for seed in range(args.first, args.first + args.seeds):
            drawn = Scene.draw(seed, sorted(KINDS))
            scene = replace(drawn, units=min(drawn.units, UNITS_MAX))
            seen = asyncio.run(play(scene, units[: scene.units]))
            found = seen.problems()
            print(
                scene,
                f"{seen.requests} requests, {seen.besides} of {seen.tokens} tokens besides",
                *found,
                sep="\n    ",
                flush=True,
            )
            wrong, flips = wrong + bool(found), flips + len(seen.flips)
            tokens, besides = tokens + seen.tokens, besides + seen.besides
    print(f"{args.seeds} scenes, {wrong} with problems; {flips} flips; {besides} of {tokens} tokens besides")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
