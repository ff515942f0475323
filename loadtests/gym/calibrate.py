"""The gym's engine beside a real vLLM on this machine's CPU.

It measures how long steps and prompts of a small model take, takes the gym's figures for them from that, and
lets both serve the same requests at the same times, with much KV cache and with little. Time is the CPU time
of vLLM's own steps, so that others on the machine change little. The first time it installs vLLM (some GB).
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from os import environ
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple

import orjson

from loadtests.gym.engine import Engine
from loadtests.gym.prompts import Text
from loadtests.gym.sequences import Model, Shown
from loadtests.gym.sequences import Sequence as GymSequence
from loadtests.gym.shapes import exponential
from loadtests.vllm.install import MODEL, RUN, VENV, set_up
from loadtests.vllm.unit import ENVIRONMENT

SEATS, STEP_TOKENS, BLOCK = 8, 512, 64
KV_BLOCKS = {"much KV cache": 1000, "little KV cache": 80}
REQUESTS, LOADS = 150, (0.5, 0.9)
ANSWER = 96
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""Its weights are random."""


class Asked(NamedTuple):
    """One request: when it comes, the ids of its prompt, what the gym calls it, how long its answer is."""

    at: float
    prompt: tuple[int, ...]
    text: Text
    answer: int


class Served(NamedTuple):
    """What came of them, in seconds after each was due; prompt tokens found cached; preemptions."""

    first_s: list[float]
    last_s: list[float]
    cached: float
    preemptions: float


