"""Three gates that share a limit over one Redis: how much passes, also while Redis is dead for half a minute.

`python -m loadtests.shared_limits` starts a real redis-server, two simulated units, three gates, and 200
clients that want many times the limit of their tenant. It counts the tokens of all answers by the minute in
which each was asked for. What must hold: in minutes with Redis, what passes is within 5 % of the limit;
while Redis is dead nobody gets anything but an answer or a 429, and at most the limit for each gate passes,
which the gates say.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import uvloop

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess
from loadtests.kit.redis_server import RedisServer, redis_server
from loadtests.kit.report import print_problems, verdict
from loadtests.simunit.process import SimUnit
from loadtests.wire.client import Connection
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

KEY = "sk-drill"
MODEL = "sim"
GATES, CLIENTS, LIMIT = 3, 200, 10_000
ANSWER_TOKENS = 30
SHARE = 0.05
"""How far what passes may be from the limit."""
PAUSE_S = 2.0
"""Between two requests of a client, whatever it got."""
DEAD_S = 30.0
MINUTE_S = 60.0
LATE_S = 3.0
"""A kill comes so long after a minute has begun."""


class Crowd:
    """Clients that ask again and again. `passed` has tokens by minute, `statuses` what they got."""

    def __init__(self, gates: Sequence[GateProcess]) -> None:
        self._gates = gates
        self.passed: Counter[int] = Counter()
        self.statuses: Counter[str] = Counter()

    async def client(self, number: int) -> None:
        """One client, for ever."""
        body = {
            "model": MODEL,
            "max_tokens": ANSWER_TOKENS,
            "messages": [{"role": "user", "content": f"{number} " * 40}],
        }
        asked = post(json.dumps(body).encode(), lines=f"authorization: Bearer {KEY}\r\n")
        port = self._gates[number % len(self._gates)].port
        connection = await Connection.open(port)
        await asyncio.sleep(PAUSE_S * number / CLIENTS)
        while True:
            minute, reply = int(time.time() // MINUTE_S), Reply()
            try:
                await connection.exchange(asked, reply)
                self.statuses[str(reply.status)] += 1
            except OSError as error:
                self.statuses[type(error).__name__] += 1
            if reply.status == 200:
                self.passed[minute] += json.loads(reply.body)["usage"]["total_tokens"]
            if not connection.is_usable:
                connection = await Connection.open(port)
            await asyncio.sleep(PAUSE_S)


async def drill(gates: Sequence[GateProcess], server: RedisServer, *, kills: bool) -> list[str]:
    """Run it; what did not hold."""
    crowd = Crowd(gates)
    await until_minute()
    tasks = [asyncio.create_task(crowd.client(number)) for number in range(CLIENTS)]
    await until_minute()
    minutes = {"shared": int(time.time() // MINUTE_S) - 1}
    if kills:
        await asyncio.sleep(LATE_S)
        server.kill()
        progress.phase("Redis is dead")
        await asyncio.sleep(DEAD_S)
        server.start()
        progress.phase("Redis is back")
        await until_minute()
        minutes["dead for 30 s"] = int(time.time() // MINUTE_S) - 1
        await until_minute()
        minutes["shared again"] = int(time.time() // MINUTE_S) - 1
    # What was asked for in the last moment of the minute.
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    failed = [
        task
        for task in await asyncio.gather(*tasks, return_exceptions=True)
        if not isinstance(task, asyncio.CancelledError)
    ]
    for title, minute in minutes.items():
        print(f"{title}: {crowd.passed[minute]} tokens of {LIMIT} ({crowd.passed[minute] / LIMIT:.1%})")
    print(f"clients got: {dict(crowd.statuses)}")
    return [*problems(crowd, minutes, gates), *(f"a client failed: {each!r}" for each in failed)]


def problems(crowd: Crowd, minutes: dict[str, int], gates: Sequence[GateProcess]) -> list[str]:
    """What did not hold."""
    found = []
    for title, minute in minutes.items():
        least, most = (1 - SHARE) * LIMIT, (1 + SHARE) * LIMIT
        if title.startswith("dead"):
            most *= len(gates)
        if not least <= crowd.passed[minute] <= most:
            found.append(f"{title}: {crowd.passed[minute]} tokens passed, not {least:.0f} to {most:.0f}")
    if others := crowd.statuses.keys() - {"200", "429"}:
        found.append(f"clients got {', '.join(sorted(others))}")
    if len(minutes) > 1:
        said = [gate for gate in gates if "each gate counts its limits alone" in gate.log.read_text()]
        if len(said) < len(gates):
            found.append(f"only {len(said)} of {len(gates)} gates said that they count alone")
    return found


async def until_minute() -> None:
    """Wait for the next minute of the clock."""
    await asyncio.sleep(MINUTE_S - time.time() % MINUTE_S)


def run(*, kills: bool) -> list[str]:
    """Start everything, and drill; what did not hold."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        units = SimUnit.start_all(["a", "b"], step_ms=2)
        for unit in units:
            stack.callback(unit.stop)
        keys = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys.jsonl"
        digest = sha256(KEY.encode()).hexdigest()
        lines = (
            {"key": "drill", "sha256": digest, "tenant": "t"},
            {"tenant": "t", "limits": {"tokens_per_minute": LIMIT}},
        )
        keys.write_text("\n".join(map(json.dumps, lines)))
        settings = {"redis": server.url, "keys": {"file": str(keys)}}
        gates = [stack.enter_context(GateProcess(units, settings=settings)) for _ in range(GATES)]
        return uvloop.run(drill(gates, server, kills=kills))


def main() -> None:
    """Exits with 1 when something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.shared_limits", description=__doc__)
    parser.add_argument("--no-kill", action="store_true", help="only the minute with Redis")
    found = run(kills=not parser.parse_args().no_kill)
    print_problems(found)
    print(verdict(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
