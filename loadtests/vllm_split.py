"""Prompts computed by one real vLLM engine and answered by another, over NIXL.

`python -m loadtests.vllm_split --prefillers 1` starts so many prefillers and a decoder on this machine's CPU
(3 GB each) and a gate before them. First some requests come one by one, and the decoder's counters tell for
each where its prompt was computed. Then four long answers keep the decoder busy beside 100 requests with
prompts of their own, half of them streamed. All texts are compared with those of an engine that computes
everything itself. Half-way, with `--kill`, a prefiller is killed. The exit code is 1 when an answer is lost
or differs, or when the decoder computed itself what was split.

The gate splits whatever it can (loadtests/vllm/splitting_gate.py), and is patient with engines that share two
cores with everything else: what is shown is that the legs work.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import orjson

from loadtests.kit import progress
from loadtests.kit.gate import GateProcess, Named, Program
from loadtests.kit.processes import free_port
from loadtests.vllm import nixl
from loadtests.vllm.install import set_up
from loadtests.vllm.prompts import some_words
from loadtests.vllm.unit import HOST, MODEL_NAME
from loadtests.wire.blocking import fetch

REQUESTS, AT_ONCE, BESIDE = 100, 4, 4
ANSWER_TOKENS, LONG_TOKENS, WARM_UPS, ONE_BY_ONE = 16, 1500, 24, 10
CANARIES_TOKENS = 60
"""Those of the gate are computed by the decoder itself, a few tokens each."""
SILENCE_S = 300.0
SPLITTING = Program((sys.executable, "-m", "loadtests.vllm.splitting_gate"))
PATIENT = {"canary_timeout_s": 30}
SOURCES = ("external_kv_transfer", "local_compute", "local_cache_hit")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and the text that came; None: it was lost."""

    body: dict[str, Any]
    text: str | None
    prompt_tokens: int = 0


async def main(prefillers: int, *, kill: bool) -> int:
    """Everything; 1 when an answer was lost or differs."""
    await asyncio.to_thread(set_up)
    await asyncio.to_thread(nixl.set_up)
    ports = {f"p{number}": free_port() for number in range(1, prefillers + 1)} | {"d1": free_port()}
    async with AsyncExitStack() as stack:
        engines = {name: nixl.serving(port) for name, port in ports.items()}
        started = await asyncio.gather(*map(stack.enter_async_context, engines.values()))
        pids = {name: process.pid for name, process in zip(engines, started, strict=True)}
        urls = {name: f"http://{HOST}:{port}" for name, port in ports.items()}
        units = [
            {"name": name, "url": url, "engine": "vllm", "role": "decode" if name == "d1" else "prefill"}
            for name, url in urls.items()
        ]
        cells = [{"name": "c", "transfer": "nixl", "units": units}]
        named = [Named(name, url) for name, url in urls.items()]
        settings = {"cells": cells, "rules": PATIENT, "timeouts": {"connect_s": 30}}
        with GateProcess(named, settings=settings, program=SPLITTING) as gate:
            victim = pids["p1"] if kill else 0
            try:
                code = await asyncio.to_thread(_play, gate, urls, victim)
                return code or int(kill and not _is_down(gate, "p1"))
            finally:
                print("\n".join(event["line"] for event in gate.events()))


def _play(gate: GateProcess, urls: dict[str, str], victim: int) -> int:
    rng = random.Random(20)
    loop = asyncio.new_event_loop()
    try:
        for _ in range(WARM_UPS):
            _answer(gate.url, _body(rng, stream=True))
        alone, is_moved = _one_by_one(gate, urls["d1"], rng)
        beside = [loop.run_in_executor(None, _answer, gate.url, _long(rng)) for _ in range(BESIDE)]
        before = _sources(urls["d1"])
        bodies = [_body(rng, stream=number % 2 == 0) for number in range(REQUESTS)]
        asked: list[Asked] = []
        for first in range(0, REQUESTS, AT_ONCE):
            some = [
                loop.run_in_executor(None, _answer, gate.url, body)
                for body in bodies[first : first + AT_ONCE]
            ]
            if victim and len(asked) >= REQUESTS // 2:
                os.killpg(victim, signal.SIGKILL)
                victim = 0
            asked += loop.run_until_complete(asyncio.gather(*some))
            beside = [
                loop.run_in_executor(None, _answer, gate.url, _long(rng)) if each.done() else each
                for each in beside
            ]
        after = _sources(urls["d1"])
        loop.run_until_complete(asyncio.gather(*beside))
    finally:
        loop.close()
    page = gate.metrics()
    print("\n".join(line for line in page.splitlines() if re.match("cellgate_(split|transfer|link)", line)))
    print("all", len(asked), "requests beside long answers, whose prompts are in these figures too:")
    return _report(alone + asked, urls["d1"], _grown(before, after)) or int(not is_moved)


