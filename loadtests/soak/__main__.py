"""Soak: waves of a thousand clients, and whether the gate is afterwards as it was before.

`python -m loadtests.soak` looks from outside. What must hold: connections, leases, descriptors, threads and
memory return to where they were; a client that leaves takes its unit's connection with it within 100 ms;
clients that never read cost bounded memory. The exit code is 1 when something of it does not.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from loadtests.kit import processes, progress
from loadtests.kit.gate import GateProcess, Vitals
from loadtests.kit.questions import Question
from loadtests.kit.report import print_problems, verdict
from loadtests.simunit.process import SimUnit, sim_units
from loadtests.soak.crowd import KINDS, FailedError, Kind, Place, never_read
from loadtests.soak.engines import Engines, watched
from loadtests.wire.client import Connections

UNITS = ("a", "b")
TIMING = {"step_ms": 100, "prefill_tokens_per_s": 50_000, "max_num_seqs": 1024, "num_gpu_blocks": 32768}
MODEL = "sim-" + "x" * 4000
EVENT_KB = 4.2
"""The model's name is in every event: so large, few of them fill every buffer on the way."""

START_PER_S = 333
SETTLE_S = 10.0
LEAVE_LIMIT_S = 0.1
RSS_GROWTH_MB = 3.0
"""Allowed over three waves of a kind: 1 KB a client, and whoever leaked one of its connections, leases or
tasks would lose more than that.
"""

WARM_UPS = 4
"""Waves before memory is compared. The allocator settles slowly: of ten waves of clients that come and go the
first three made RSS grow by 3.8 MB, and the seven after them by 1.3 MB, to a level that it kept.
"""

PROBES_PER_UNIT = 6

UNREAD_LIMIT_KB = 160
"""For a client that never reads: 64 KiB of write buffer, one read on top of it, connections and objects."""

IDLE_PER_UNIT = 15
"""Three probes a second open a connection to each unit, and each is kept for 4 s after that."""

