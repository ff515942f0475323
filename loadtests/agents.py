"""Drill: one of four units dies under agents' sessions, and no session may lose a turn.

`python -m loadtests.agents`: each session sends all that was said before with every turn, as agents do. What
must hold: each turn is answered as a whole stream, those of the unit that died too. The exit code is 1 when
one is not, or when the unit had no turn to lose: that proves nothing.
"""

import asyncio
import random
import sys
import time

import aiohttp
import orjson

from loadtests.kit import progress
from loadtests.kit.faults import FAULTS
from loadtests.kit.gate import GateProcess, metric_sum
from loadtests.kit.report import print_problems, verdict
from loadtests.simunit.process import sim_units

SESSIONS, BEFORE_S, AFTER_S = 32, 6.0, 10.0
TIMING = {"step_ms": 20, "prefill_tokens_per_s": 20_000}
SYSTEM = " ".join(f"s{number}" for number in range(1500))
DONE = b"data: [DONE]"


async def converse(http: aiohttp.ClientSession, url: str, number: int, until: float) -> int:
    """The turns of one session; how many there were. Raises what broke one."""
    rng, turns = random.Random(number), 0
    said = [{"role": "system", "content": SYSTEM}]
    while time.monotonic() < until:
        words = " ".join(f"w{rng.randrange(9999)}" for _ in range(300))
        said.append({"role": "user", "content": words})
        said.append({"role": "assistant", "content": await answer(http, url, said)})
        turns += 1
        await asyncio.sleep(rng.uniform(0.1, 0.8))
    return turns


async def answer(http: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]) -> str:
    """The text of one answer. Raises RuntimeError when it is not whole."""
    body = {"messages": messages, "stream": True, "max_tokens": 24}
    async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
        text = await reply.read()
    if reply.status != 200 or DONE not in text:
        raise RuntimeError(f"{reply.status}: {text[-200:]!r}")
    events = [orjson.loads(line[6:]) for line in text.splitlines() if line[:6] == b"data: " and line != DONE]
    if any("error" in event for event in events):
        raise RuntimeError(f"an error in the stream: {text[-200:]!r}")
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def run() -> list[str]:
    """What did not hold."""
    with sim_units(("a", "b", "c", "d"), **TIMING) as units, GateProcess(units) as gate:
        until = time.monotonic() + BEFORE_S + AFTER_S
        async with aiohttp.ClientSession() as http:
            sessions = [asyncio.create_task(converse(http, gate.url, n, until)) for n in range(SESSIONS)]
            await asyncio.sleep(BEFORE_S)
            FAULTS["kill-leader"].hurt(units[1], 1)
            ends = await asyncio.gather(*sessions, return_exceptions=True)
        page = await asyncio.to_thread(gate.metrics)
    lost = [f"session {number}: {end}" for number, end in enumerate(ends) if not isinstance(end, int)]
    moved = metric_sum(page, "cellgate_retries_total", f'unit="{units[1].name}"')
    moved += metric_sum(page, "cellgate_continuations_total", 'result="continued"')
    turns = sum(end for end in ends if isinstance(end, int))
    print(f"{SESSIONS} sessions, {turns} turns, {moved:g} of them moved elsewhere; {len(lost)} sessions lost")
    return lost if moved else [*lost, "proves nothing: the unit that died had no turn"]


@progress.shown("agents")
def main() -> int:
    """0 when no session lost a turn."""
    problems = asyncio.run(run())
    print(verdict(problems))
    print_problems(problems, most=10)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
