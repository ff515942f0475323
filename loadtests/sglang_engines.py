"""Drill: real SGLang engines behind the gate: what it reads of them, and what becomes of their streams.

`python -m loadtests.sglang_engines` starts two engines on this machine's CPU (2 GB each, a minute), with KV
events. The gate must recognise them, find their prompts in the events and expect what they then report as
cached. The scheduler of one is frozen under streams, which the other must continue in the same words. Known
answers must agree. Then comes an engine with two data parallel ranks. The exit code is 1 when something is
not as it should be. Pauses: `python -m loadtests.pauses --engine sglang`.
"""

import asyncio
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any

import orjson

from loadtests.kit import processes
from loadtests.kit.gate import TOKEN, GateProcess, Named, metric_sum
from loadtests.kit.questions import Answer, End, ask
from loadtests.kit.report import run_parts
from loadtests.kit.waiting import until, wait_until
from loadtests.pauses import Greedy, learn
from loadtests.sglang.engine import KV_TOKENS, Engine, serving
from loadtests.sglang.install import set_up
from loadtests.vllm.unit import HOST, MODEL_NAME
from loadtests.wire.blocking import fetch
from loadtests.wire.client import Connections

PAGES = (32, 1)
"""The tokens of a page of each engine: the events of both are read alike. SGLang's default is 1."""
DOCUMENTS, REQUESTS = 4, 80
ERROR_TOKENS = 80
"""On average a prompt ends in the middle of one of the gate's blocks of 512 bytes: 50 tokens here."""
STREAMS, TOKENS = 6, 600
AT_ONCE = 16
SILENCE_S = 90.0
WORDS = (
    "import",
    "return",
    "class",
    "self",
    "name",
    "value",
    "print",
    "open",
    "read",
    "with",
    "path",
    "line",
)