_FILES = 8192


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave of clients. `peak` has the most of each vital; `inside` is left at the units, which have made
    `made_kb` a client; `delays_s` are of those that left and `unseen` of them never got to an engine.
    """

    before: Vitals
    peak: Vitals
    after: Vitals
    settled_s: float
    inside: int
    made_kb: float
    delays_s: list[float]
    unseen: int
    failures: list[str]

    def line(self) -> str:
        """The wave for people: each vital before, at its peak, after."""
        triples = [
            f"{name} {_short(getattr(self.before, name))}/{_short(getattr(self.peak, name))}"
            f"/{_short(getattr(self.after, name))}"
            for name in Vitals.__slots__
        ]
        line = ", ".join(triples) + f"; settled in {self.settled_s:.1f} s"
        if self.delays_s:
            p50, p99, most = (1000 * _share(self.delays_s, share) for share in (0.5, 0.99, 1.0))
            line += f"; units saw clients leave after {p50:.0f} ms (p50), {p99:.0f} (p99), {most:.0f} (max)"
            line += f", {self.unseen} not at all"
        return line


class Soak:
    """Waves of clients against one gate."""

    def __init__(self, gate: GateProcess, units: Sequence[SimUnit], clients: int, place: Place) -> None:
        self._gate = gate
        self._units = units
        self._clients = clients
        self._place = place
        self._rng = random.Random(1)

    async def wave(self, kind: Kind) -> Wave:
        """Let the clients of one kind come, and wait until the gate has forgotten them."""
        for unit in self._units:
            await asyncio.to_thread(unit.fault, "slow", factor=kind.slow)
        before = await self.vitals()
        samples = [before]
        sampling = asyncio.create_task(self._sample(samples))
        with watched(self._units) as engines:
            ends = await asyncio.gather(*(self._client(kind, n / START_PER_S) for n in range(self._clients)))
            sampling.cancel()
            made_kb = await asyncio.to_thread(engines.tokens) * EVENT_KB / self._clients
            after, inside, settled_s = await self._settle(before, engines)
        left_at = [end for end in ends if isinstance(end, float)]
        delays_s = engines.delays_s(left_at)
        return Wave(
            before=before,
            peak=Vitals(*(max(getattr(each, name) for each in samples) for name in Vitals.__slots__)),
            after=after,
            settled_s=settled_s,
            inside=inside,
            made_kb=made_kb,
            delays_s=delays_s,
            unseen=len(left_at) - len(delays_s),
            failures=[end for end in ends if isinstance(end, str)],
        )

    async def vitals(self) -> Vitals:
        """How the gate is now."""
        return await asyncio.to_thread(self._gate.vitals)

    async def _client(self, kind: Kind, delay_s: float) -> float | str | None:
        """When the client left, or what went wrong, or None for one that stayed to the end."""
        await asyncio.sleep(delay_s)
        question = Question.draw(self._rng, prompt_tokens=20, max_tokens=kind.max_tokens)
        try:
            return await kind.behave(self._place, question)
        except (FailedError, OSError) as error:
            return str(error) or repr(error)

    async def _settle(self, before: Vitals, engines: Engines) -> tuple[Vitals, int, float]:
        began_at = time.monotonic()
        while True:
            now, inside = await self.vitals(), await asyncio.to_thread(engines.inside)
            took_s = time.monotonic() - began_at
            if (not inside and not not_back(before, now)) or took_s > SETTLE_S:
                return now, inside, took_s
            await asyncio.sleep(0.1)

    async def _sample(self, samples: list[Vitals]) -> None:
        while True:
            await asyncio.sleep(0.25)
            samples.append(await self.vitals())


def not_back(before: Vitals, now: Vitals) -> list[str]:
    """What has not returned to where it was, but for memory and for the idle connections to units."""
    idle = IDLE_PER_UNIT * len(UNITS)
    descriptors = before.descriptors - before.unit_connections + idle
    # A probe may be connecting, which is a task of its own.
    tasks = before.tasks + PROBES_PER_UNIT * len(UNITS)
    bounds = {"unit_connections": idle, "descriptors": descriptors, "tasks": tasks}
    bounds |= {name: getattr(before, name) for name in ("clients", "in_flight", "waiting", "threads")}
    return [f"{getattr(now, name)} {name}" for name, most in bounds.items() if getattr(now, name) > most]


def problems_of(kind: Kind, waves: Sequence[Wave], idle: Vitals) -> list[str]:
    """Why a kind fails; empty when it passes. `idle`: before all clients."""
    warm, measured = waves[WARM_UPS - 1], waves[WARM_UPS:]
    problems = [f"{len(w.failures)} clients failed, first: {w.failures[0]}" for w in waves if w.failures]
    for wave in waves:
        left_behind = not_back(waves[0].before, wave.after) + [f"{wave.inside} at the units"] * bool(
            wave.inside
        )
        problems += [f"left behind: {what}" for what in left_behind]
        if wave.delays_s and (p99_s := _share(wave.delays_s, 0.99)) > LEAVE_LIMIT_S:
            problems.append(f"units saw clients leave after {1000 * p99_s:.0f} ms (p99)")
    growth_mb = waves[-1].after.rss_mb - warm.after.rss_mb
    if growth_mb > RSS_GROWTH_MB:
        problems.append(f"RSS grew by {growth_mb:.1f} MB over {len(measured)} waves")
    if kind.behave is never_read:
        if (each_kb := _held_kb(waves, idle)) > UNREAD_LIMIT_KB:
            problems.append(f"{each_kb:.0f} KB held for each client that never reads")
        if (made_kb := min(wave.made_kb for wave in waves)) < 2 * UNREAD_LIMIT_KB:
            problems.append(
                f"proves nothing: units made {made_kb:.0f} KB a client, little more than may be held"
            )
    return problems


def _held_kb(waves: Sequence[Wave], idle: Vitals) -> float:
    """RSS at its peak for each client. Too much rather than too little: what clients before left is in it."""
    return max((w.peak.rss_mb - idle.rss_mb) * 1024 / max(1, w.peak.clients) for w in waves)


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, round(share * len(ordered)) - 1)]


def _short(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


async def _run(clients: int, waves: int) -> int:
    with sim_units(UNITS, model=MODEL, **TIMING) as units, GateProcess(units, max_in_flight=clients) as gate:
        place = Place(gate.port, Connections(gate.url, keep=False))
        soak = Soak(gate, units, clients, place)
        idle = gate.vitals()
        passed = [await _passes(soak, kind, waves, idle) for kind in KINDS]
        return 0 if all(passed) else 1


async def _passes(soak: Soak, kind: Kind, count: int, idle: Vitals) -> bool:
    waves = []
    for number in range(1 - WARM_UPS, count + 1):
        progress.phase(f"{kind.name}, wave {number} of {count}")
        waves.append(await soak.wave(kind))
        print(f"{kind.name}, {f'wave {number}' if number > 0 else 'warm-up'}: {waves[-1].line()}", flush=True)
    problems = problems_of(kind, waves, idle)
    growth_mb = waves[-1].after.rss_mb - waves[WARM_UPS - 1].after.rss_mb
    line = f"RSS {growth_mb:+.1f} MB since the warm-up"
    if kind.behave is never_read:
        made_kb = min(wave.made_kb for wave in waves)
        line += (
            f"; held {_held_kb(waves, idle):.0f} KB for each client, of {made_kb:.0f} KB that its unit made"
        )
    print(f"{kind.name}: {verdict(problems)}; {line}")
    print_problems(problems)
    return not problems


@progress.shown("soak")
def main() -> int:
    """Run all kinds; 0 when everything returned to where it was."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.soak", description=__doc__)
    parser.add_argument("--clients", type=int, default=1000, help="clients of each wave")
    parser.add_argument(
        "--waves", type=int, default=3, help=f"waves of each kind, after {WARM_UPS} that warm up"
    )
    args = parser.parse_args()
    processes.raise_files(_FILES)
    return uvloop.run(_run(args.clients, args.waves))


if __name__ == "__main__":
    sys.exit(main())
