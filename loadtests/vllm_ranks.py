"""Drill: a real vLLM engine with two data parallel ranks behind the gate.

`python -m loadtests.vllm_ranks` starts the engine on this machine's CPU (eight processes, some minutes) and
the gate before it. Conversations must find their own beginning in the cache of their rank; then the process
of one rank is stopped under streams, and the unit must be suspected because of that rank; once the process
goes on, the unit comes back. The exit code is 1 when something is not as it should be.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from loadtests.kit import processes, progress
from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.report import print_problems
from loadtests.vllm.install import set_up
from loadtests.vllm.single import serving
from loadtests.vllm.unit import MODEL_NAME
from loadtests.wire.blocking import fetch

SILENCE_S = 90.0
TALKS, TURNS = 6, 4
UNTIL_S = 30.0


async def main() -> int:
    """Run it, and print what was seen."""
    set_up()
    options = ["--data-parallel-size", "2", "--data-parallel-rpc-port", str(processes.free_port())]
    options += ["--enable-prompt-tokens-details", "--block-size", "32"]
    before = set(_ranks_processes())
    async with serving(options) as engine:
        pids = [pid for pid in _ranks_processes() if pid not in before]
        with GateProcess([Named("a", engine)], access_log="json") as gate:
            problems = await asyncio.to_thread(_all, gate, engine, pids)
    print_problems(problems)
    return 1 if problems else 0


def _all(gate: GateProcess, engine: str, pids: list[int]) -> list[str]:
    for rank in (0, 1):
        # The engine shows a rank once it has served.
        fetch(
            f"{engine}/v1/completions",
            _body("Hello", 2),
            lines=f"X-data-parallel-rank: {rank}\r\n",
            silence_s=SILENCE_S,
        )
    shown = _until(lambda: len(_unit(gate)["ranks"]) == 2)
    return [*([] if shown else ["the ranks were not found"]), *_talks(gate), *_stopped(gate, pids)]


def _talks(gate: GateProcess) -> list[str]:
    """Conversations at once, each of which goes on with all that it has said."""
    with ThreadPoolExecutor(TALKS) as pool:
        shares = list(pool.map(lambda number: _talk(gate, number), range(TALKS)))
    logged = [orjson.loads(line) for line in gate.log.read_bytes().splitlines() if b'"rank":' in line]
    logged = [line for line in logged if line["rank"] is not None]
    ranks = Counter(line["rank"] for line in logged)
    print(f"cached share of later turns: {min(shares):.0%} to {max(shares):.0%}; by rank: {dict(ranks)}")
    problems = [] if min(shares) > 0.6 else [f"cached only {shares}"]
    return problems if min(ranks[0], ranks[1]) >= TURNS else [*problems, f"one rank got nearly all: {ranks}"]


def _talk(gate: GateProcess, number: int) -> float:
    """The cached share of the prompts of its later turns."""
    text, cached, asked = f"Talk {number} " + f"about {number} things. " * 60, 0, 0
    for turn in range(TURNS):
        reply = fetch(f"{gate.url}/v1/completions", _body(text, 8), silence_s=SILENCE_S)
        found: Any = orjson.loads(reply.body)
        if turn:
            cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
            asked += found["usage"]["prompt_tokens"]
        text += found["choices"][0]["text"]
    return cached / asked


def _stopped(gate: GateProcess, pids: list[int]) -> list[str]:
    """One rank stands still while the other works."""
    with ThreadPoolExecutor(4 * TALKS) as pool:
        stop_at = time.monotonic() + 8.0
        streams = [pool.submit(_keep_asking, gate, number, stop_at) for number in range(TALKS)]
        time.sleep(2.0)
        os.kill(pids[-1], signal.SIGSTOP)
        stopped_at = time.monotonic()
        found = _until(lambda: _unit(gate)["verdict"] != "up")
        took_s, seen = time.monotonic() - stopped_at, _unit(gate)
        time.sleep(2.0)
        os.kill(pids[-1], signal.SIGCONT)
        back = _until(lambda: _unit(gate)["verdict"] == "up")
        answers = Counter(status for stream in streams for status in stream.result())
    print(f"rank stopped: {seen['verdict']} after {took_s:.1f} s: {seen['reason']}; answers {dict(answers)}")
    said = [line for line in gate.log.read_text().splitlines() if "data parallel rank" in line]
    print(*said[:2], sep="\n")
    return [
        *([] if found else ["the stopped rank was not found"]),
        *([] if said else ["no event names the rank"]),
        *([] if back else ["the unit did not come back"]),
    ]


def _keep_asking(gate: GateProcess, number: int, stop_at: float) -> list[int]:
    statuses = []
    while time.monotonic() < stop_at:
        body = _body(f"Story {number} " * 40, 64)
        statuses.append(fetch(f"{gate.url}/v1/completions", body, silence_s=SILENCE_S).status)
    return statuses


def _unit(gate: GateProcess) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(fetch(f"http://127.0.0.1:{gate.admin_port}/units/a").body)
    return found


def _until(holds: Callable[[], bool]) -> bool:
    """Whether it holds soon."""
    end = time.monotonic() + UNTIL_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _body(text: str, tokens: int) -> bytes:
    return orjson.dumps(
        {"model": MODEL_NAME, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    )


def _ranks_processes() -> list[int]:
    """The engine cores of all ranks, by their titles."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                title = Path(f"/proc/{entry.name}/cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"VLLM::EngineCore"):
                found.append((title, int(entry.name)))
    return [pid for _, pid in sorted(found)]


if __name__ == "__main__":
    with progress.shown("vllm-ranks"):
        sys.exit(asyncio.run(main()))
