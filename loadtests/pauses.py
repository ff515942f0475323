"""Drill: real engines are paused and put to sleep under streams, and nobody is lost.

`python -m loadtests.pauses` starts plain vLLM engines, or SGLang's, on this machine's CPU (3 GB each, a
minute) behind a gate that would restart a unit soon. In each mode the first engine stands still for a while
under streams.
What must hold: every answer is whole and the same as without a pause, no verdict changes, nothing is
restarted, and with `abort` the streams are continued. The exit code is 1 when it does not.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import orjson
import uvloop

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess, Named, metric_sum
from loadtests.kit.questions import Answer, End, Question, ask
from loadtests.kit.report import print_problems, verdict
from loadtests.kit.waiting import until
from loadtests.sglang import engine as sglang
from loadtests.sglang.install import set_up as set_up_sglang
from loadtests.vllm.install import set_up
from loadtests.vllm.single import serving
from loadtests.wire.blocking import fetch
from loadtests.wire.client import Connections

STREAMS = 8
LATE = 4
"""Requests that come while the engine stands still."""
LATE_S = 2.0
LATE_TOKENS = 16
SILENCE_S = 120.0
"""A client waits for so long: the requests of a single engine wait as long as that stands still."""
SETTLE_S = 6.0
ENVIRON = {"VLLM_SERVER_DEV_MODE": "1"}


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine is made to stand still in one of its modes, and to go on: paths and bodies of POSTs."""

    name: str
    stop: str
    go_on: str
    modes: Sequence[str] = ("abort", "wait", "keep")
    stop_body: str = ""
    go_on_body: str = ""


