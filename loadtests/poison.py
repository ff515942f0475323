"""Drill: a prompt that ends the units it comes to, in every way there is, while others use them.

`python -m loadtests.poison` starts 4 fresh units and a fresh gate for each way. What must hold: the prompt
costs at most three units, its client has an end within 10 s, all requests of the others are answered, and
the same prompt again is refused at once without a unit being touched; by a second gate on the same Redis as
well. And when units are killed that nobody's prompt has ended, nobody is refused.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
import uvloop

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.questions import End, Question
from loadtests.kit.redis_server import redis_server
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.users import Users
from loadtests.kit.waiting import repeated
from loadtests.simunit.poison import MARKER, MODES
from loadtests.simunit.process import SimUnit, sim_units
from loadtests.wire.client import Connections
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

UNITS = ("a", "b", "c", "d")
BACK_S = 3.0
DEATHS_MAX = 3
END_S, REFUSED_S = 10.0, 0.010
USERS, RATE_PER_S = 40, 100.0
SHORT, LONG = Question.between((20, 200), (4, 24)), Question.between((50, 500), (20, 100))
AGAIN = 10
KILLS = 3
_LOOK_S = 0.02
_PATIENCE_S = 60.0
_TIMING = {"step_ms": 10, "prefill_tokens_per_s": 50_000}
_SLOW = {"step_ms": 40, "prefill_tokens_per_s": 20_000}


@dataclass(slots=True)
class Findings:
    """Lines for people, and what did not hold."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, line: str) -> None:
        """One thing that was looked at."""
        (self.lines if holds else self.problems).append(line)


@dataclass(frozen=True, slots=True)
class PromptReply:
    """What came of one request with the prompt."""

    status: int
    text: str
    seconds: float

    @property
    def is_suspected(self) -> bool:
        """Whether the gate has said so, by its status or in the stream."""
        return "poison_suspected" in self.text

    @property
    def is_refused(self) -> bool:
        """Whether it came to no unit."""
        return self.status == 502 and self.is_suspected


class Keeper:
    """Restarts units that have died, `BACK_S` later, and counts."""

    def __init__(self, units: Sequence[SimUnit]) -> None:
        self._units = units
        self.deaths = 0
        self._due: dict[str, float] = {}

    def struck(self) -> int:
        """Units that have died, and connections that units have closed."""
        # One that is dead at the moment has closed none.
        alive = [unit for unit in self._units if unit.name not in self._due and unit.is_running()]
        return self.deaths + sum(int(unit.state()["struck"]) for unit in alive)

    def look(self) -> None:
        """See who has died, and start who is due."""
        for unit in self._units:
            if unit.name in self._due:
                if time.monotonic() >= self._due[unit.name]:
                    unit.restart()
                    del self._due[unit.name]
            elif not unit.is_running():
                self.deaths += 1
                self._due[unit.name] = time.monotonic() + BACK_S


@contextmanager
def keeping(units: Sequence[SimUnit]) -> Iterator[Keeper]:
    """Inside, units that die come back."""
    keeper = Keeper(units)
    with repeated(keeper.look, _LOOK_S):
        yield keeper


async def send_prompt(gate: Connections, *, stream: bool = True) -> PromptReply:
    """Ask for it once, and read to the end."""
    message = {"role": "user", "content": f"old lace and {MARKER}"}
    body = {"messages": [message], "stream": stream, "max_tokens": 64}
    began_s, parts = time.monotonic(), list[bytes]()
    reply = Reply(parts.append)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await gate.exchange(post(orjson.dumps(body)), reply)
    except OSError as error:
        # Behind an error event comes a cut.
        parts.append(repr(error).encode())
    text = (reply.body + b"".join(parts)).decode()
    return PromptReply(reply.status, text, time.monotonic() - began_s)


async def send_again(gate: Connections) -> list[PromptReply]:
    """Ask for it some more times."""
    return [await send_prompt(gate, stream=bool(number % 2)) for number in range(AGAIN)]


async def in_mode(mode: str, workers: int = 1) -> Findings:
    """One way to die, among users, before a gate of so many processes."""
    found = Findings()
    with _fleet(1, workers, poison=mode, **_TIMING) as (units, (gate,)), keeping(units) as keeper:
        async with Users(gate.url, USERS, SHORT) as users, Connections(gate.url) as way:
            await asyncio.sleep(4.0)
            began = len(users.answers), time.monotonic()
            reply = await send_prompt(way)
            await asyncio.sleep(1.0)
            struck = await asyncio.to_thread(keeper.struck)
            replies = await send_again(way)
            await asyncio.sleep(BACK_S + 3.0)
            rate = (len(users.answers) - began[0]) / (time.monotonic() - began[1])
        _of_prompt(found, reply, struck)
        await _of_refusals(found, replies, gate, keeper, struck)
    _of_others(found, users, rate)
    return found


