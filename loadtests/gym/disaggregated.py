"""Do roles pay? The same units with roles and without, on loads for which they should and should not.

`python -m loadtests.gym.disaggregated`: four units. Alike, behind the gate and behind least connections; with
roles, behind the gate and behind a router that splits every request. What must hold, as times of what the
same units do behind the gate without roles: long prompts beside long answers, with prefillers: the p99 of the
time between two tokens at most 0.7, the whole time at most 1.05; the mean TTFT at most that of least
connections without roles. Units of the role `both`, whatever the load: TTFT and whole time at most 1.02. Each
plus noise.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from loadtests.gym.cells import AGAIN, GATE, run
from loadtests.gym.counting import AlwaysSplit, LeastConnections
from loadtests.gym.fleets import LONG_CONTEXTS, fleet, with_roles
from loadtests.gym.loads_single import Single
from loadtests.gym.nouns import Fleet, Rival, Run
from loadtests.gym.shapes import Load
from loadtests.gym.world import World
from loadtests.kit.report import columns, print_problems, verdict

MODEL = replace(LONG_CONTEXTS, step_tokens=2048)
"""With vLLM's usual chunks of prompts."""
FAST, SLOW = 200_000.0, 2_000.0
"""Tokens of KV cache a second: 40 GB/s of a model with 200 kB a token, and a hundredth of that."""
LOADS: dict[str, Load] = {
    "mixed": Single(own_tokens=4000, own_median=2000, own_most=24_000, answer_tokens=500),
    "long": Single(own_tokens=8000, own_median=7000, own_most=24_000, answer_tokens=500),
    "short": Single(own_tokens=200, answer_tokens=300),
}
ALWAYS, LEASTCONN = "always split", "leastconn"
SEEDS, REQUESTS = 3, 800
ITL_MOST, WHOLE_MOST, NOT_PAYING_MOST = 0.7, 1.05, 1.02
TTFT_NOISE_S, WHOLE_NOISE_S = 0.003, 0.02


class Case(NamedTuple):
    """Requests a second of a load, and the units with roles: `p` computes prompts, `d` answers, `b` both."""

    load: str
    rate: float
    roles: str
    tokens_s: float = FAST

    @property
    def pays(self) -> bool:
        """Whether roles should: those of role `both` must do no harm."""
        return "p" in self.roles

    def __str__(self) -> str:
        link = "" if self.tokens_s == FAST else ", slow links"
        return f"{self.load} {self.rate:g}/s, {self.roles}{link}"


CASES = (
    Case("mixed", 3.6, "pppd"),
    Case("mixed", 3.6, "ppdd"),
    Case("long", 2.0, "pppd"),
    Case("long", 2.0, "ppdd"),
    Case("mixed", 3.6, "bbbb"),
    Case("mixed", 3.6, "bbbb", SLOW),
    Case("long", 2.0, "bbbb"),
    Case("short", 10.0, "bbbb"),
    Case("short", 25.0, "bbbb"),
)


class Figure(NamedTuple):
    """Means over seeds, in seconds; `itl_s` is the 99th percentile of the time between two tokens."""

    ttft_s: float
    p99_s: float
    itl_s: float
    whole_s: float
    split: float
    refused: float


def figures(case: Case, seeds: int = SEEDS) -> dict[str, Figure]:
    """What came of each way: without roles behind two routers, with roles behind two."""
    names = {"p": "prefill", "d": "decode", "b": "both"}
    alike = fleet("alike", [MODEL] * len(case.roles))
    roles = with_roles("roles", [names[each] for each in case.roles], MODEL, case.tokens_s)  # type: ignore[misc]
    return {
        "alike, gate": _figure(case, alike, GATE, seeds),
        "alike, leastconn": _figure(case, alike, LEASTCONN, seeds),
        "alike, leastconn again": _figure(case, alike, AGAIN, seeds),
        "roles, gate": _figure(case, roles, GATE, seeds),
        "roles, always split": _figure(case, roles, ALWAYS, seeds),
    }