# On a CPU vLLM sleeps at level 0: nothing is offloaded.
WAYS = {
    "vllm": (
        Way("pause", "/pause?mode={mode}", "/resume"),
        Way("sleep", "/sleep?level=0&mode={mode}", "/wake_up"),
    ),
    "sglang": (
        Way(
            "pause",
            "/pause_generation",
            "/continue_generation",
            ("abort", "in_place", "retract"),
            '{"mode":"%s"}',
            "{}",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Greedy(Question):
    """A question whose answer is the same each time; `text` is that answer."""

    text: str = ""

    def body(self) -> bytes:
        """The JSON of the request."""
        message = {"role": "user", "content": self.prompt}
        fields = {"stream": True, "max_tokens": self.max_tokens, "temperature": 0}
        return orjson.dumps({"messages": [message], **fields})

    def expected(self) -> str:
        """What the engine has said before."""
        return self.text


@dataclass(slots=True)
class Round:
    """What came of one pause. `held_s`: until the gate knew of it; `back_s`: from the end of the pause until
    the unit was in rotation.
    """

    name: str
    answers: list[Answer]
    flips: list[str] = field(default_factory=list)
    recoveries: int = 0
    continued: int = 0
    held_s: float | None = None
    back_s: float | None = None

    def problems(self) -> list[str]:
        """What must not be."""
        lost = [f"{self.name}: {each.why()}" for each in self.answers if each.end() is not End.WHOLE]
        flipped = [f"{self.name}: {line}" for line in self.flips]
        restarted = [f"{self.name}: {self.recoveries} recoveries"] if self.recoveries else []
        unknown = [f"{self.name}: the gate did not know of it"] if self.held_s is None else []
        return lost + flipped + restarted + unknown

    def line(self) -> str:
        """The round for people."""
        lost = sum(each.end() is not End.WHOLE for each in self.answers)
        held = "never" if self.held_s is None else f"after {self.held_s:.2f} s"
        back = "never" if self.back_s is None else f"{self.back_s:.2f} s"
        return (
            f"{self.name}: {len(self.answers)} requests, {lost} lost, {self.continued} continued; "
            f"{len(self.flips)} flips, {self.recoveries} recoveries; on hold {held}, "
            f"back {back} after its end"
        )


async def learn(url: str, questions: Sequence[Greedy]) -> list[Greedy]:
    """The questions with the answers that an engine gives when nobody disturbs it."""
    engine = Connections(url)
    learnt = []
    for question in questions:
        blank = Answer(Blank(question.prompt, question.max_tokens))
        await ask(engine, blank, silence_s=SILENCE_S)
        learnt.append(Greedy(question.prompt, question.max_tokens, blank.text))
    engine.close()
    return learnt


class Blank(Greedy):
    """A question whose answer is not known yet."""

    def begins_with(self, _text: str) -> bool:
        """Any text will do."""
        return True


async def one_round(
    gate: GateProcess,
    url: str,
    way: Way,
    mode: str,
    long: Sequence[Greedy],
    short: Sequence[Greedy],
    s: float,
) -> Round:
    """One engine stands still for `s` seconds under streams."""
    await asyncio.to_thread(gate.wait_up)
    await asyncio.sleep(SETTLE_S)
    began, clients = time.time(), Connections(gate.url, keep=False)
    page = await asyncio.to_thread(gate.metrics)
    answers = [Answer(question) for question in long]
    asking = [asyncio.create_task(ask(clients, each, silence_s=SILENCE_S)) for each in answers]
    await until(lambda: all(each.first_at for each in answers), SILENCE_S, 0.02)
    stopped = time.time()
    body = way.stop_body.replace("%s", mode).encode()
    stopping = asyncio.create_task(asyncio.to_thread(fetch, url + way.stop.format(mode=mode), body))
    await asyncio.sleep(LATE_S)
    late = [Answer(question) for question in short]
    asking += [asyncio.create_task(ask(clients, each, silence_s=SILENCE_S)) for each in late]
    await asyncio.sleep(s - LATE_S)
    said = await stopping
    if said.status != 200:
        raise RuntimeError(f"POST {way.stop}: {said.status} {said.body[:200]!r}")
    await asyncio.to_thread(fetch, url + way.go_on, way.go_on_body.encode())
    resumed = time.time()
    await asyncio.gather(*asking)
    clients.close()
    found = Round(f"{way.name} {mode}", [*answers, *late])
    await asyncio.sleep(SETTLE_S)
    return await asyncio.to_thread(_complete, gate, found, page, (began, stopped, resumed))


def _complete(gate: GateProcess, found: Round, page: str, times: tuple[float, float, float]) -> Round:
    began, stopped, resumed = times
    after = gate.metrics()
    found.flips = [flip["line"] for flip in gate.flips(began)]
    found.recoveries = int(metric_sum(after, "cellgate_recoveries_total"))
    continued = 'result="continued"'
    found.continued = int(
        metric_sum(after, "cellgate_continuations_total", continued)
        - metric_sum(page, "cellgate_continuations_total", continued)
    )
    holds = [event for event in gate.events() if event["kind"] in ("hold", "hold_over")]
    at = {event["kind"]: gate.at(event) for event in holds if gate.at(event) >= began}
    if "hold" in at:
        found.held_s = at["hold"] - stopped
    if all(unit["usable"] for unit in gate.units()) and "hold_over" in at:
        found.back_s = max(0.0, at["hold_over"] - resumed)
    return found


async def pauses(engine: str, engines: int, ways: Sequence[Way], modes: Sequence[str], s: float) -> list[str]:
    """All rounds of pauses of `s` seconds; what must not have been."""
    async with AsyncExitStack() as stack:
        urls = [await _started(engine, stack) for _ in range(engines)]
        rng = random.Random(1)
        long = [Greedy.draw(rng, prompt_tokens=30, max_tokens=400) for _ in range(STREAMS)]
        short = [Greedy.draw(rng, prompt_tokens=30, max_tokens=LATE_TOKENS) for _ in range(LATE)]
        long, short = await learn(urls[0], long), await learn(urls[0], short)
        units = [Named(f"u{number}", url) for number, url in enumerate(urls)]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pauses-"))
        gate = stack.enter_context(GateProcess(units, operator=_operator(f"{folder}/audit.jsonl")))
        problems = []
        for way in ways:
            for mode in modes or way.modes:
                found = await one_round(gate, urls[0], way, mode, long, short, s)
                print(found.line(), flush=True)
                problems += found.problems()
        return problems


async def _started(engine: str, stack: AsyncExitStack) -> str:
    """The URL of one more engine."""
    if engine == "sglang":
        return (await stack.enter_async_context(sglang.serving(()))).url
    return await stack.enter_async_context(serving((), ENVIRON))


def _operator(audit: str) -> dict[str, object]:
    """A gate that restarts a unit soon: a command that only shows that it was run."""
    recovery = {"command": ["true"], "audit": audit, "after_s": 5, "backoff_s": 5}
    return {"recovery": [{"cell": "drill", **recovery}]}


@progress.shown("pauses")
def main() -> int:
    """Run it; 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.pauses", description=__doc__)
    parser.add_argument("--engine", choices=WAYS, default="vllm")
    parser.add_argument("--engines", type=int, default=2, help="how many; the first one is paused")
    parser.add_argument("--way", help="only this one: pause, sleep")
    parser.add_argument("--mode", help="only this one: abort, wait, keep; in_place, retract")
    parser.add_argument("--pause-s", type=float, default=20.0, help="how long each pause lasts")
    args = parser.parse_args()
    (set_up_sglang if args.engine == "sglang" else set_up)()
    ways = [way for way in WAYS[args.engine] if args.way in (None, way.name)]
    modes = [args.mode] if args.mode else []
    problems = uvloop.run(pauses(args.engine, args.engines, ways, modes, args.pause_s))
    print(verdict(problems))
    print_problems(problems, most=20)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