def _one_by_one(gate: GateProcess, decoder: str, rng: random.Random) -> tuple[list[Asked], bool]:
    """Requests with nothing beside them, and whether the decoder computed no prompt of those that were
    split.
    """
    asked, is_moved, splits = [], True, 0
    for number in range(ONE_BY_ONE):
        arrived, before = _arrived(gate), _sources(decoder)
        asked.append(one := _answer(gate.url, _body(rng, stream=number % 2 == 0)))
        grew, was_split = _grown(before, _sources(decoder)), _arrived(gate) > arrived
        splits += was_split
        is_moved &= not was_split or grew["local_compute"] <= CANARIES_TOKENS
        print(f"request {number + 1} alone, {one.prompt_tokens} prompt tokens, split: {was_split};", grew)
    print(f"{splits} of {ONE_BY_ONE} requests were split")
    return asked, is_moved and splits > 0


def _arrived(gate: GateProcess) -> int:
    """Split requests whose blocks have arrived."""
    arrived = r'^cellgate_split_steps_total{[^}]*step="transferred"[^}]*} (\S+)'
    return int(sum(map(float, re.findall(arrived, gate.metrics(), re.M))))


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, int]:
    return {name: int(after[name] - before[name]) for name in SOURCES}


def _is_down(gate: GateProcess, name: str) -> bool:
    verdict = next(unit["verdict"] for unit in gate.units() if unit["name"] == name)
    print(f"the unit that was killed, {name}, is {verdict}")
    return bool(verdict == "down")


def _report(asked: list[Asked], whole: str, grew: dict[str, int]) -> int:
    lost = sum(one.text is None for one in asked)
    # The engine that has answered computes them once more, all by itself.
    differ = sum(one.text is not None and one.text != _answer(whole, one.body).text for one in asked)
    tokens = sum(one.prompt_tokens for one in asked)
    print(f"{len(asked)} requests with {tokens} prompt tokens: {lost} lost, {differ} differ")
    print("the decoder's prompt tokens by source:", grew)
    return 1 if lost or differ else 0


def _answer(url: str, body: dict[str, Any]) -> Asked:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        reply = fetch(url + path, orjson.dumps(body), silence_s=SILENCE_S)
    except OSError:
        return Asked(body, None)
    documents = _documents(reply.body, stream=body["stream"]) if reply.status == 200 else []
    if not documents or any(document.get("error") for document in documents):
        print(f"lost: {reply.status} {reply.body[:300]!r}", flush=True)
        return Asked(body, None)
    text = "".join(_text_of(choice) for document in documents for choice in document["choices"])
    usage: dict[str, Any] = next((document["usage"] for document in documents if document.get("usage")), {})
    return Asked(body, text, usage.get("prompt_tokens", 0))


def _documents(body: bytes, *, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return [orjson.loads(body)]
    lines = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: "))
    return [orjson.loads(line) for line in lines if line != b"[DONE]"]


def _text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or part.get("content") or "")


def _body(rng: random.Random, *, stream: bool) -> dict[str, Any]:
    text = some_words(rng, rng.randrange(150, 400))
    given = {"prompt": text} if rng.random() < 0.5 else {"messages": [{"role": "user", "content": text}]}
    body = given | {"model": MODEL_NAME, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": stream}
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


def _long(rng: random.Random) -> dict[str, Any]:
    return _body(rng, stream=True) | {"max_tokens": LONG_TOKENS, "ignore_eos": True}


def _sources(url: str) -> dict[str, float]:
    """The engine's prompt tokens by where they came from."""
    page = fetch(f"{url}/metrics").body.decode()
    found = re.findall(r'^vllm:prompt_tokens_by_source_total{[^}]*source="(\w+)"[^}]*} (\S+)', page, re.M)
    return dict.fromkeys(SOURCES, 0.0) | {name: float(value) for name, value in found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefillers", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill a prefiller half-way")
    options = parser.parse_args()
    with progress.shown("vllm-split"):
        sys.exit(asyncio.run(main(options.prefillers, kill=options.kill)))
