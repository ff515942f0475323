"""How long until the gate knows that a unit cannot generate, for each fault, by simulated seeds.

`python -m tests.scenarios.detection --seeds 100` prints a row for each fault x agents or none x load or idle.
The exit code is 1 when a limit is exceeded, a request is lost or a healthy unit is shot.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from cellgate.router.nouns import Verdict
from tests.scenarios.harness import Stage
from tests.scenarios.users import Users
from tests.scenarios.visit import Visit
from tests.sim.engine import Engine
from tests.sim.hurt import kill, stop, stop_core
from tests.sim.timing import Timing

STREAMS = 64
FOLLOWERS = 2
TIMING = Timing(step_s=0.05, prefill_tokens_per_s=100_000.0, chunk_tokens=8192)
"""Light enough for one unit alone: who waits for a token after a move waits for the gate, not for a unit."""
WAIT_LIMIT_S = 1.0
"""After detection, for whoever had shown no token."""
SETTLE_S = (2.0, 4.0)
GIVE_UP_S = 20.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`limit_s`: to DOWN with agents (None: no agent sees it), without under load, idle. `keepalive_s`: the
    engine sends comments that often, before and after.
    """

    hurt: Callable[[Stage, Engine], None]
    limit_s: tuple[float | None, float, float]
    keepalive_s: float | None = None


def _behave(**fields: object) -> Callable[[Stage, Engine], None]:
    def hurt(_: Stage, engine: Engine) -> None:
        for name, value in fields.items():
            setattr(engine.behaviour, name, value)

    return hurt


HIDDEN_S = 18.0
"""Of an idle unit whose address goes on answering: until its next canary, and the one that confirms it."""
KILLED = (0.3, 1.0, 5.0)
UNSEEN = (None, 3.0, HIDDEN_S)
FAULTS = {
    "kill leader": Fault(lambda _, engine: kill(engine, 0), KILLED),
    "kill follower": Fault(lambda stage, engine: kill(engine, _follower(stage)), (0.3, 1.0, HIDDEN_S)),
    "freeze leader": Fault(lambda _, engine: stop(engine, 0), (0.5, 3.0, 5.0)),
    "freeze engine core": Fault(lambda _, engine: stop_core(engine), (0.5, 3.0, HIDDEN_S)),
    "freeze follower": Fault(lambda stage, engine: stop(engine, _follower(stage)), (0.5, 3.0, HIDDEN_S)),
    "spin": Fault(_behave(spinning=True), UNSEEN),
    "dropped link": Fault(_behave(wedged=True), UNSEEN),
    "frozen behind comments": Fault(_behave(wedged=True), UNSEEN, keepalive_s=0.5),
    "leader cut off": Fault(
        lambda stage, engine: stage.world.net.partition(engine.address), (None, 3.0, 5.0)
    ),
}


def _follower(stage: Stage) -> int:
    return stage.rng.randint(1, FOLLOWERS)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    fault: str
    agents: bool
    load: bool

    def __str__(self) -> str:
        return ", ".join(self.columns())

    def columns(self) -> tuple[str, str, str]:
        """What tells it from the others."""
        return self.fault, "agents" if self.agents else "none", "load" if self.load else "idle"

    @property
    def limit_s(self) -> float:
        """From the fault to DOWN."""
        with_agents_s, load_s, idle_s = FAULTS[self.fault].limit_s
        if self.agents and with_agents_s is not None:
            return with_agents_s
        return load_s if self.load else idle_s


