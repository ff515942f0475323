"""Drill: streams of agents on two real vLLM engines, broken at random tokens, and what clients get.

`python -m loadtests.vllm_agents` makes a small model that thinks and calls tools, starts two engines with it
on this machine's CPU (some minutes), and the gate before them, through relays that cut a stream at a random
event or stand still. A greedy answer must be the unbroken one; a sampled one valid and whole. The exit code
is 1 when an answer is neither that nor ended by an error event. `--each N`: so many streams of each kind.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from loadtests.kit.gate import GateProcess
from loadtests.kit.report import print_problems
from loadtests.kit.waiting import wait_until
from loadtests.vllm.agent_answer import Answer, ask
from loadtests.vllm.agent_script import COUNT, request
from loadtests.vllm.install import AGENTS, set_up
from loadtests.vllm.relay import Budget, Relay
from loadtests.vllm.single import serving

OPTIONS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"]
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.4}
FREEZE_S = 8.0
FROZEN_AFTER = (100, 1500)
"""Events of all streams of a unit."""
EVENTS = 30
COUNTED = "cellgate_continuations_total{"


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of answer, and how it is sampled. `may_refuse`: an error event is as good."""

    kind: str
    fields: dict[str, Any]
    may_refuse: bool = False

    @property
    def is_exact(self) -> bool:
        return self.fields.get("temperature") == 0

    def body(self, number: int) -> dict[str, Any]:
        """A request of this kind."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": "tiny", "max_tokens": 600} | request(self.kind, number % COUNT) | usage | self.fields
        # The model knows a few prompts only, and for the gate one that breaks again and again ends units.
        return body | {"cache_salt": f"{number} {self.fields}"}


CASES: dict[str, Case] = {
    "text, greedy": Case("text", GREEDY),
    "tool call, greedy": Case("call", GREEDY),
    "two tool calls, greedy": Case("calls", GREEDY),
    "reasoning, greedy": Case("reasoning", GREEDY),
    "reasoning and call, greedy": Case("reasoning and call", GREEDY),
    "log probabilities, greedy": Case("text", GREEDY | {"logprobs": True, "top_logprobs": 2}),
    "frequency penalty, greedy": Case("text", GREEDY | {"frequency_penalty": 0.01}),
    "repetition penalty, greedy": Case("text", GREEDY | {"repetition_penalty": 1.01}),
    "tool call, sampled": Case("call", SAMPLED),
    "two tool calls, sampled": Case("calls", SAMPLED),
    "reasoning, sampled": Case("reasoning", SAMPLED),
    "reasoning and call, sampled": Case("reasoning and call", SAMPLED),
    "tool call, with a seed": Case("call", SAMPLED | {"seed": 7}),
    "log probabilities, sampled": Case("text", SAMPLED | {"logprobs": True}),
    "repetition penalty, sampled": Case("text", SAMPLED | {"repetition_penalty": 1.01}),
    "presence penalty, sampled": Case("text", SAMPLED | {"presence_penalty": 0.01}, may_refuse=True),
}


class Drill:
    """The gate before two relays. `seen` counts what became of the broken streams of each case."""

    def __init__(self, gate: GateProcess, relays: list[Relay], budget: Budget, each: int) -> None:
        self._gate = gate
        self._budget = budget
        self._relays = relays
        self._each = each
        self._random = random.Random(1)
        self.seen: dict[str, Counter[str]] = {name: Counter() for name in CASES}
        self.problems: list[str] = []
        self._whole: dict[tuple[str, int], Answer] = {}

    def unbroken(self) -> None:
        """Learn the answers of one unit alone."""
        for name, case in CASES.items():
            for number in range(COUNT):
                answer = ask(self._gate.url, case.body(number))
                self._whole[name, number] = answer
                if wrong := answer.error or answer.wrong():
                    self.problems.append(f"{name}, unbroken: {wrong}")

    def cut(self) -> None:
        """One stream after the other, cut at a random event."""
        for name, case in CASES.items():
            for number in range(self._each):
                whole = self._whole[name, number % COUNT]
                before = self._budget.spent
                self._budget.cut_after(self._random.randrange(1, max(2, whole.events - 1)))
                answer = ask(self._gate.url, case.body(number))
                self._budget.cut_after(None)
                if self._budget.spent > before:
                    self._judge(name, number, answer, "cut")

    def freeze(self) -> None:
        """Streams of all cases at once; one unit stands still at a random moment, until that was seen."""
        rounds = max(1, self._each // 8)
        for each in range(rounds):
            with ThreadPoolExecutor(2 * len(CASES)) as pool:
                asked = [
                    (name, each + at, pool.submit(ask, self._gate.url, case.body(each + at)))
                    for name, case in CASES.items()
                    for at in (0, 1)
                ]
                relay = self._relays[each % 2]
                enough = relay.events + self._random.randrange(*FROZEN_AFTER)
                wait_until(lambda relay=relay, enough=enough: relay.events > enough, FREEZE_S)  # type: ignore[misc]
                relay.freeze(frozen=True)
                time.sleep(FREEZE_S)
                relay.freeze(frozen=False)
                for name, number, answer in asked:
                    self._judge(name, number, answer.result(), "frozen")
            self._gate.wait_up()

    def _judge(self, name: str, number: int, answer: Answer, how: str) -> None:
        case, whole = CASES[name], self._whole[name, number % COUNT]
        if answer.error:
            self.seen[name][f"{how}: {answer.error.rpartition('; ')[2]}"] += 1
            if not case.may_refuse:
                self.problems.append(f"{name}, {how}: {answer.error}")
            return
        wrong = answer.differs_from(whole) if case.is_exact else answer.wrong()
        self.seen[name][f"{how}: whole"] += not wrong
        if wrong:
            self.problems.append(f"{name}, {how}: {wrong}")


async def main() -> int:
    """Run it, and print what was seen."""
    parser = argparse.ArgumentParser(description="Streams of agents on two real vLLM engines, broken.")
    parser.add_argument("--each", type=int, default=30, help="streams of each kind that are cut")
    each = parser.parse_args().each
    set_up(agents=True)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(OPTIONS, model=AGENTS)) for _ in range(2)]
        drill = await asyncio.to_thread(_run, urls, each)
    for name, counts in drill.seen.items():
        print(f"{name:<28} " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    print_problems(drill.problems[:EVENTS])
    return 1 if drill.problems else 0


def _run(urls: list[str], each: int) -> Drill:
    budget = Budget()
    settings = {"poison": {"ban_s": 0}}
    for case in CASES.values():
        # The first tool call, the first reasoning stop an engine for seconds.
        for url in urls:
            ask(url, case.body(0))
    with (
        Relay("a", urls[0], budget) as a,
        Relay("b", urls[1], budget) as b,
        GateProcess([a, b], settings=settings) as gate,
    ):
        drill = Drill(gate, [a, b], budget, each)
        drill.unbroken()
        drill.cut()
        drill.freeze()
        counted = [line for line in gate.metrics().splitlines() if line.startswith(COUNTED)]
        print(*(line for line in counted if not line.endswith(" 0.0")), sep="\n")
        if drill.problems:
            print(*(event["line"] for event in gate.events()[-EVENTS:]), sep="\n")
    return drill


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
