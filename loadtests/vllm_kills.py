"""Drill: a real vLLM engine is killed, or stopped, in the middle of many streams of every kind.

`python -m loadtests.vllm_kills` makes a small model that thinks and calls tools, starts two engines with it
on this machine's CPU, and the gate before them. In each round one engine gets streams of all kinds, then
SIGKILL, or SIGSTOP for a while, at a random moment. The other one resumes what was broken: a greedy answer
must be the unbroken one, a sampled one valid and whole. A killed engine is started again for the next round.
The exit code is 1 when an answer is neither that nor ended by an error event. `--each N`: rounds go on until
so many streams of each kind were broken in each way; `--how killed` or `frozen`: in one way only.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess
from loadtests.kit.report import print_problems
from loadtests.kit.waiting import wait_until
from loadtests.vllm.agent_answer import Answer
from loadtests.vllm.agent_script import COUNT, request
from loadtests.vllm.dialect_answers import read_answer
from loadtests.vllm.install import AGENTS, set_up
from loadtests.vllm.killable import KillableEngine
from loadtests.vllm_agents import CASES, COUNTED, GREEDY, OPTIONS
from loadtests.wire.blocking import BlockingConnection
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

SILENCE_S = 120.0
ENGINE = [*OPTIONS, "--max-num-batched-tokens", "16384"]
"""On a CPU vLLM 0.32 dies of a request with a seed whose prompt comes in parts ("CPU Generator does not use
offset"), and many prompts at once would be more than one step takes.
"""
TOGETHER = 3
"""Streams of each kind in a round."""
ROUNDS_MAX = 40
MOMENTS = (0.05, 0.45)
"""The share of all bytes of a round that has come when its engine is hurt."""
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses"}
DIALECTS = tuple(PATHS)

Hurt = Callable[[KillableEngine, Callable[[], bool]], Awaitable[None]]
"""Hurts an engine, and heals it; is told whether its streams are over."""


@dataclass(slots=True)
class Stream:
    """One stream of a client: what came of it, and when. `error`: how it was cut, empty if it was not."""

    name: str
    number: int
    raw: bytes = b""
    error: str = ""
    first_at: float = 0.0
    ended_at: float = 0.0

    def read(self, url: str) -> None:
        """Ask for it, and read it to its end."""
        path, body = request_of(self.name, self.number)
        reply = Reply(self._take)
        try:
            with BlockingConnection(url, SILENCE_S) as connection:
                connection.exchange(post(orjson.dumps(body), path=path, host="drill"), reply)
        except OSError as error:
            self.error = f"cut without a word: {error!r}"
        if reply.status != 200:
            self.error = f"{reply.status} {reply.body[:200]!r}"
        self.ended_at = time.monotonic()

    def _take(self, piece: bytes) -> None:
        self.first_at = self.first_at or time.monotonic()
        self.raw += piece

    def was_broken(self, at: float) -> bool:
        """Whether its unit was hurt in the middle of it."""
        return 0.0 < self.first_at < at < self.ended_at

    def judged(self, whole: "Stream") -> tuple[str, str]:
        """The message of the error that it ended with, and what is wrong with it otherwise."""
        judge = _dialect if self.name in DIALECTS else _chat
        error, wrong = judge(self, whole)
        return error or self.error, "" if error or self.error else wrong


def request_of(name: str, number: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of one stream of a kind."""
    if name not in DIALECTS:
        return "/v1/chat/completions", CASES[name].body(number)
    (message,) = request("text", number % COUNT)["messages"]
    body = {"model": "tiny", "stream": True} | GREEDY
    if name == "messages":
        return PATHS[name], body | {"messages": [message], "max_tokens": 600}
    return PATHS[name], body | {"input": [message], "max_output_tokens": 600}


def _chat(stream: Stream, whole: Stream) -> tuple[str, str]:
    answer, other = Answer(), Answer()
    for each, raw in ((answer, stream.raw), (other, whole.raw)):
        for event in raw.split(b"\n\n")[:-1]:
            if event.startswith(b"data: "):
                each.take(event[6:])
    exact = CASES[stream.name].is_exact
    return answer.error, answer.differs_from(other) if exact else answer.wrong()


def _dialect(stream: Stream, whole: Stream) -> tuple[str, str]:
    # Of a stream that was cut the last event may be a part.
    one, other = (read_answer(stream.name, each.raw.rpartition(b"\n\n")[0]) for each in (stream, whole))
    same = one.content() == other.content()
    return one.error, "" if same else f"{one.told()} instead of {other.told()}"


class Drill:
    """The gate before two engines. `seen` counts what became of the broken streams, by kind."""

    def __init__(self, gate: GateProcess, engines: list[KillableEngine], each: int) -> None:
        self._gate = gate
        self._engines = engines
        self._each = each
        self._random = random.Random(1)
        self.names = [*CASES, *DIALECTS]
        self.seen: dict[str, Counter[str]] = {name: Counter() for name in self.names}
        self.problems: list[str] = []
        self._whole: dict[tuple[str, int], Stream] = {}

    def unbroken(self) -> None:
        """Learn the answers of one engine alone."""
        with ThreadPoolExecutor(COUNT) as pool:
            for name in self.names:
                streams = [Stream(name, number) for number in range(COUNT)]
                list(pool.map(lambda stream: stream.read(self._gate.url), streams))
                for stream in streams:
                    self._whole[name, stream.number] = stream
                    error, wrong = stream.judged(stream)
                    if error or wrong:
                        self.problems.append(f"{name}, unbroken: {error or wrong}")

    async def hurt(
        self, how: str, hurt: Callable[[KillableEngine, Callable[[], bool]], Awaitable[None]]
    ) -> None:
        """Rounds, until enough streams of each kind were broken in this way."""
        broken: Counter[str] = Counter()
        for each in range(ROUNDS_MAX):
            if all(broken[name] >= self._each for name in self.names):
                break
            progress.phase(f"{how}, round {each}: {min(broken[name] for name in self.names)} of {self._each}")
            engine, other = self._engines[each % 2], self._engines[(each + 1) % 2]
            streams = [Stream(name, TOGETHER * each + at) for name in self.names for at in range(TOGETHER)]
            self._gate.drain(other.name)
            moment = self._random.uniform(*MOMENTS)
            with ThreadPoolExecutor(len(streams)) as pool:
                reading = [pool.submit(stream.read, self._gate.url) for stream in streams]
                await asyncio.to_thread(wait_until, partial(self._has_come, streams, moment), SILENCE_S)
                self._gate.drain(other.name, undo=True)
                at = time.monotonic()
                await hurt(engine, lambda reading=reading: all(each.done() for each in reading))  # type: ignore[misc]
                await asyncio.to_thread(lambda reading=reading: [each.result() for each in reading])  # type: ignore[misc]
            for stream in streams:
                if stream.was_broken(at):
                    broken[stream.name] += 1
                    self._judge(stream, how)
            try:
                await asyncio.to_thread(self._gate.wait_up)
            except RuntimeError:
                print(*(f"engine {engine.name} printed:\n{engine.printed()}" for engine in self._engines))
                raise
        self.problems += [
            f"{how}: only {broken[name]} streams of {name} were broken, {self._each} are wanted"
            for name in self.names
            if broken[name] < self._each
        ]

    def report(self) -> None:
        """Print what was seen, also before an interrupt."""
        for name, counts in self.seen.items():
            print(f"{name:<28} " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
        print_problems(self.problems)

    def _has_come(self, streams: list[Stream], share: float) -> bool:
        whole = sum(len(self._whole[each.name, each.number % COUNT].raw) for each in streams)
        return sum(len(stream.raw) for stream in streams) >= share * whole

    def _judge(self, stream: Stream, how: str) -> None:
        error, wrong = stream.judged(self._whole[stream.name, stream.number % COUNT])
        if error:
            self.seen[stream.name][f"{how}: {error.rpartition('; ')[2]}"] += 1
            if stream.name in DIALECTS or not CASES[stream.name].may_refuse:
                self.problems.append(f"{stream.name}, {how}: {error}")
        elif wrong:
            self.problems.append(f"{stream.name}, {how}: {wrong}")
        else:
            self.seen[stream.name][f"{how}: whole"] += 1


async def kill(engine: KillableEngine, _are_over: Callable[[], bool]) -> None:
    """SIGKILL; then it is started again, and warmed up: its first call, its first reasoning take seconds."""
    engine.kill()
    await engine.start()
    await asyncio.to_thread(_warm_up, engine.url)


async def freeze(engine: KillableEngine, are_over: Callable[[], bool]) -> None:
    """SIGSTOP, until its streams have ended elsewhere."""
    engine.freeze(frozen=True)
    await asyncio.to_thread(wait_until, are_over, SILENCE_S)
    engine.freeze(frozen=False)


def _warm_up(url: str) -> None:
    for name in (*CASES, *DIALECTS):
        Stream(name, 0).read(url)


async def main() -> int:
    """Run it, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--each", type=int, default=30, help="streams of each kind that are broken")
    parser.add_argument("--how", choices=("killed", "frozen"), help="in this way only")
    args = parser.parse_args()
    set_up(agents=True)
    async with KillableEngine("a", ENGINE, AGENTS) as a, KillableEngine("b", ENGINE, AGENTS) as b:
        await asyncio.gather(*(asyncio.to_thread(_warm_up, engine.url) for engine in (a, b)))
        with GateProcess([a, b], settings={"poison": {"ban_s": 0}}) as gate:
            drill = Drill(gate, [a, b], args.each)
            await asyncio.to_thread(drill.unbroken)
            try:
                for how, hurt in {"frozen": freeze, "killed": kill}.items():
                    if args.how in (None, how):
                        await drill.hurt(how, hurt)
            finally:
                drill.report()
            counted = [line for line in gate.metrics().splitlines() if line.startswith(COUNTED)]
    print(*(line for line in counted if not line.endswith(" 0.0")), sep="\n")
    return 1 if drill.problems else 0


if __name__ == "__main__":
    with progress.shown("vllm-kills"):
        code = asyncio.run(main())
    sys.exit(code)