async def two_gates() -> Findings:
    """What one gate has found out the other one does not send."""
    found = Findings()
    with _fleet(2, poison="crash", **_TIMING) as (units, (first, second)), keeping(units) as keeper:
        async with Connections(first.url) as way, Connections(second.url) as other:
            reply = await send_prompt(way)
            await asyncio.sleep(0.3)
            struck = await asyncio.to_thread(keeper.struck)
            replies = await send_again(other)
        _of_prompt(found, reply, struck)
        await _of_refusals(found, replies, second, keeper, struck)
        page = await asyncio.to_thread(second.metrics)
        heard = metric_sum(page, "cellgate_redis_messages_total", 'kind="bans",way="received"')
        found.expect(heard >= 1, f"the second gate has heard of {heard:.0f} by Redis")
    return found


async def kills(pause_s: float) -> Findings:
    """Units die that nobody's prompt has ended."""
    found = Findings()
    with _fleet(1, **_SLOW) as (units, (gate,)), keeping(units) as keeper:
        async with Users(gate.url, 100, LONG) as users:
            await asyncio.sleep(5.0)
            for unit in units[:KILLS]:
                unit.kill()
                await asyncio.sleep(pause_s)
            await asyncio.sleep(8.0)
        page = await asyncio.to_thread(gate.metrics)
        ended, refused = (
            metric_sum(page, "cellgate_poison_requests_total", f'result="{result}"')
            for result in ("ended", "refused")
        )
        found.expect(keeper.deaths == KILLS, f"{keeper.deaths} units were killed, {pause_s:g} s apart")
        found.expect(ended + refused == 0, f"{ended + refused:.0f} were taken for poison")
    _of_others(found, users, None)
    return found


def _of_prompt(found: Findings, reply: PromptReply, struck: int) -> None:
    found.expect(0 < struck <= DEATHS_MAX, f"{struck} deaths")
    line = f"its client: {reply.status}, poison_suspected {reply.is_suspected}, after {reply.seconds:.2f} s"
    found.expect(reply.is_suspected and reply.seconds < END_S, line)


async def _of_refusals(
    found: Findings, replies: Sequence[PromptReply], gate: GateProcess, keeper: Keeper, struck: int
) -> None:
    """What the same prompt got while others asked, and how fast once they do not."""
    async with Connections(gate.url) as way:
        quiet = sorted(reply.seconds for reply in await send_again(way))
    statuses = dict(Counter(reply.status for reply in replies))
    found.expect(all(reply.is_refused for reply in replies), f"the same again: {statuses}")
    usual_s, last_s = quiet[len(quiet) // 2], quiet[-1]
    line = f"refused within {1000 * usual_s:.1f} ms (median of {len(quiet)}), at most {1000 * last_s:.1f} ms"
    found.expect(usual_s < REFUSED_S, line)
    touched = await asyncio.to_thread(keeper.struck) - struck
    found.expect(touched == 0, f"{touched} units touched by those")


def _of_others(found: Findings, users: Users, rate: float | None) -> None:
    ends = Counter(answer.end() for answer in users.answers)
    lost = ends.total() - ends[End.WHOLE]
    speed = "" if rate is None else f", {rate:.0f} a second"
    found.expect(lost == 0, f"others: {ends.total()} requests{speed}, {lost} lost")
    found.problems += [answer.why() for answer in users.answers if answer.end() is not End.WHOLE][:5]
    if rate is not None and rate < RATE_PER_S:
        found.lines.append(f"fewer than {RATE_PER_S:.0f} a second: the machine has other work to do")


@contextmanager
def _fleet(
    gates: int, workers: int = 1, **options: object
) -> Iterator[tuple[list[SimUnit], list[GateProcess]]]:
    """Units and gates, which share a Redis if they are several; nothing of them is left afterwards."""
    with ExitStack() as stack:
        settings: dict[str, object] = {"workers": workers}
        if gates > 1:
            settings["redis"] = stack.enter_context(redis_server()).url
        units = stack.enter_context(sim_units(UNITS, **options))
        yield units, [stack.enter_context(GateProcess(units, settings=settings)) for _ in range(gates)]


@progress.shown("poison")
def main() -> int:
    """Run all of it, or what is named; 0 when everything holds."""
    rounds: dict[str, Callable[[], Coroutine[Any, Any, Findings]]] = {
        **{mode: partial(in_mode, mode) for mode in MODES},
        "two workers": partial(in_mode, "crash", 2),
        "two gates": two_gates,
        **{f"kills {pause_s:g} s apart": partial(kills, pause_s) for pause_s in (0.5, 1.5, 4.0)},
    }
    parser = argparse.ArgumentParser(prog="python -m loadtests.poison", description=__doc__)
    parser.add_argument("--only", action="append", choices=rounds, help="one of them; may be repeated")
    failed = 0
    for name in parser.parse_args().only or rounds:
        progress.phase(f"{name}, {failed} failed")
        found = uvloop.run(rounds[name]())
        print(f"{name}: {verdict(found.problems)}")
        print(*(f"  {line}" for line in found.lines), sep="\n", flush=True)
        print_problems(found.problems)
        failed += bool(found.problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
