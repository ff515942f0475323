"""Random plans of faults, by seed: two gates, three units, every kind of fault, users of all kinds.

    .venv/bin/python -m tests.scenarios.plans --seeds 1000

Each is played in the simulated world, then judged: by the invariants of the stage (harness.py), and by what
`Plan` adds. In a calm plan at most one unit is hurt at a time, so that nothing may be lost: each request is
answered whole, but for broken streams that no other unit could go on with. In any other plan a request may
be refused, and a stream be broken, but honestly. With `--nonsense` some units answer fast and wrong: in a
calm plan at most a tenth of all answers may be wrong then, and those units gave them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

from cellgate.proxy.config.settings import Timeouts
from tests.scenarios.gates import GatesStage, lose_redis, roll_gates, roll_units
from tests.scenarios.harness import BACK_S, COMPLETIONS, MESSAGES, RESPONSES, RULES
from tests.scenarios.visit import Visit
from tests.sim.agent_speech import AGENT
from tests.sim.behaviour import Break
from tests.sim.chaos import BYTES_PER_S, NONSENSE, Chaos, Strike, behave
from tests.sim.client import Manner
from tests.sim.conversation import End
from tests.sim.engine import Engine
from tests.sim.hurt import kill, stop, stop_core
from tests.sim.timing import Timing
from tests.sim.world import World

UNITS = 3
USERS = 8
ACT_S = (8.0, 15.0)
LOOKED_AT_S = 2.0
LIES_MOST = 0.1
"""The share of answers that may be nonsense."""

STRIKES: dict[str, Strike] = {
    "kill leader": lambda _, engine: kill(engine, 0),
    "kill follower": lambda _, engine: kill(engine, 1),
    "freeze leader": lambda _, engine: stop(engine, 0),
    "freeze follower": lambda _, engine: stop(engine, 1),
    "freeze the leader's engine": lambda _, engine: stop_core(engine),
    "spin leader": behave(spinning=True),
    "spin follower": behave(wedged=True),
    "drop link": lambda world, engine: _drop_link(world, engine),
    "partition leader": lambda world, engine: world.net.partition(engine.address),
    "partition follower": lambda world, engine: world.net.partition(engine.nodes[-1].agent),
    "refuse": lambda world, engine: world.net.refuse(engine.address),
    "reset": lambda world, engine: world.net.reset(engine.address),
    "slow link": lambda world, engine: world.net.slow(engine.address, BYTES_PER_S),
    "slow": behave(slow=5.0),
    "slow rank": behave(slow=2.0),
    "error burst": behave(error_rate=0.5),
    "unavailable burst": behave(error_rate=0.5, error_status=503),
    "lying health": behave(wedged=True, keepalive_s=1.0),
    "in-stream error": behave(breaks=Break.ERROR, breaks_after_events=3),
    "truncated streams": behave(breaks=Break.TRUNCATE, breaks_after_events=3),
    "torn events, then an error": behave(breaks=Break.ERROR, breaks_after_events=5, torn=True),
    "garbage": behave(garbage=True),
    "restart": lambda _, engine: engine.restart(),
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NOT_CONTINUABLE: dict[str, dict[str, Any]] = {
    "forced call": {"tools": TOOLS, "tool_choice": "required"},
    "n": {"n": 2},
    "logprobs": {"logprobs": True},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {}}},
}


def _drop_link(world: World, engine: Engine) -> None:
    """Nothing passes between the leader and its follower, nor to the agent beside that one."""
    engine.behaviour.wedged = True
    world.net.partition(engine.nodes[-1].agent)


ACTS: dict[str, Callable[[GatesStage, Random], Awaitable[None]]] = {
    "rolling restart of units": lambda stage, _: roll_units(stage, stage.engines),
    "rolling restart of gates": lambda stage, _: roll_gates(stage),
    "Redis outage": lose_redis,
}
"""What befalls more than one unit. While units are rolled no other fault is dealt."""


class Plan:
    """One plan, played. `dealt` are the faults, `visits` the requests by kind, `wrong` what must not be."""

    def __init__(self, seed: int, *, nonsense: bool = False) -> None:
        self.rng = rng = Random(seed)
        self._strikes = STRIKES | NONSENSE if nonsense else STRIKES
        self.is_calm = rng.random() < 0.7
        self.stage = GatesStage(
            seed,
            UNITS,
            timing=Timing(rng.choice((0.05, 0.3)), rng.choice((0.02, 0.05))),
            followers=1,
            version="0.32.0",
            continue_across_builds=True,
            agents=rng.random() < 0.5,
            max_in_flight=64,
            timeouts=Timeouts(head_hold_s=2.0),
        )
        self.dealt: Counter[str] = Counter()
        self.visits: dict[str, list[Visit]] = {}
        self._chaos: Chaos | None = None
        self._users_are_here = True
        self.stage.play(self._scenario())
        self.wrong = self._check()

    # -- what happens --------------------------------------------------------------------------------------

    async def _scenario(self) -> None:
        rng = self.rng
        users = [asyncio.ensure_future(self._use()) for _ in range(USERS)]
        self._deal_on()
        await asyncio.sleep(rng.uniform(*ACT_S))
        name = rng.choice(list(ACTS))
        self.dealt[name] += 1
        if name == "rolling restart of units":
            await self._let_be()
            await ACTS[name](self.stage, rng)
            self._deal_on()
        else:
            await ACTS[name](self.stage, rng)
        await asyncio.sleep(rng.uniform(*ACT_S))
        await self._let_be()
        self._users_are_here = False
        await asyncio.gather(*users)

    def _deal_on(self) -> None:
        strikes = {name: self._noting(name, strike) for name, strike in self._strikes.items()}
        at_most = 1 if self.is_calm else UNITS
        engines = list(self.stage.engines.values())
        self._chaos = Chaos(
            self.stage.world,
            engines,
            at_most,
            strikes,
            pause_s=(1.0, 4.0),
            lasting_s=(1.0, 8.0),
            cured=self.stage.cured,
        )

    def _noting(self, name: str, strike: Strike) -> Strike:
        def noted(world: World, engine: Engine) -> None:
            self.dealt[name] += 1
            if name in NONSENSE:
                self.stage.liars.add(engine.name)
            strike(world, engine)

        return noted

    async def _let_be(self) -> None:
        """Heal everything, and wait until that is seen."""
        assert self._chaos is not None
        self._chaos.stop()
        await asyncio.sleep(LOOKED_AT_S)
        await self.stage.until(self.stage.all_up, BACK_S + RULES.slow_start_s)

    # -- who asks ------------------------------------------------------------------------------------------

    async def _use(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 0.5))
        while self._users_are_here:
            kind = self.rng.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
            visit = await self.stage.ask(max_tokens=self.rng.randrange(4, 48), **KINDS[kind][1](self.rng))
            self.visits.setdefault(kind, []).append(visit)
            if not visit.is_answered:
                await asyncio.sleep(0.5)

    # -- what must be so -----------------------------------------------------------------------------------

    def outcomes(self) -> Counter[str]:
        """How many requests ended in which way."""
        return Counter(
            "left" if kind == "leaves" else _outcome(visit)
            for kind, visits in self.visits.items()
            for visit in visits
        )

    def _check(self) -> list[str]:
        """What is wrong with the answers beyond what the stage itself looks at: in a sentence each."""
        wrong, lies = [], 0
        for kind, visits in self.visits.items():
            for visit in visits:
                if kind == "leaves":
                    continue
                if visit.unit in self.stage.liars:
                    lies += not visit.is_answered or visit.dishonesty() is not None
                elif sentence := wrong_with(kind, visit, is_calm=self.is_calm):
                    wrong.append(f"{visit.request_id} ({kind}, {visit.unit}): {sentence}")
        asked = sum(map(len, self.visits.values()))
        if self.is_calm and lies > LIES_MOST * asked:
            wrong.append(f"{lies} of {asked} answers were nonsense")
        return wrong


def wrong_with(kind: str, visit: Visit, *, is_calm: bool) -> str:
    """What is wrong with an answer beyond what the stage itself looks at, in a sentence; empty: nothing."""
    reply = visit.reply
    if visit.is_answered:
        return ""
    told = f"{reply.status} {reply.end} {reply.error}"
    if reply.status is None:
        return f"it was cut without a word ({reply.end})"
    if reply.status == 200 and not reply.events:
        return "" if kind == "whole" and reply.body else f"nothing was shown: {told}"
    if reply.status == 200:
        is_honest = visit.code is not None and reply.end is End.TRUNCATED
        errors = sum(b'"error"' in event for event in reply.events)
        if not is_honest or errors != 1:
            return f"a broken stream had {errors} error events and ended in {told}"
        return "" if kind == "not continuable" or not is_calm else f"it was not continued: {told}"
    # An error that a unit itself answered is shown where the budget for retries is spent.
    is_units_own = visit.unit is not None and reply.status in (500, 503)
    return f"it was refused: {told}" if is_calm and not is_units_own else ""


def _outcome(visit: Visit) -> str:
    if visit.is_answered:
        return "whole"
    if visit.reply.status != 200:
        return "refused" if visit.unit is None else "told a unit's own error"
    return "broken, honestly"


def _usage(rng: Random) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if rng.random() < 0.5 else {}


def _sampling(rng: Random) -> dict[str, Any]:
    """With a temperature of 0 it may be computed again as well."""
    return {"temperature": 0} if rng.random() < 0.5 else {}


def _not_continuable(rng: Random) -> dict[str, Any]:
    return NOT_CONTINUABLE[rng.choice(list(NOT_CONTINUABLE))]


def _agent(rng: Random) -> dict[str, Any]:
    """An answer with reasoning, text and tool calls, all or some of them."""
    asked = {"messages": [{"role": "user", "content": f"{AGENT} {rng.random()}"}]}
    tools = {"tools": TOOLS, "tool_choice": "auto"} if rng.random() < 0.7 else {}
    return {**asked, **tools, **_usage(rng), **rng.choice(AGENTS_SAMPLING)}


AGENTS_SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"seed": 1}, {"reasoning_effort": "low"})

KINDS: dict[str, tuple[int, Callable[[Random], dict[str, Any]]]] = {
    "chat": (10, _usage),
    "completions": (3, lambda rng: {"path": COMPLETIONS, **_usage(rng)}),
    "messages": (3, lambda rng: {"path": MESSAGES, **_sampling(rng)}),
    "responses": (3, lambda rng: {"path": RESPONSES, **_sampling(rng)}),
    "slow reader": (1, lambda rng: {"manner": Manner(read_every_s=0.05)}),
    "agent": (6, _agent),
    "computed again": (2, lambda rng: _not_continuable(rng) | {"temperature": 0, "n": 1}),
    "not continuable": (4, _not_continuable),
    "whole": (2, lambda rng: {"stream": False}),
    "leaves": (1, lambda rng: {"manner": Manner(leave_after_s=rng.uniform(0.0, 2.0))}),
}
"""How many of some forty requests are of a kind, and what is particular about them."""


# -- many plans --------------------------------------------------------------------------------------------


class Tally:
    """What came of many plans."""

    def __init__(self, *, nonsense: bool) -> None:
        self.plans = self.wrong = 0
        self._nonsense = nonsense
        self.outcomes: Counter[str] = Counter()
        self.continuations: Counter[str] = Counter()
        self.dealt: Counter[str] = Counter()

    def play(self, seed: int) -> None:
        """Play one plan. What is wrong with it is printed at once."""
        try:
            plan = Plan(seed, nonsense=self._nonsense)
        except Exception as error:
            self._tell(f"seed {seed}: {error!r}"[:2000])
            return
        self.outcomes += plan.outcomes()
        self.continuations.update(plan.stage.continuations())
        self.dealt += plan.dealt
        if plan.wrong:
            self._tell(f"seed {seed}, calm={plan.is_calm}: " + "\n  ".join(plan.wrong[:5]))

    def lines(self) -> Iterator[str]:
        """All of it, for people."""
        outcomes = f"{self.outcomes.total()} requests: {_listed(self.outcomes)}"
        yield f"{self.plans} plans, {self.wrong} with violations; {outcomes}"
        yield f"streams that broke: {_listed(self.continuations)}"
        yield f"faults: {_listed(self.dealt)}"

    def _tell(self, line: str) -> None:
        self.wrong += 1
        print(line, flush=True)


def main() -> int:
    """Play plans, print what came of them; also of those before an interrupt. 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description="Random plans of faults in the simulated world.")
    parser.add_argument("--seeds", type=int, default=100, help="how many plans")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--nonsense", action="store_true", help="units answer fast and wrong, too")
    asked = parser.parse_args()
    # A shell lets what it runs in the background ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tally, begun = Tally(nonsense=asked.nonsense), time.monotonic()
    with suppress(KeyboardInterrupt):
        for seed in range(asked.first, asked.first + asked.seeds):
            tally.play(seed)
            tally.plans += 1
            if tally.plans % 50 == 0:
                told = f"{tally.outcomes.total()} requests, {time.monotonic() - begun:.0f} s"
                print(f"... {tally.plans} plans, {told}", flush=True)
    print(*tally.lines(), sep="\n")
    return 1 if tally.wrong else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common() if number)


if __name__ == "__main__":
    sys.exit(main())
