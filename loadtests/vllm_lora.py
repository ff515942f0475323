"""Drill: LoRA adapters on two real vLLM engines, each of which keeps one adapter loaded.

`python -m loadtests.vllm_lora` starts the engines on this machine's CPU (4 GB each, two minutes) and the gate
before them. Requests for two adapters must each go where the adapter is loaded; an adapter that is loaded
later is served some seconds after its first 404, one that an engine has unloaded is asked of the other, and
an unknown one gets 404. The exit code is 1 when something is not as it should be.
"""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.report import print_problems
from loadtests.vllm.install import VENV, set_up
from loadtests.vllm.single import serving
from loadtests.vllm.unit import MODEL_NAME
from loadtests.wire.blocking import fetch

SILENCE_S = 60.0
ROUNDS = 10
TOGETHER = 3
LATER = "singer"
ADAPTERS = ("poet", "clerk")
MODULE = str(Path(__file__).parent / "vllm" / "make_adapter.py")


async def main() -> int:
    """Run it, and print what was seen."""
    set_up()
    with _adapters() as folder:
        modules = [f"{name}={folder / name}" for name in ADAPTERS]
        options = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--lora-modules", *modules]
        environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving(options, environ)) for _ in "ab"]
            units = [Named(name, url) for name, url in zip("ab", urls, strict=True)]
            with GateProcess(units) as gate:
                problems = await asyncio.to_thread(_all, gate.url, urls, folder)
    print_problems(problems)
    return 1 if problems else 0


def _all(gate: str, engines: list[str], folder: Path) -> list[str]:
    return [
        *_placed(gate),
        *_loaded_later(gate, engines[0], folder),
        *_unloaded(gate, engines),
        *_unknown(gate),
    ]


def _placed(gate: str) -> list[str]:
    """Both adapters at once, again and again: each engine loads one of them, once."""
    went: dict[str, Counter[str]] = {name: Counter() for name in ADAPTERS}
    texts: dict[str, set[str]] = {name: set() for name in (*ADAPTERS, MODEL_NAME)}
    with ThreadPoolExecutor(2 * TOGETHER) as pool:
        for _ in range(ROUNDS):
            models = [name for name in ADAPTERS for _ in range(TOGETHER)]
            for model, (status, unit, text) in zip(
                models, pool.map(lambda m: _ask(gate, m), models), strict=True
            ):
                went[model][f"{unit} {status}"] += 1
                texts[model].add(text)
    texts[MODEL_NAME].add(_ask(gate, MODEL_NAME)[2])
    print("went:", {name: dict(counts) for name, counts in went.items()})
    problems = [f"{name}: {dict(counts)}" for name, counts in went.items() if _second(counts) > TOGETHER]
    if len(set.union(*texts.values())) != len(texts):
        problems.append(f"not one text for each model: {texts}")
    return problems


def _second(counts: Counter[str]) -> int:
    """How many did not go where most went. The first few come before any engine has the adapter."""
    return counts.total() - max(counts.values())


def _loaded_later(gate: str, engine: str, folder: Path) -> list[str]:
    """An adapter that one engine loads while the gate runs."""
    before = _ask(gate, LATER)[0]
    _tell(engine, "load", {"lora_name": LATER, "lora_path": str(folder / LATER)})
    statuses = [before]
    for _ in range(20):
        statuses.append(_ask(gate, LATER)[0])
        if statuses[-1] == 200:
            break
        asyncio.run(asyncio.sleep(0.25))
    print("loaded later:", statuses)
    return [] if statuses[-1] == 200 else [f"{LATER} was never served: {statuses}"]


def _unloaded(gate: str, engines: list[str]) -> list[str]:
    """An adapter that one engine unloads is asked of the other, without an error shown."""
    _tell(engines[0], "unload", {"lora_name": "poet"})
    seen = Counter(_ask(gate, "poet")[:2] for _ in range(6))
    print("unloaded at a:", {f"{unit} {status}": count for (status, unit), count in seen.items()})
    return [] if set(seen) == {(200, "b")} else [f"poet after it was unloaded at a: {dict(seen)}"]


def _unknown(gate: str) -> list[str]:
    status, _, text = _ask(gate, "nobody")
    print("unknown:", status, text)
    named = all(name in text for name in (MODEL_NAME, *ADAPTERS))
    return [] if status == 404 and named else [f"an unknown adapter got {status}: {text}"]


def _ask(gate: str, model: str) -> tuple[int, str, str]:
    """Status, unit, and the text or the message of the error."""
    body = {
        "model": model,
        "max_tokens": 16,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Say!"}],
    }
    reply = fetch(f"{gate}/v1/chat/completions", orjson.dumps(body), silence_s=SILENCE_S)
    found: Any = orjson.loads(reply.body)
    text = found["choices"][0]["message"]["content"] if reply.status == 200 else found["error"]["message"]
    return reply.status, reply.unit, text


def _tell(engine: str, what: str, body: dict[str, str]) -> None:
    reply = fetch(f"{engine}/v1/{what}_lora_adapter", orjson.dumps(body), silence_s=SILENCE_S)
    if reply.status != 200:
        raise RuntimeError(f"{what} {body}: HTTP {reply.status} {reply.body!r}")


@contextmanager
def _adapters() -> Iterator[Path]:
    """A folder with an adapter in a folder each."""
    with TemporaryDirectory(prefix="lora-") as folder:
        for seed, name in enumerate((*ADAPTERS, LATER)):
            command = [str(VENV / "bin" / "python"), MODULE, f"{folder}/{name}", str(seed)]
            subprocess.run(command, check=True)
        yield Path(folder)


if __name__ == "__main__":
    with progress.shown("vllm-lora"):
        sys.exit(asyncio.run(main()))
