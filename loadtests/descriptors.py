"""More clients than a gate has file descriptors for: who finds no room gets 503 at once, and nobody hangs.

`python -m loadtests.descriptors --allowed 20000 --clients 10000` starts the gate with so many, and clients
that each ask for a stream which lasts for minutes. What must hold: each has an answer, 200 or 503, within
10 s; the gate never runs out of descriptors, and its units stay up. The exit code is 1 when something does
not hold. At most 2 % may be reset: who takes a tenth of a second to ask passes for silent.
"""

import argparse
import asyncio
import resource
import sys
import time
from collections import Counter

from loadtests.bench import payload
from loadtests.bench.stage import Stage, stage
from loadtests.bench.targets import SUBJECT
from loadtests.kit import progress
from loadtests.kit.report import print_problems, verdict

LIMIT_S, PATIENCE_S = 10.0, 40.0
RESET_SHARE = 0.02
AT_ONCE, PAUSE_S = 25, 0.1
_USER = "u000001-60000-500"
"""A token a minute."""
_SHORT = "Too many open files"


async def _ask(port: int, seen: list[tuple[str, float]], held: list[asyncio.StreamWriter]) -> None:
    body = payload.ask(_USER, stream=True, tokens=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    began_at = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + body)
            said = (await reader.read(64))[9:12].decode() or "closed"
            if said == "200":
                held.append(writer)
            else:
                writer.close()
    except (OSError, TimeoutError) as error:
        said = type(error).__name__
    seen.append((said, time.monotonic() - began_at))


async def _crowd(port: int, clients: int) -> list[tuple[str, float]]:
    """What each client was answered, and after how long."""
    seen: list[tuple[str, float]] = []
    held: list[asyncio.StreamWriter] = []
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(_ask(port, seen, held))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(PAUSE_S)
    for writer in held:
        writer.close()
    return seen


def problems(seen: list[tuple[str, float]], log: str) -> list[str]:
    """Why it fails; empty when it passes."""
    found, counts = [], Counter(said for said, _ in seen)
    if not counts["503"]:
        found.append("proves nothing: nobody was turned away")
    if hung := [said for said, after_s in seen if after_s > LIMIT_S or said == "TimeoutError"]:
        found.append(f"{len(hung)} of {len(seen)} clients had no answer within {LIMIT_S:g} s")
    other = len(seen) - counts["200"] - counts["503"] - counts["TimeoutError"]
    if other > RESET_SHARE * len(seen):
        found.append(f"{other} of {len(seen)} clients were reset")
    if _SHORT in log:
        found.append("the gate had no descriptor left for a connection")
    if flips := log.count("-> down"):
        found.append(f"{flips} times a unit was taken out")
    return found


def _measured(standing: Stage, clients: int) -> list[str]:
    seen = asyncio.run(_crowd(standing.running[SUBJECT].ports[0], clients))
    for said in sorted({said for said, _ in seen}):
        times = sorted(after_s for word, after_s in seen if word == said)
        print(f"{said:>22}: {len(times):6}, p50 {times[len(times) // 2]:.2f} s, most {times[-1]:.2f} s")
    return problems(seen, (standing.folder_of(SUBJECT) / "router.log").read_text())


@progress.shown("descriptors")
def main() -> int:
    """One crowd; 0 when all holds."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.descriptors", description=__doc__)
    parser.add_argument("--allowed", type=int, default=20_000, help="descriptors of the gate")
    parser.add_argument("--clients", type=int, default=10_000)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.allowed, hard))
    with stage(0, [SUBJECT], 4) as standing:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if standing.missing:
            raise SystemExit(standing.missing[SUBJECT])
        found = _measured(standing, args.clients)
    print(verdict(found))
    print_problems(found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
