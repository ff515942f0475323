"""The law of equals, by seed: units whose answers are the same function of request and chance stay UP.

    .venv/bin/python -m tests.scenarios.equals --seeds 500
    .venv/bin/python -m tests.scenarios.equals --more --seeds 60
    .venv/bin/python -m tests.scenarios.equals --mirror --seeds 100

A scene has units that are all alike, clients that may know the rules, and one kind of odd answer
(tests/sim/odd.py), given by chance to anybody, or to those who ask for it. Nobody may leave UP, and what the
gate computes besides is a few hundredths. Its mirror has one unit that does so more often, by half of all:
it must go, and come back when it is mended.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

from cellgate.router.board import Flip
from cellgate.router.nouns import Verdict
from tests.scenarios.harness import Stage
from tests.scenarios.visit import Visit
from tests.sim.behaviour import Behaviour
from tests.sim.client import Manner
from tests.sim.engine import CANARY
from tests.sim.http_server import Request
from tests.sim.odd import BAD, CUT, KINDS, MORE, MORE_TIMING, OF_MODELS, TIMING, Asked, Kind, Odd

LASTING_S = 40.0
UNITS = range(2, 9)
CLIENTS = ("one", "many", "one beginning", "adversary")
PROBABILITIES = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
TOKENS = 60.0
"""Of an answer, on average."""
TOKENS_MAX = 400
EXTRA_MOST = 0.02
"""What the gate may have computed besides, as a share of all tokens."""
WORSE = 0.5
"""By so much one unit is odd more often, in the mirror."""
WORSE_UNIT = "b"
OUT_S, OUT_ANSWERS = 5.0, 30
"""A unit that is worse is out by one of both."""
BACK_S = 15.0
SUSPECT_S = 2.75
"""A unit is suspect for no longer than it takes to find out that it hangs."""
IDLE_BESIDE = 6
"""A unit stands idle while an equal one has so many requests."""
BEGINNING = "You are one of the assistants. " * 40
_EVERY, _TIMING = {**KINDS, **MORE, **CUT}, {**TIMING, **MORE_TIMING}
_MARK = re.compile(rb"odd ([01]\.\d+)")
_LIMIT = re.compile(rb'"max_(?:completion_)?tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Scene:
    """What is played. `chance`: of an odd answer to anybody; clients that ask for one name their own chance,
    in `asked` of their requests. `canaries`: those, and the known prompt, are answered so as well.
    """

    seed: int
    kind: str
    chance: float
    units: int
    clients: str
    streams: float
    rate: int
    asked: float
    canaries: bool = False

    @classmethod
    def draw(cls, seed: int, kinds: Sequence[str]) -> Scene:
        rng = Random(seed)
        clients = rng.choice(CLIENTS)
        is_asked = clients == "adversary" or rng.random() < 0.4
        return cls(
            seed,
            kinds[seed % len(kinds)],
            0.0 if is_asked else rng.choice(PROBABILITIES),
            rng.choice(UNITS),
            clients,
            rng.choice((0.0, 0.5, 1.0)),
            rng.choice((1, 4, 12)),
            rng.choice((0.1, 0.5, 1.0)) if is_asked else 0.0,
            rng.random() < 0.3 and kinds[seed % len(kinds)] in OF_MODELS,
        )


class Unit:
    """What an engine of a scene answers: `more` often than the others."""

    def __init__(self, scene: Scene, rng: Random, more: float = 0.0) -> None:
        self._scene, self._rng, self.more = scene, rng, more
        self.at_canaries = False

    def __call__(self, request: Request) -> Odd | None:
        """An odd answer, or None."""
        given_id = request.headers.get("x-request-id", "")
        if not request.path.startswith("/v1/") or (given_id.startswith(CANARY) and not self.at_canaries):
            return None
        mark = _MARK.search(request.body)
        chance = (float(mark[1]) if mark is not None else self._scene.chance) + self.more
        if self._rng.random() >= chance:
            return None
        limit = _LIMIT.search(request.body)
        tokens = int(limit[1]) if limit is not None else 16
        return _EVERY[self._scene.kind](Asked(b'"stream":true' in request.body, tokens, self._rng))


class Played:
    """A scene that was played; one unit is odd so much `more` often. `shots`: what befell units; `extra`:
    tokens computed besides, as a share; `copies`: questions of the gate itself, as a share of all requests;
    `out_s`, `out_answers`, `back_s`: when the worse unit went, after how many answers, and how long after it
    was mended it was back; `idle`: for which part of the time a unit stood idle beside one with IDLE_BESIDE
    requests.
    """

    def __init__(self, scene: Scene, *, mirror: bool = False, more: float = 0.0) -> None:
        self.scene = scene
        # Of odd timing engines without counters show the most.
        is_blind = scene.kind in _TIMING and scene.seed % 2 == 1
        self.stage = stage = Stage(scene.seed, scene.units, is_blind=is_blind)
        self.visits: list[Visit] = []
        self.out_s: float | None = None
        self.out_answers: int | None = None
        self.back_s: float | None = None
        self.idle = 0.0
        self._goes_on = True
        stage.liars.update(stage.engines)
        self._flips: list[Flip] = []
        stage.gate.plane.on_flip.append(self._flips.append)
        rng = Random(scene.seed + 7)
        self._units = {name: Unit(scene, rng, more * (name == WORSE_UNIT)) for name in stage.engines}
        for name, engine in stage.engines.items():
            engine.behaviour = Behaviour(oddly=self._units[name])
        stage.play(self._mirrored() if mirror else self._scenario())
        self.shots = stage.shots()
        self._count()

    async def _scenario(self) -> None:
        for unit in self._units.values():
            unit.at_canaries = self.scene.canaries
        await self._load(LASTING_S)

    async def _mirrored(self) -> None:
        stage, bad = self.stage, WORSE_UNIT
        load = asyncio.ensure_future(self._load(3 * LASTING_S))
        await asyncio.sleep(2.0)
        self._units[bad].more, begun, before = WORSE, stage.now, len(stage.picks(bad))
        try:
            await stage.until(lambda: stage.verdict(bad) is Verdict.DOWN, LASTING_S)
            self.out_s, self.out_answers = stage.now - begun, len(stage.picks(bad)) - before
            self._units[bad].more, mended = 0.0, stage.now
            await stage.until(lambda: stage.verdict(bad) is Verdict.UP, LASTING_S)
            self.back_s = stage.now - mended
        except AssertionError:
            pass
        self._goes_on = False
        await load

    async def _load(self, seconds: float) -> None:
        until = self.stage.now + seconds
        watching = asyncio.ensure_future(self._watch())
        await asyncio.gather(*(self._client(number, until) for number in range(self.scene.rate)))
        watching.cancel()

    async def _watch(self) -> None:
        looks, found = 0, 0
        while True:
            await asyncio.sleep(0.1)
            there = [state.in_flight for state in self.stage.gate.board if state.case.verdict is Verdict.UP]
            looks, found = looks + 1, found + (max(there, default=0) >= IDLE_BESIDE and min(there) == 0)
            self.idle = found / looks

    async def _client(self, number: int, until: float) -> None:
        rng, scene = Random(self.scene.seed * 100 + number), self.scene
        key = {"one": "one", "many": f"client-{number}"}.get(scene.clients, "")
        while self.stage.now < until and self._goes_on:
            fields = fields_of(scene, rng)
            headers = {"authorization": f"Bearer {key}"} if key else {}
            visit = await self.stage.ask(headers=headers, manner=Manner(timeout_s=60.0), **fields)
            self.visits.append(visit)
            await asyncio.sleep(rng.expovariate(4.0) if visit.is_answered else 0.05)

    def _count(self) -> None:
        """What was computed for whom."""
        ids, clients, own = {visit.request_id for visit in self.visits}, Counter[str](), 0
        best, self.asks = Counter[str](), 0
        for engine in self.stage.engines.values():
            every = [*engine.odd_served, *(each for some in engine.served.values() for each in some)]
            for served in every:
                if served.request_id in ids:
                    clients[served.request_id] += served.tokens
                    best[served.request_id] = max(best[served.request_id], served.tokens)
                elif not served.request_id.startswith(CANARY):
                    own += served.tokens
                    self.asks += 1
        useful = sum(best.values())
        self.extra = (own + sum(clients.values()) - useful) / max(1, useful)
        self.copies = self.asks / max(1, len(self.visits))

    def problems(self) -> list[str]:
        """What must not be, of a scene of equals."""
        found = self.shots if self.scene.kind not in _TIMING else self._long_shots()
        if self.extra > EXTRA_MOST:
            found.append(f"extra load of {self.extra:.1%}")
        refused = Counter(visit.code for visit in self.visits if visit.unit is None and visit.code)
        return found + [f"{count} of {len(self.visits)} got {code}" for code, count in refused.items()]

    def _long_shots(self) -> list[str]:
        """What befell units, but for suspicions that were over as soon as a canary is: they cost nobody
        anything.
        """
        found, since = [shot for shot in self.shots if "up -> suspect" not in shot], dict[str, float]()
        for flip in self._flips:
            if flip.after is Verdict.SUSPECT:
                since[flip.unit] = flip.at
            elif (suspect_s := flip.at - since.pop(flip.unit, flip.at)) > SUSPECT_S:
                found.append(f"{flip.unit}: suspect for {suspect_s:.1f} s")
        return found

    def mirror_problems(self) -> list[str]:
        """What must not be, of its mirror."""
        found = [shot for shot in self.shots if not shot.startswith("b: ")]
        if self.out_s is None or self.out_answers is None:
            return [*found, f"not out within {LASTING_S:.0f} s"]
        if self.out_s > OUT_S and self.out_answers > OUT_ANSWERS:
            found.append(f"out after {self.out_s:.1f} s, {self.out_answers} answers")
        if self.back_s is None or self.back_s > BACK_S:
            found.append(f"back after {self.back_s} s")
        return found


def fields_of(scene: Scene, rng: Random) -> dict[str, Any]:
    """The body of a request of a scene."""
    text = f"{rng.getrandbits(40):x}"
    if scene.clients in ("one beginning", "adversary"):
        # They meet on one unit.
        text = BEGINNING + text
    if rng.random() < scene.asked:
        # Who wants a unit out asks for what is most likely to differ.
        text += f" odd {rng.choice((0.3, 0.5, 0.7)) if scene.clients == 'adversary' else 1.0}"
    tokens = min(TOKENS_MAX, 8 + int(rng.expovariate(1 / TOKENS)))
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "stream": rng.random() < scene.streams, "max_tokens": tokens}


def mirror_scene(seed: int) -> Scene:
    """A scene that has a mirror: its kind is doubtful, and half of all is left to add."""
    rng, drawn = Random(seed), Scene.draw(seed, sorted(BAD))
    return Scene(
        seed, drawn.kind, rng.choice((0.0, 0.1, 0.3, 0.5)), drawn.units, "many", drawn.streams, 12, 0.0
    )


def check_timing(seed: int) -> tuple[Scene, list[str], float]:
    """As `check`, of answers that only come in an odd way."""
    return check(seed, TIMING)


def check_more(seed: int) -> tuple[Scene, list[str], float]:
    """As `check`, of ordinary answers of newer engines."""
    return check(seed, MORE)


def check(seed: int, kinds: Mapping[str, Kind] = KINDS) -> tuple[Scene, list[str], float]:
    """Play one scene: it, what was wrong (a law of the stage that was broken, too), and the extra load."""
    scene = Scene.draw(seed, sorted(kinds))
    try:
        played = Played(scene)
    except AssertionError as error:
        return scene, str(error).splitlines(), 0.0
    return scene, played.problems(), played.extra


def check_mirror(seed: int) -> tuple[Scene, list[str], float]:
    """Play one mirror: it, what was wrong, and when the unit was out."""
    scene = mirror_scene(seed)
    try:
        played = Played(scene, mirror=True)
    except AssertionError as error:
        return scene, str(error).splitlines(), 0.0
    return scene, played.mirror_problems(), played.out_s or 0.0


def main() -> int:
    """Play many."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.equals", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--mirror", action="store_true")
    parser.add_argument("--timing", action="store_true", help="only answers that come in an odd way")
    parser.add_argument("--more", action="store_true", help="ordinary answers of newer engines")
    args = parser.parse_args()
    play: Callable[[int], tuple[Scene, list[str], float]] = (
        check_mirror if args.mirror else check_timing if args.timing else check_more if args.more else check
    )
    wrong, figures = 0, []
    with ProcessPoolExecutor(args.lanes) as lanes:
        for scene, found, figure in lanes.map(play, range(args.first, args.first + args.seeds)):
            figures.append(figure)
            wrong += bool(found)
            if found:
                print(scene, *found[:6], sep="\n    ", flush=True)
    what = "seconds until out" if args.mirror else "extra load"
    figures.sort()
    middle, most = figures[len(figures) // 2], figures[-1]
    print(f"{args.seeds} scenes, {wrong} with problems; {what}: median {middle:.3g}, most {most:.3g}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
