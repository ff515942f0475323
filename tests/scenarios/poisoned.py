"""Poison among random faults, by seed: it never costs more than three units, and it alone is blamed.

`python -m tests.scenarios.poisoned FIRST LAST` plays the seeds from FIRST up to LAST, on all cores.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from dataclasses import dataclass
from random import Random
from typing import Any

from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.request.body import read_prompt
from cellgate.router.poison import Ledger
from tests.scenarios.harness import Stage
from tests.scenarios.visit import Visit, chat, encode
from tests.sim.chaos import STRIKES, Chaos
from tests.sim.client import Client
from tests.sim.loop import START_S
from tests.sim.poison import MARKER, Mode, Poison
from tests.sim.timing import Timing

UNITS = 4
LASTING_S = 30.0
RATE_PER_S = 4.0
DEATHS_MAX = 3
MODES = (Mode.CUT, Mode.CRASH, Mode.LATE, Mode.MID)


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one seed. `deaths`: the most that a prompt cost; `blamed`: innocents taken for poison.

    `rash`: those of them that were not the only one at their deaths.
    """

    seed: int
    mode: Mode | None
    deaths: int
    blamed: int
    rash: int
    refused: int
    asked: int


def poisoned(stage: Stage, mode: Mode) -> Poison:
    """The stage, its engines mortal."""
    poison = Poison(mode)
    for engine in stage.engines.values():
        engine.poison = poison
    return poison


async def drink(stage: Stage, via: Client | None = None, prompt: str = MARKER, **fields: Any) -> Visit:
    """One client asks for it."""
    visit = stage._visit("/v1/chat/completions", body := chat(prompt, **fields))
    headers = {"x-request-id": visit.request_id}
    visit.reply = await (via or stage.client).request("POST", visit.path, encode(body), headers)
    return visit


def play(seed: int) -> Played:
    """Units that are struck at random, one at a time, users, and now and then a client with poison."""
    rng = Random(seed)
    mode = rng.choice(MODES) if seed % 2 else None
    timing = Timing(rng.choice((0.05, 0.5)), max_running=rng.choice((8, 256)))
    stage = Stage(
        seed, UNITS, timing=timing, followers=1, agents=rng.random() < 0.5, timeouts=Timeouts(answer_s=40.0)
    )
    poison = poisoned(stage, mode) if mode is not None else None
    drunk: list[asyncio.Future[Visit]] = []

    async def scenario() -> None:
        chaos = Chaos(stage.world, list(stage.engines.values()), 1, STRIKES, pause_s=(1.0, 10.0))
        visits, due_s = [], stage.now + rng.uniform(1.0, 10.0)
        while stage.now < START_S + LASTING_S:
            tokens, stream = rng.randrange(1, 60), rng.random() < 0.7
            visits.append(asyncio.ensure_future(stage.ask(max_tokens=tokens, stream=stream)))
            if poison is not None and stage.now >= due_s:
                # Another prompt each time: one that is known is refused.
                prompt, due_s = f"{MARKER} {len(drunk)}", stage.now + rng.uniform(8.0, 15.0)
                drunk.append(asyncio.ensure_future(drink(stage, prompt=prompt, stream=stream, max_tokens=99)))
            await asyncio.sleep(rng.expovariate(RATE_PER_S))
        chaos.stop()
        await asyncio.gather(*visits, *drunk)

    stage.play(scenario())
    culprits = {each.result().request_id for each in drunk}
    blamed = [visit for visit in stage.visits if visit.code == "poison_suspected"]
    innocents = [visit for visit in blamed if visit.request_id not in culprits]
    kills = [request_id for _, request_id, _ in poison.kills] if poison is not None else []
    ledger = stage.gate.plane.containment.ledger
    return Played(
        seed,
        mode,
        max((kills.count(each) for each in culprits), default=0),
        len(innocents),
        sum(has_company(ledger, visit) for visit in innocents),
        len(blamed) - len(innocents),
        len(stage.visits),
    )


def has_company(ledger: Ledger, visit: Visit) -> bool:
    """Whether another prompt had met all deaths for which this one was ended, and had not come past one."""
    assert visit.body is not None
    record = ledger.records[read_prompt(visit.body, encode(visit.body)).fingerprint]
    deaths = [mark.death for mark in record.standing]
    others = [ledger.records.get(each) for each in set.intersection(*(death.died for death in deaths))]
    cleared = [
        any(mark.passed and mark.death in deaths for mark in other.marks)
        for other in others
        if other is not None
    ]
    return len(others) - cleared.count(True) > 1


def main() -> int:
    """Play what is asked for; 0 when no prompt cost more than three units, without one nobody was blamed, and
    nobody was blamed who had company.

    An innocent that alone meets two deaths, one of which was another fault, is blamed by the rules.
    """
    first, last = int(sys.argv[1]), int(sys.argv[2])
    with multiprocessing.Pool() as pool:
        played = list(pool.imap_unordered(play, range(first, last)))
    told = [one for one in played if one.deaths > DEATHS_MAX or one.blamed or one.rash]
    wrong = [one for one in told if one.deaths > DEATHS_MAX or one.mode is None or one.rash]
    deaths = [sum(one.deaths == number for one in played if one.mode) for number in range(6)]
    print(f"{len(played)} seeds, {sum(one.asked for one in played)} requests; poison was in half of them")
    print(f"the most that one prompt cost, by seed: {dict(enumerate(deaths))}")
    print(f"innocents blamed that were alone at two deaths: {sum(one.blamed for one in played)}")
    print(f"innocents blamed that were not: {sum(one.rash for one in played)}")
    print(*told, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
