"""Drill: known answers of real vLLM engines, healthy and busy ones first, then one with other weights.

`python -m loadtests.vllm_answers` starts engines on this machine's CPU (3 GB each, a minute). Two of them get
bursts of requests for ten minutes while the gate asks for the known answer as often as it can: none may
differ. Then a third one comes that reads other weights from the same path, so that its build is the same: it
must be DOWN within two answers, and the others stay. Of two that disagree both stay, and an event says so.
The exit code is 1 when something is not as it should be.
"""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import orjson

from loadtests.kit.gate import GateProcess, Named, metric_sum
from loadtests.kit.report import run_parts
from loadtests.kit.waiting import wait_until
from loadtests.vllm.install import MODEL, set_up
from loadtests.vllm.single import serving
from loadtests.vllm.unit import MODEL_NAME
from loadtests.wire.blocking import fetch

EVERY_S = 2.0
BURST, TOGETHER = 48, 16
REST_S = 3.0
"""The known answer is asked of idle units only, so bursts take turns with rest."""
SILENCE_S = 120.0
FOUND_S = 60.0
MAY_DIFFER = 2
WORDS = ["import", "return", "class", "def", "self", "name", "value", "print", "open", "read", "with", "file"]


async def main(minutes: float) -> int:
    """All parts; 1 when one of them failed."""
    set_up()
    with _swappable() as model:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving((), model=model)) for _ in "ab"]
            _swap(model, _other_weights(model.parent))
            urls.append(await stack.enter_async_context(serving((), model=model)))
            await asyncio.gather(*(asyncio.to_thread(_warm_up, url) for url in urls))
            units = [Named(name, url) for name, url in zip("abc", urls, strict=True)]
            parts = {
                "busy and healthy": lambda: _busy(units[:2], 60.0 * minutes),
                "one of three has other weights": lambda: _odd_one(units),
                "two disagree": lambda: _disagree(units[1:]),
            }
            return await asyncio.to_thread(run_parts, parts)


def _warm_up(url: str) -> None:
    """The first requests of an engine take seconds."""
    rng = random.Random(0)
    for _ in range(8):
        fetch(f"{url}/v1/chat/completions", _body(rng), silence_s=SILENCE_S)


def _gate(units: Sequence[Named]) -> GateProcess:
    return GateProcess(units, settings={"known_answer": {"every_s": EVERY_S}})


def _busy(units: Sequence[Named], for_s: float) -> list[str]:
    """Bursts of requests before healthy engines; what was a false alarm."""
    rng, statuses, began = random.Random(5), Counter[int](), time.time()
    with _gate(units) as gate, ThreadPoolExecutor(TOGETHER) as pool:
        while time.time() < began + for_s:
            bodies = [_body(rng) for _ in range(rng.randrange(BURST))]
            statuses.update(pool.map(lambda body: _ask(gate, body), bodies))
            time.sleep(rng.uniform(0.0, 2 * REST_S))
        same, differs = _answers(gate, "same"), _answers(gate, "differs")
        problems = [flip["line"] for flip in gate.flips(began) if flip["after"] == "down"]
        problems += [str(event) for event in gate.events() if event["kind"] == "answers_differ"]
    print(f"{time.time() - began:.0f} s, requests {dict(statuses)}; {same:.0f} same, {differs:.0f} not")
    few = [] if same >= for_s / 20 else [f"only {same:.0f} known answers were the same"]
    return problems + few + ([f"{differs:.0f} known answers differ"] if differs else [])


def _odd_one(units: Sequence[Named]) -> list[str]:
    """The last unit has other weights."""
    odd = units[-1].name
    with _gate(units) as gate:
        builds = {unit["build"]["fingerprint"] for unit in gate.units()}
        found = wait_until(lambda: _verdicts(gate)[odd] == "down", FOUND_S)
        # One that is down is asked on.
        differs = _answers(gate, "differs", odd)
        time.sleep(3 * EVERY_S)
        verdicts = _verdicts(gate)
        print(f"builds {builds}; {verdicts}; {differs:.0f} answers of {odd} were not the same")
        healthy = [name for name in verdicts if name != odd]
        problems = [] if found else [f"{odd} is {verdicts[odd]}"]
        problems += [f"{name} is {verdicts[name]}" for name in healthy if verdicts[name] != "up"]
        problems += [f"{name} differs" for name in healthy if _answers(gate, "differs", name)]
    return problems + ([] if differs <= MAY_DIFFER else [f"found after {differs:.0f} answers"])


def _disagree(units: Sequence[Named]) -> list[str]:
    """Two units, of which nobody can tell who is right."""
    with _gate(units) as gate:
        said = wait_until(lambda: len(_loud(gate)) == len(units), FOUND_S)
        verdicts = _verdicts(gate)
    print(f"{verdicts}; loud: {said}")
    stay = [f"{name} is {verdict}" for name, verdict in verdicts.items() if verdict != "up"]
    return stay + ([] if said else ["no event for each of them says that they disagree"])


def _loud(gate: GateProcess) -> set[str]:
    return {event["unit"] for event in gate.events() if event["kind"] == "answers_differ"}


def _verdicts(gate: GateProcess) -> dict[str, str]:
    return {unit["name"]: unit["verdict"] for unit in gate.units()}


def _answers(gate: GateProcess, result: str, unit: str = "") -> float:
    label = f'{{result="{result}",unit="{unit}' + ('"' if unit else "")
    return metric_sum(gate.metrics(), "cellgate_known_answers_total", label)


def _body(rng: random.Random) -> bytes:
    """Of all kinds: greedy or not, streamed or not, long and short."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.choice((5, 50, 400))))
    fields = {"stream": rng.random() < 0.5, "temperature": rng.choice((0.0, 1.0))}
    messages = [{"role": "user", "content": text}]
    return orjson.dumps(
        {"model": MODEL_NAME, "messages": messages, "max_tokens": rng.randrange(1, 64), **fields}
    )


def _ask(gate: GateProcess, body: bytes) -> int:
    return fetch(f"{gate.url}/v1/chat/completions", body, silence_s=SILENCE_S).status


@contextmanager
def _swappable() -> Iterator[Path]:
    """A path to the tiny model that can be made to lead to another one."""
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        path = Path(folder) / "model"
        path.symlink_to(MODEL)
        yield path


def _swap(path: Path, model: Path) -> None:
    path.unlink()
    path.symlink_to(model)


def _other_weights(folder: Path) -> Path:
    """A copy of the tiny model with every seventh weight negated.

    Format: https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header, little
    endian, then the numbers; here they are float32, with the sign in the last byte's highest bit.
    """
    copy = shutil.copytree(MODEL, folder / "other")
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    signs = slice(8 + int.from_bytes(data[:8], "little") + 3, None, 7 * 4)
    data[signs] = data[signs].translate(bytes(each ^ 0x80 for each in range(256)))
    file.write_bytes(data)
    return copy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m loadtests.vllm_answers", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the bursts last")
    sys.exit(asyncio.run(main(parser.parse_args().minutes)))
