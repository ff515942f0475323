"""Drill: streams of `/v1/messages` and `/v1/responses` of a real vLLM engine break at any byte.

`python -m loadtests.vllm_dialects` starts an engine on this machine's CPU (4 GB, a minute), the gate before
and two relays between, which are its two units. A relay cuts each stream at a random byte of its answer, or
stops while streams run. What the client reads must be what the engine says without a gate: text, finish,
usage, one name for each thing, numbers without a gap; or an error, which is counted: both units are one
engine, and under load both may be down. The exit code is 1 when anything differs.

`--render` has the engine render requests (`--enable-scale-out`): then it is checked first that the chats the
gate makes of requests have the tokens that the engine renders.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from cellgate.proxy.resume import messages, responses
from loadtests.kit import progress
from loadtests.kit.breaking_relay import BreakingRelay
from loadtests.kit.gate import GateProcess, Named, metric_sum
from loadtests.kit.report import print_problems
from loadtests.kit.waiting import wait_until
from loadtests.vllm.dialect_answers import Answer, Body, body_of, read_answer
from loadtests.vllm.install import set_up
from loadtests.vllm.single import serving
from loadtests.wire.blocking import BlockingConnection, fetch
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

STREAMS, TOGETHER = 30, 4
SILENCE_S, UP_S = 120.0, 60.0
SENT_S = 0.1
"""After so long all requests of a round are on their way."""
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses"}
OPTIONS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
CHATS = {"messages": messages.chat_of, "responses": responses.chat_of}


class Cuts:
    """Where each stream is cut: once, at a random byte. `sizes` are those of each dialect's answers."""

    def __init__(self, rng: random.Random, sizes: dict[str, int]) -> None:
        self._rng = rng
        self._sizes = sizes
        self._seen: set[bytes] = set()
        self.is_on = False

    def __call__(self, request: bytes) -> int | None:
        head, _, body = request.partition(b"\r\n\r\n")
        name = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id:")), b"")
        path = request.split(b" ", 2)[1].decode()
        dialect = next((each for each in PATHS if path == PATHS[each]), "")
        if not (self.is_on and dialect and b'"stream":true' in body) or name in self._seen:
            return None
        self._seen.add(name)
        return self._rng.randrange(1, self._sizes[dialect])


