"""`python -m loadtests.gym.calibrate`: the gym's engine beside a real vLLM on this machine's CPU.

It measures how long steps and prompts take of a tiny model, takes the gym's figures for them from that, and
then lets both serve the same requests at the same times: once with much KV cache, once with little. The first
time it installs vLLM (some GB). Nothing else should run on the machine.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression, median
from time import perf_counter

import aiohttp

from loadtests.gym.engine import Engine
from loadtests.gym.prompts import Text
from loadtests.gym.sequences import Model, Shown
from loadtests.gym.sequences import Sequence as GymSequence
from loadtests.gym.shapes import exponential
from loadtests.vllm.install import set_up
from loadtests.vllm.single import serving
from loadtests.vllm.unit import MODEL_NAME

SEATS, STEP_TOKENS, BLOCK = 8, 512, 16
KV_BLOCKS = {"much KV cache": 4000, "little KV cache": 420}
REQUESTS, RATE = 120, 4.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the comparison: when it comes, the ids of its prompt, and how long its answer is."""

    at: float
    prompt: tuple[int, ...]
    text: Text
    answer: int


@dataclass(frozen=True, slots=True)
class Timed:
    """When the first and the last token came, in seconds after the request was sent."""

    first_s: float
    end_s: float
    events: int


async def main() -> int:
    """Measures, compares, prints."""
    await asyncio.to_thread(set_up)
    model: Model | None = None
    rows: list[tuple[str, ...]] = []
    for name, blocks in KV_BLOCKS.items():
        async with (
            serving(_options(blocks)) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http,
        ):
            model = model or await _measured(http, url)
            requests = _requests(random.Random(7))
            before = await _counters(http, url)
            real = await _serve(http, url, requests)
            after = await _counters(http, url)
            counted = [b - a for a, b in zip(before, after, strict=True)]
            rows += _compared(name, requests, real, counted, replace(model, kv_tokens=blocks * BLOCK))
    print(f"\n{model}\n\n| | vLLM | gym | gym / vLLM |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0


# -- what steps take ---------------------------------------------------------------------------------------


async def _measured(http: aiohttp.ClientSession, url: str) -> Model:
    """The figures of a model: each is the median of some looks, and a straight line through them."""
    rng = random.Random(1)
    await _batch(http, url, rng, 2, 300, 8)
    by_batch = [(b, await _step_s(http, url, rng, b, 16)) for b in (1, 2, 4, 6, 8) for _ in range(3)]
    line = linear_regression(*zip(*by_batch, strict=True))
    by_context = [
        (4 * (n + 32), await _step_s(http, url, rng, 4, n)) for n in (64, 1000, 2500) for _ in "123"
    ]
    context = linear_regression(*zip(*by_context, strict=True))
    firsts = {n: await _first_s(http, url, rng, n) for n in (128, 256, 512, 1024, 2048, 3072)}
    base_s = max(line.intercept, 1e-4)
    chunks = [(n, s - base_s * -(-n // STEP_TOKENS)) for n, s in firsts.items()]
    prefill = linear_regression(*zip(*chunks, strict=True))
    for name, pairs in (
        ("step s by batch", by_batch),
        ("step s by context", by_context),
        ("first s", chunks),
    ):
        print(name, " ".join(f"{n}: {s:.4f}" for n, s in pairs), flush=True)
    return Model(
        prefill_tokens_s=round(1.0 / prefill.slope),
        base_s=round(base_s, 5),
        per_sequence_s=round(max(line.slope, 0.0), 6),
        per_context_token_s=round(max(context.slope, 0.0), 9),
        front_end_s=round(max(prefill.intercept, 0.0), 4),
        step_tokens=STEP_TOKENS,
        seats=SEATS,
    )


async def _step_s(
    http: aiohttp.ClientSession, url: str, rng: random.Random, batch: int, prompt: int
) -> float:
    """The median of how long a step takes with so many sequences of so long a prompt."""
    timed = await _batch(http, url, rng, batch, prompt, 64)
    began, ended = max(t.first_s for t in timed), min(t.end_s for t in timed)
    steps = min(t.events for t in timed) - 1
    slowest = max(t.end_s for t in timed) - min(t.first_s for t in timed)
    return (ended - began) / steps if ended - began > 0.8 * slowest else slowest / steps


async def _first_s(http: aiohttp.ClientSession, url: str, rng: random.Random, prompt: int) -> float:
    return median([(await _batch(http, url, rng, 1, prompt, 1))[0].first_s for _ in range(5)])


async def _batch(
    http: aiohttp.ClientSession, url: str, rng: random.Random, batch: int, prompt: int, answer: int
) -> list[Timed]:
    return await asyncio.gather(*(_ask(http, url, _ids(rng, prompt), answer) for _ in range(batch)))


# -- the same requests through both --------------------------------------------------------------------------


def _requests(rng: random.Random) -> list[Asked]:
    """Half of them begin with one of three texts; prompts of 100 to 1,600 tokens, answers of 40."""
    systems = [(_ids(rng, 1024), Text([n << 16]).extend(1024)) for n in range(3)]
    at, made = 0.0, []
    for number in range(REQUESTS):
        at += rng.expovariate(RATE)
        ids, text = rng.choice(systems) if rng.random() < 0.5 else ((), Text([(number + 9) << 16]))
        own = rng.randint(100, 600)
        made.append(Asked(at, (*ids, *_ids(rng, own)), text.extend(own), exponential(rng, 40, 200, least=2)))
    return made


async def _serve(http: aiohttp.ClientSession, url: str, requests: Sequence[Asked]) -> list[Timed]:
    began = perf_counter()

    async def one(asked: Asked) -> Timed:
        await asyncio.sleep(began + asked.at - perf_counter())
        return await _ask(http, url, asked.prompt, asked.answer)

    return await asyncio.gather(*map(one, requests))


def _compared(
    name: str, requests: Sequence[Asked], real: Sequence[Timed], counted: Sequence[float], model: Model
) -> list[tuple[str, ...]]:
    """The rows of the table for one size of KV cache; `counted` are vLLM's preemptions, hits and queries."""
    engine = Engine(model)
    gym = _simulated(engine, requests)
    hits = counted[1] / max(counted[2], 1.0), engine.hit_tokens / engine.asked_tokens
    pairs = [
        ("TTFT mean, s", fmean(t.first_s for t in real), fmean(t.first_s for t in gym)),
        ("TTFT p50, s", median(t.first_s for t in real), median(t.first_s for t in gym)),
        ("TTFT p90, s", _p90([t.first_s for t in real]), _p90([t.first_s for t in gym])),
        ("whole mean, s", fmean(t.end_s for t in real), fmean(t.end_s for t in gym)),
        ("whole p90, s", _p90([t.end_s for t in real]), _p90([t.end_s for t in gym])),
        ("prompt tokens cached, %", 100.0 * hits[0], 100.0 * hits[1]),
        ("preemptions", counted[0], float(engine.preemptions)),
    ]
    return [(f"{name}: {what}", f"{a:.3g}", f"{b:.3g}", f"{b / a:.2f}" if a else "") for what, a, b in pairs]


def _simulated(engine: Engine, requests: Sequence[Asked]) -> list[Timed]:
    owners: dict[GymSequence, Asked] = {}
    first: dict[GymSequence, float] = {}
    ended: dict[GymSequence, float] = {}
    for asked in requests:
        sequence = GymSequence(
            len(asked.prompt), asked.answer, asked.text.extend(asked.answer).names, -1, asked
        )
        owners[sequence] = asked
        engine.expect(sequence)
        _note(engine.take(sequence, asked.at + engine.model.front_end_s), first, ended)
    while (at := engine.next_at) is not None:
        _note(engine.advance(at), first, ended)
    return [Timed(first[s] - a.at, ended[s] - a.at, a.answer) for s, a in owners.items()]


def _note(shown: Sequence[Shown], first: dict[GymSequence, float], ended: dict[GymSequence, float]) -> None:
    for one in shown:
        first.update(dict.fromkeys(one.first, one.at))
        ended.update(dict.fromkeys(one.ended, one.at))


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * len(values))]


# -- vLLM ----------------------------------------------------------------------------------------------------


def _ids(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """A prompt as ids: so many tokens exactly, and never asked before."""
    return tuple(rng.randrange(300, 4000) for _ in range(tokens))


async def _ask(http: aiohttp.ClientSession, url: str, prompt: Sequence[int], answer: int) -> Timed:
    body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": answer, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0}
    began, times = perf_counter(), list[float]()
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                times.append(perf_counter() - began)
    return Timed(times[0], times[-1], len(times))


_COUNTERS = ("num_preemptions_total", "prefix_cache_hits_total", "prefix_cache_queries_total")


async def _counters(http: aiohttp.ClientSession, url: str) -> list[float]:
    async with http.get(f"{url}/metrics") as reply:
        page = await reply.text()
    return [sum(map(float, re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)", page, re.M))) for name in _COUNTERS]


def _options(blocks: int) -> list[str]:
    """An engine with so many blocks of KV cache."""
    options = {
        "--max-num-seqs": SEATS,
        "--max-num-batched-tokens": STEP_TOKENS,
        "--block-size": BLOCK,
        "--num-gpu-blocks-override": blocks,
    }
    return [str(word) for pair in options.items() for word in pair]


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