CASES = tuple(
    Case(name, agents, load)
    for name, fault in FAULTS.items()
    for agents in ((True, False) if fault.limit_s[0] is not None else (False,))
    for load in (True, False)
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `down_s`: from the fault to DOWN; `waited_s`: the longest wait for a first token beyond that;
    `waiting`: how many waited; `broken`: streams that had begun on the unit.
    """

    seed: int
    down_s: float
    waited_s: float = 0.0
    waiting: int = 0
    broken: int = 0
    bad: tuple[str, ...] = ()


def run(case: Case, seed: int, streams: int = STREAMS) -> Outcome:
    """One run of a case. What must not be is in `bad`."""
    outcomes: list[Outcome] = []
    stage = Stage(seed, timing=TIMING, followers=FOLLOWERS, agents=case.agents)
    try:
        stage.play(_scenario(stage, case, streams, outcomes))
    except (AssertionError, ExceptionGroup) as error:
        return Outcome(seed, math.inf, bad=(f"seed {seed}: {str(error)[:300]}",))
    return outcomes[0]


async def _scenario(stage: Stage, case: Case, streams: int, outcomes: list[Outcome]) -> None:
    fault, hurt = FAULTS[case.fault], stage.engines["a"]
    hurt.behaviour.keepalive_s = fault.keepalive_s
    users = Users(stage, streams if case.load else 0)
    await asyncio.sleep(stage.rng.uniform(*SETTLE_S))
    hurt_at = stage.now
    fault.hurt(stage, hurt)
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, GIVE_UP_S)
    down_at = stage.gate.board.units["a"].case.since
    await asyncio.sleep(WAIT_LIMIT_S)
    await users.leave()
    outcomes.append(_account(stage, case, hurt_at, down_at))


def _account(stage: Stage, case: Case, hurt_at: float, down_at: float) -> Outcome:
    down_s, bad = down_at - hurt_at, []
    if down_s > case.limit_s:
        bad.append(f"DOWN after {down_s:.2f} s, the limit is {case.limit_s} s")
    if (flips := stage.flips("b")) != ["up"]:
        bad.append(f"the healthy unit was {flips}")
    waiting = [v for v in stage.visits if v.reply.sent_s <= down_at and not _first_s(v) <= down_at]
    # Who waited for the hurt unit may show no token before it is found out, and must then come to the other.
    waited_s = max((_first_s(visit) - down_at for visit in waiting), default=0.0)
    if not waited_s <= WAIT_LIMIT_S:
        bad.append(f"without a token for {waited_s:.2f} s beyond detection")
    unanswered = [visit for visit in stage.visits if not visit.is_answered]
    lost = [visit for visit in unanswered if visit.unit != "a" or not visit.reply.events]
    bad += [f"{visit.request_id} was lost: {visit.reply.status} {visit.code}" for visit in lost[:3]]
    return Outcome(
        stage.world.seed,
        down_s,
        waited_s,
        len(waiting),
        len(unanswered) - len(lost),
        tuple(f"seed {stage.world.seed}: {each}" for each in bad),
    )


def _first_s(visit: Visit) -> float:
    """When its first token came; infinite when none did."""
    return visit.reply.event_times_s[0] if visit.reply.event_times_s else math.inf


HEADS = (
    "fault",
    "agents",
    "users",
    "DOWN p50",
    "p99",
    "max",
    "limit",
    "waited p99",
    "max",
    "waiting",
    "broken",
)


def cells(case: Case, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """One row for people, in seconds."""
    down_s = sorted(outcome.down_s for outcome in outcomes)
    waited_s = sorted(outcome.waited_s for outcome in outcomes)
    return (
        *case.columns(),
        *(f"{_quantile(down_s, share):.2f}" for share in (0.5, 0.99, 1.0)),
        f"{case.limit_s:.1f}",
        *(f"{_quantile(waited_s, share):.2f}" if case.load else "-" for share in (0.99, 1.0)),
        f"{sum(outcome.waiting for outcome in outcomes) / len(outcomes):.0f}" if case.load else "-",
        f"{sum(outcome.broken for outcome in outcomes) / len(outcomes):.0f}" if case.load else "-",
        "FAILED" if any(outcome.bad for outcome in outcomes) else "passed",
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines with columns as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    """Run the cases that were asked for; 0 when all hold their limits."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.detection", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="runs of each case")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    rows: list[Sequence[str]] = [(*HEADS, "")]
    failed = False
    with ProcessPoolExecutor(args.jobs) as processes:
        for case in CASES:
            if case.fault in (args.fault or FAULTS):
                outcomes = list(processes.map(run, repeat(case), range(args.seeds)))
                bad = [line for outcome in outcomes for line in outcome.bad]
                failed = failed or bool(bad)
                rows.append(cells(case, outcomes))
                print(table((rows[0], rows[-1])), *bad[:5], sep="\n", flush=True)
    print(f"\nAll, in seconds; {args.seeds} runs each:\n{table(rows)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