async def main() -> int:
    """Run it, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="let the engine render requests")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    set_up()
    options = [*OPTIONS, *(["--enable-scale-out"] if args.render else [])]
    async with serving(options) as engine:
        bodies = {dialect: [body_of(dialect, number) for number in range(STREAMS)] for dialect in PATHS}
        problems = await asyncio.to_thread(_conversions, engine, bodies) if args.render else []
        expected = await asyncio.to_thread(_unbroken, engine, bodies)
        sizes = {dialect: min(answer.size for answer in expected[dialect]) for dialect in PATHS}
        cuts = Cuts(random.Random(args.seed), sizes)
        async with BreakingRelay(engine, cuts) as a, BreakingRelay(engine, cuts) as b:
            drill = Drill(asyncio.get_running_loop(), a, cuts, bodies, expected)
            # The relays need this loop.
            problems += await asyncio.to_thread(drill.run, [Named("a", a.url), Named("b", b.url)])
    print_problems(problems)
    return 1 if problems else 0


def _conversions(engine: str, bodies: dict[str, list[Body]]) -> list[str]:
    """The tokens of the chats that the gate makes of requests, beside those that the engine renders."""
    problems = []
    for dialect, path in PATHS.items():
        for body in bodies[dialect]:
            rendered = _post(engine, f"{path}/render", body)["token_ids"]
            chat = CHATS[dialect](body) | {"add_generation_prompt": True}
            if _post(engine, "/tokenize", chat)["tokens"] != rendered:
                problems.append(f"{dialect}: another prompt than the engine's of {body}")
        print(f"{dialect}: {len(bodies[dialect])} requests converted as the engine does")
    return problems


def _post(url: str, path: str, body: Body) -> dict[str, Any]:
    reply = fetch(url + path, orjson.dumps(body), silence_s=SILENCE_S)
    found: dict[str, Any] = orjson.loads(reply.body)
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}: {found}")
    return found


def _ask(url: str, dialect: str, body: Body) -> Answer:
    reply = Reply()
    with BlockingConnection(url, SILENCE_S) as connection:
        try:
            connection.exchange(post(orjson.dumps(body), path=PATHS[dialect], host="drill"), reply)
        except OSError as error:
            answer = read_answer(dialect, reply.body.rpartition(b"\n\n")[0])
            answer.error = answer.error or repr(error)
            return answer
    answer = read_answer(dialect, reply.body)
    if reply.status != 200:
        answer.error = f"refused: {reply.status}"
    return answer


def _ask_all(url: str, dialect: str, bodies: list[Body]) -> list[Answer]:
    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(lambda body: _ask(url, dialect, body), bodies))


def _unbroken(engine: str, bodies: dict[str, list[Body]]) -> dict[str, list[Answer]]:
    """Twice: where greedy answers of the engine itself differ beside others, nothing can be compared."""
    progress.phase("what the engine says")
    once, again = ({dialect: _ask_all(engine, dialect, bodies[dialect]) for dialect in PATHS} for _ in "12")
    for dialect in PATHS:
        pairs = zip(once[dialect], again[dialect], strict=True)
        varied = sum(one.content() != other.content() for one, other in pairs)
        print(f"{dialect}: {varied} answers vary without a gate")
    return once


class Drill:
    """All streams of both dialects, broken in both ways; unit a is behind `relay`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        relay: BreakingRelay,
        cuts: Cuts,
        bodies: dict[str, list[Body]],
        expected: dict[str, list[Answer]],
    ) -> None:
        self._loop = loop
        self._relay = relay
        self._cuts = cuts
        self._bodies = bodies
        self._expected = expected
        self._rng = random.Random(2)

    def run(self, units: list[Named]) -> list[str]:
        """What differs."""
        problems = []
        with GateProcess(units) as gate:
            for dialect, bodies in self._bodies.items():
                for how, ask in {"cut": self._cut, "frozen": self._frozen}.items():
                    progress.phase(f"{dialect}: {how}")
                    before = gate.metrics()
                    answers = ask(gate, dialect, bodies)
                    what = f"{dialect}, {how}"
                    problems += _differences(gate, before, what, self._expected[dialect], answers)
        return problems

    def _cut(self, gate: GateProcess, dialect: str, bodies: list[Body]) -> list[Answer]:
        """Each stream is cut once, at a random byte."""
        self._cuts.is_on = True
        answers = _ask_all(gate.url, dialect, bodies)
        self._cuts.is_on = False
        return answers

    def _frozen(self, gate: GateProcess, dialect: str, bodies: list[Body]) -> list[Answer]:
        """Unit a stops while streams run there."""
        answers: list[Answer] = []
        for at in range(0, len(bodies), TOGETHER):
            wait_until(lambda: _is_up(gate), UP_S)
            gate.drain("b")
            size = min(answer.size for answer in self._expected[dialect])
            self._relay.freezes_after = self._rng.randrange(size, TOGETHER * size // 2)
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(_ask_all, gate.url, dialect, bodies[at : at + TOGETHER])
                time.sleep(SENT_S)
                gate.drain("b", undo=True)
                answers += reading.result()
            self._loop.call_soon_threadsafe(self._relay.thaw)
        return answers


def _common(one: Answer, other: Answer) -> int:
    pairs = zip(one.text, other.text, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(one.text))


def _is_up(gate: GateProcess) -> bool:
    return all(unit["verdict"] == "up" for unit in gate.units())


def _differences(
    gate: GateProcess, before: str, what: str, expected: list[Answer], answers: list[Answer]
) -> list[str]:
    results = {
        result: metric_sum(gate.metrics(), "cellgate_continuations_total", f'result="{result}"')
        - metric_sum(before, "cellgate_continuations_total", f'result="{result}"')
        for result in ("continued", "completed", "not_continuable", "refused", "no_unit")
    }
    counts = Counter("error event" if answer.error else "complete" for answer in answers)
    wrong = [
        f"{what} {number}: {answer.told()}, not {other.told()}; {_common(answer, other)} characters are alike"
        for number, (answer, other) in enumerate(zip(answers, expected, strict=True))
        if not answer.error and answer.content() != other.content()
    ]
    broken = int(sum(results.values()))
    print(f"{what}: {len(answers)} streams, {broken} broken, {dict(counts)}, {len(wrong)} differ;", results)
    return wrong


if __name__ == "__main__":
    started = time.monotonic()
    with progress.shown("vllm-dialects"):
        code = asyncio.run(main())
    print(f"took {time.monotonic() - started:.0f} s")
    sys.exit(code)