async def main() -> int:
    """All parts; 1 when one of them failed."""
    set_up()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving(_events(page))) for page in PAGES]
        units = [Named(name, engine.url) for name, engine in zip("ab", engines, strict=True)]
        gate = stack.enter_context(GateProcess(units, settings={"known_answer": {"every_s": 2.0}}))
        parts = {
            "what the gate reads": lambda: _reads(gate),
            "KV events": lambda: _cached(gate),
            "a frozen scheduler": lambda: asyncio.run(_frozen(gate, engines[0])),
            "known answers": lambda: _known_answers(gate),
        }
        failed = await asyncio.to_thread(run_parts, parts)
    options = ["--data-parallel-size", "2"]
    async with serving(options, {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as engine:
        return failed | await asyncio.to_thread(run_parts, {"two ranks": lambda: _ranks(engine)})


def _events(page: int) -> list[str]:
    endpoint, replay = processes.free_port(), processes.free_port()
    keys = {"publisher": "zmq", "endpoint": f"tcp://*:{endpoint}", "replay_endpoint": f"tcp://*:{replay}"}
    return ["--page-size", str(page), "--kv-events-config", orjson.dumps(keys).decode()]


def _reads(gate: GateProcess) -> list[str]:
    """Engine, version, size of the KV cache, and where KV events are published."""
    wait_until(
        lambda: all(unit["build"]["version"] and unit["routing"]["kv_tokens"] for unit in gate.units()), 10.0
    )
    page, problems = gate.metrics(), []
    for unit in gate.units():
        build, tokens = unit["build"]["version"], unit["routing"]["kv_tokens"]
        print(f"{unit['name']}: version {build}, {tokens} tokens of KV cache, models {unit['models']}")
        if not build or tokens != KV_TOKENS or unit["models"] != [MODEL_NAME]:
            problems.append(f"{unit['name']}: {unit['build']}, {tokens} tokens, {unit['models']}")
        if not metric_sum(
            page, "cellgate_kv_events_messages_total", f'unit="{unit["name"]}",result="applied"'
        ):
            problems.append(f"{unit['name']}: no KV events")
    return problems


def _cached(gate: GateProcess) -> list[str]:
    """Prompts with shared beginnings: what the gate expects to be cached, and what the engines report."""
    rng, errors = random.Random(3), list[float]()
    documents = [_text(rng, rng.randrange(150, 400)) for _ in range(DOCUMENTS)]
    for number in range(REQUESTS):
        body = _chat(f"{rng.choice(documents)} {_text(rng, rng.randrange(20, 80))}")
        unit = "ab"[number % 2]
        row = _explained(gate, unit, body)
        lines = f"x-cellgate-unit: {unit}\r\nx-cellgate-token: {TOKEN}\r\n"
        reply = fetch(f"{gate.url}/v1/chat/completions", body, lines=lines, silence_s=SILENCE_S)
        found = orjson.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        if row["cached_by"] == "events":
            errors.append(abs(row["cached_tokens"] - found))
        time.sleep(0.1)
    page = gate.metrics()
    found, missed = (
        metric_sum(page, "cellgate_kv_events_prompts_total", f'result="{result}"')
        for result in ("found", "missed")
    )
    print(f"prompts found {found:.0f}, missed {missed:.0f}; by events {len(errors)} of {REQUESTS}")
    if len(errors) < REQUESTS / 2:
        return [f"only {len(errors)} of {REQUESTS} by events"]
    print(f"off by {fmean(errors):.0f} tokens on average, {max(errors):.0f} at most")
    return [] if fmean(errors) <= ERROR_TOKENS else [f"off by {fmean(errors):.0f} tokens on average"]


async def _frozen(gate: GateProcess, engine: Engine) -> list[str]:
    """Streams of which some are on an engine whose scheduler stops."""
    rng = random.Random(1)
    questions = [Greedy.draw(rng, prompt_tokens=30, max_tokens=TOKENS) for _ in range(STREAMS)]
    answers = [Answer(question) for question in await learn(engine.url, questions)]
    clients, (scheduler,) = Connections(gate.url, keep=False), engine.schedulers()
    asking = [asyncio.create_task(ask(clients, each, silence_s=SILENCE_S)) for each in answers]
    await until(lambda: all(each.first_at for each in answers), SILENCE_S, 0.02)
    os.kill(scheduler, signal.SIGSTOP)
    await asyncio.gather(*asking)
    os.kill(scheduler, signal.SIGCONT)
    clients.close()
    continued = metric_sum(gate.metrics(), "cellgate_continuations_total", 'result="continued"')
    lost = [each.why() for each in answers if each.end() is not End.WHOLE]
    print(f"{len(answers)} streams, {continued:.0f} continued, {len(lost)} lost or in other words")
    gate.wait_up()
    return lost + ([] if continued else ["no stream was continued"])


def _known_answers(gate: GateProcess) -> list[str]:
    """Both say the same."""

    def count(result: str, unit: str) -> float:
        label = f'result="{result}",unit="{unit}"'
        return metric_sum(gate.metrics(), "cellgate_known_answers_total", label)

    enough = wait_until(lambda: min(count("same", unit) for unit in "ab") >= 3, 30.0)
    differ = sum(count("differs", unit) for unit in "ab")
    print(f"same: {[count('same', unit) for unit in 'ab']}, not: {differ:.0f}")
    return ([] if enough else ["too few answers"]) + ([f"{differ:.0f} differ"] if differ else [])


def _ranks(engine: Engine) -> list[str]:
    """Requests at once are spread over the data parallel ranks of an engine."""
    bodies = [_chat(_text(random.Random(number), 50), 40) for number in range(AT_ONCE)]
    with (
        GateProcess([Named("a", engine.url)], access_log="json") as gate,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        shown = wait_until(lambda: len(_unit(gate)["ranks"]) == 2, 30.0)
        url = f"{gate.url}/v1/chat/completions"
        list(pool.map(lambda body: fetch(url, body, silence_s=SILENCE_S), bodies))
        wait_until(lambda: len(_logged_ranks(gate)) == AT_ONCE, 5.0)
        ranks = _logged_ranks(gate)
    print(f"ranks shown: {shown}; requests by rank: {[ranks.count(0), ranks.count(1)]}")
    return [] if shown and min(ranks.count(0), ranks.count(1)) >= AT_ONCE / 4 else [f"ranks: {ranks}"]


def _logged_ranks(gate: GateProcess) -> list[int | None]:
    return [orjson.loads(line)["rank"] for line in gate.log.read_bytes().splitlines() if b'"rank":' in line]


def _unit(gate: GateProcess) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(fetch(f"http://{HOST}:{gate.admin_port}/units/a").body)
    return found


def _explained(gate: GateProcess, unit: str, body: bytes) -> dict[str, Any]:
    answer = orjson.loads(fetch(f"http://{HOST}:{gate.admin_port}/explain", body).body)
    row: dict[str, Any] = next(row for row in answer["units"] if row["unit"] == unit)
    return row


def _chat(content: str, tokens: int = 4) -> bytes:
    messages = [{"role": "user", "content": content}]
    return orjson.dumps({"model": MODEL_NAME, "messages": messages, "max_tokens": tokens, "temperature": 0})


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