def main() -> int:
    """Measures, compares, prints."""
    set_up()
    model, rows = None, list[tuple[str, ...]]()
    for name, blocks in KV_BLOCKS.items():
        with Vllm(blocks) as vllm:
            model = model or _measured(vllm)
            for load in LOADS:
                # Of other seeds: what was asked before would be cached.
                requests = _requests(random.Random(f"{name} {load}"), _rate(model, load))
                real = vllm.serve(requests)
                gym = simulated(replace(model, kv_tokens=blocks * BLOCK), requests)
                rows += _compared(f"{name}, load {load}", requests, real, gym)
    print(f"\n{model}\n\n| | vLLM | gym | gym / vLLM |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0


class Vllm:
    """One engine with so many blocks of KV cache, in a process of its own."""

    def __init__(self, blocks: int) -> None:
        self._options = {
            "load_format": "dummy",
            "hf_overrides": SHAPE,
            "max_model_len": 4096,
            "enforce_eager": True,
            "max_num_seqs": SEATS,
            "max_num_batched_tokens": STEP_TOKENS,
            "block_size": BLOCK,
            "num_gpu_blocks_override": blocks,
            "disable_log_stats": False,
        }

    def __enter__(self) -> Vllm:
        command = [str(VENV / "bin" / "python"), str(Path(__file__).with_name("vllm_steps.py")), str(MODEL)]
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        with (RUN / "calibrate.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ | ENVIRONMENT | own,
            )
        self._tell(self._options)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def serve(self, requests: Sequence[Asked]) -> Served:
        """What vLLM makes of them."""
        told = self._tell([(asked.at, asked.prompt, asked.answer) for asked in requests])
        due = [asked.at for asked in requests]
        return Served(
            [at - began for at, began in zip(told["first"], due, strict=True)],
            [at - began for at, began in zip(told["last"], due, strict=True)],
            told["cached"],
            told["preemptions"],
        )

    def _tell(self, line: object) -> Any:
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        pipes.stdin.write(orjson.dumps(line) + b"\n")
        pipes.stdin.flush()
        for said in pipes.stdout:
            # Libraries print as well.
            if said.startswith((b'"ready"', b'{"first"')):
                return orjson.loads(said)
        raise RuntimeError(f"vLLM ended; the end of {RUN / 'calibrate.log'} says why")


def _measured(vllm: Vllm) -> Model:
    """The figures of a model: straight lines through what some batches, contexts and prompts take."""
    rng = random.Random(1)
    for _ in range(4):
        # The first steps take longer.
        _step_s(vllm, rng, 1, 16)
    by_batch = [(b, _step_s(vllm, rng, b, 16)) for b in (1, 2, 4, 6, 8)]
    line = linear_regression(*zip(*by_batch, strict=True))
    by_context = [(4 * (n + ANSWER // 2), _step_s(vllm, rng, 4, n)) for n in (16, 500, 1500, 3000)]
    context = linear_regression(*zip(*by_context, strict=True))
    # The short prompts of `by_batch` have some context, too.
    per_sequence_s = max(line.slope - context.slope * (16 + ANSWER // 2), 0.0)
    base_s = max(line.intercept, 1e-4)
    prompts = (128, 256, 512, 1024, 2048)
    firsts = [(n, _first_s(vllm, rng, n) - base_s * -(-n // STEP_TOKENS)) for n in prompts]
    # Attention: what a token takes grows with those before it.
    per_token = linear_regression([n / 2 for n, _ in firsts], [s / n for n, s in firsts])
    for name, pairs in (("step s, batch", by_batch), ("step s, context", by_context), ("prompt s", firsts)):
        print(name, " ".join(f"{n}: {s:.4f}" for n, s in pairs), flush=True)
    return Model(
        prefill_tokens_s=round(1.0 / per_token.intercept),
        base_s=round(base_s, 5),
        per_sequence_s=round(per_sequence_s, 6),
        per_context_token_s=round(max(context.slope, 0.0), 9),
        per_pair_s=round(max(per_token.slope, 0.0), 10),
        front_end_s=0.0,
        step_tokens=STEP_TOKENS,
        seats=SEATS,
    )


def _step_s(vllm: Vllm, rng: random.Random, batch: int, prompt: int) -> float:
    """How long a step takes with so many sequences of so long a prompt; the median of three looks."""
    looks = []
    for _ in range(3):
        served = vllm.serve([Asked(0.0, _ids(rng, prompt), Text(), ANSWER) for _ in range(batch)])
        # All decode from when the last one has shown its first token until the first has shown its last.
        steps = ANSWER - 1 - (-(-batch * prompt // STEP_TOKENS) - 1)
        looks.append((min(served.last_s) - max(served.first_s)) / steps)
    return median(looks)


def _first_s(vllm: Vllm, rng: random.Random, prompt: int) -> float:
    return median(vllm.serve([Asked(0.0, _ids(rng, prompt), Text(), 1)]).first_s[0] for _ in range(5))


def _ids(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """A prompt as ids: so many tokens exactly, and never asked before."""
    return tuple(rng.randrange(300, 4000) for _ in range(tokens))


def _rate(model: Model, load: float) -> float:
    """Requests a second that keep the engine busy for so much of the time, as far as can be told."""
    return load / (450.0 / model.prefill_tokens_s + 40.0 * model.step_s(0, SEATS, 6000.0) / SEATS)


def _requests(rng: random.Random, rate: float) -> list[Asked]:
    """Half of them begin with one of three texts; prompts of 100 to 1,600 tokens, answers of 40."""
    systems = [(_ids(rng, 1024), Text([n << 16]).extend(1024)) for n in range(3)]
    at, made = 0.0, []
    for number in range(REQUESTS):
        at += rng.expovariate(rate)
        ids, text = rng.choice(systems) if rng.random() < 0.5 else ((), Text([(number + 9) << 16]))
        own = rng.randint(100, 600)
        made.append(Asked(at, (*ids, *_ids(rng, own)), text.extend(own), exponential(rng, 40, 200, least=2)))
    return made


def simulated(model: Model, requests: Sequence[Asked]) -> Served:
    """What the gym's engine makes of them."""
    engine, owners = Engine(model), list[GymSequence]()
    first: dict[GymSequence, float] = {}
    last: dict[GymSequence, float] = {}
    for asked in requests:
        names = asked.text.extend(asked.answer).names
        owners.append(GymSequence(len(asked.prompt), asked.answer, names))
        engine.expect(owners[-1])
        _note(engine.take(owners[-1], asked.at), first, last)
    while (at := engine.next_at) is not None:
        _note(engine.advance(at), first, last)
    return Served(
        [first[own] - asked.at for own, asked in zip(owners, requests, strict=True)],
        [last[own] - asked.at for own, asked in zip(owners, requests, strict=True)],
        float(engine.hit_tokens),
        float(engine.preemptions),
    )


def _note(shown: Sequence[Shown], first: dict[GymSequence, float], last: dict[GymSequence, float]) -> None:
    for one in shown:
        first.update(dict.fromkeys(one.first, one.at))
        last.update(dict.fromkeys(one.ended, one.at))


def _compared(name: str, requests: Sequence[Asked], real: Served, gym: Served) -> list[tuple[str, ...]]:
    """The rows of the table for one run of both."""
    tokens = sum(len(asked.prompt) for asked in requests)
    pairs = [
        ("TTFT mean, s", fmean(real.first_s), fmean(gym.first_s)),
        ("TTFT p90, s", _p90(real.first_s), _p90(gym.first_s)),
        ("whole mean, s", fmean(real.last_s), fmean(gym.last_s)),
        ("whole p90, s", _p90(real.last_s), _p90(gym.last_s)),
        ("prompt tokens cached, %", 100.0 * real.cached / tokens, 100.0 * gym.cached / tokens),
        ("preemptions", real.preemptions, gym.preemptions),
    ]
    return [(f"{name}: {what}", f"{a:.3g}", f"{b:.3g}", f"{b / a:.2f}" if a else "") for what, a, b in pairs]


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * len(values))]


if __name__ == "__main__":
    sys.exit(main())