def problems(case: Case, found: dict[str, Figure]) -> Iterator[str]:
    """What did not hold."""
    own, gate, least = found["roles, gate"], found["alike, gate"], found["alike, leastconn"]
    noise = abs(found["alike, leastconn again"].ttft_s / least.ttft_s - 1.0)
    if own.refused:
        yield f"{case}: {own.refused:g} requests refused"
    if case.pays:
        if own.itl_s > ITL_MOST * gate.itl_s:
            yield f"{case}: p99 between tokens {own.itl_s / gate.itl_s:.2f} times, not {ITL_MOST}"
        if own.whole_s > WHOLE_MOST * gate.whole_s:
            yield f"{case}: whole time {own.whole_s / gate.whole_s:.2f} times"
        if own.ttft_s > (1.0 + noise) * least.ttft_s + TTFT_NOISE_S:
            yield f"{case}: TTFT {own.ttft_s / least.ttft_s:.2f} times that of least connections"
        return
    if own.ttft_s > (NOT_PAYING_MOST + noise) * gate.ttft_s + TTFT_NOISE_S:
        yield f"{case}: TTFT {own.ttft_s / gate.ttft_s:.2f} times"
    if own.whole_s > (NOT_PAYING_MOST + noise) * gate.whole_s + WHOLE_NOISE_S:
        yield f"{case}: whole time {own.whole_s / gate.whole_s:.2f} times"


def _figure(case: Case, units: Fleet, rival: str, seeds: int) -> Figure:
    runs = [_run(case, units, rival, seed) for seed in range(1, seeds + 1)]
    calls = [[call for call in run.calls if not call.refused] for run in runs]
    ttfts = [sorted(call.first_at - call.came_at for call in some) for some in calls]
    return Figure(
        fmean(map(fmean, ttfts)),
        fmean(each[int(0.99 * len(each))] for each in ttfts),
        fmean(_itl_p99_s(run.gaps) for run in runs),
        fmean(fmean(call.ended_at - call.came_at for call in some) for some in calls),
        fmean(run.transfers for run in runs),
        fmean(len(run.calls) - len(some) for run, some in zip(runs, calls, strict=True)),
    )


def _run(case: Case, units: Fleet, rival: str, seed: int) -> Run:
    made = LOADS[case.load].make(random.Random(f"{case.load} {seed}"), case.rate, REQUESTS)
    if rival in (GATE, AGAIN):
        return run(units, made, rival, seed)
    world = World(units)
    kind = AlwaysSplit if rival == ALWAYS else LeastConnections
    rivals: list[Rival] = [kind(world, random.Random(f"{seed} {rival}"))]
    return world.run(made, rivals)


def _itl_p99_s(gaps: Sequence[tuple[float, int]]) -> float:
    left = 0.01 * sum(count for _, count in gaps)
    for gap_s, count in reversed(gaps):
        left -= count
        if left <= 0.0:
            return gap_s
    return 0.0


def _line(name: str, found: Figure, than: Figure) -> tuple[str, ...]:
    return (
        name,
        f"{found.ttft_s:.3f}",
        f"{found.ttft_s / than.ttft_s:.2f}",
        f"{found.p99_s:.2f}",
        f"{1000 * found.itl_s:.1f}",
        f"{found.itl_s / than.itl_s:.2f}",
        f"{found.whole_s:.2f}",
        f"{found.whole_s / than.whole_s:.2f}",
        f"{found.split / REQUESTS:.0%}",
    )


def main() -> None:
    """Exits with 1 when something did not hold."""
    argparse.ArgumentParser(
        prog="python -m loadtests.gym.disaggregated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    bad: list[str] = []
    for case in CASES:
        found = figures(case)
        head = (str(case), "TTFT, s", "x", "p99", "ITL p99, ms", "x", "whole, s", "x", "split")
        print(columns([head, *(_line(name, each, found["alike, gate"]) for name, each in found.items())]))
        print(flush=True)
        bad += problems(case, found)
    print_problems(bad)
    print(verdict(bad))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
