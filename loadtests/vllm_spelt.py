"""Drill: streams of a real vLLM engine whose answers are spelt oddly break in the middle, and go on.

`python -m loadtests.vllm_spelt` starts one engine with random weights (`--load-format dummy`) on this
machine's CPU, the gate before it, and two relays between, which are its two units. Random weights say tokens
in any order: their text is seldom spelt as the tokenizer would spell it. Each stream is cut in its middle. A
greedy answer must be the one without a gate; a sampled one must be as long as was asked; or there is an
error, which is counted. The exit code is 1 when an answer is another.
"""

import argparse
import asyncio
import sys
from typing import Any, NamedTuple

import orjson

from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.report import print_problems
from loadtests.vllm.install import set_up
from loadtests.vllm.relay import Budget, Relay
from loadtests.vllm.single import serving
from loadtests.wire.blocking import fetch

TIMES, TOKENS = 20, 120
SILENCE_S = 120.0
ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion, greedy": ("completions", {"temperature": 0}),
    "completion, sampled": ("completions", {"temperature": 1.0}),
    "chat, greedy": ("chat/completions", {"temperature": 0}),
    "chat, sampled": ("chat/completions", {"temperature": 1.0}),
}


class Answer(NamedTuple):
    """What a client reads of a stream."""

    text: str
    ends: list[str]
    tokens: int
    events: int
    error: str


async def main() -> int:
    """Run it, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    times = parser.parse_args().times
    set_up()
    async with serving(["--load-format", "dummy"]) as engine:
        return await asyncio.to_thread(_drill, engine, times)


def _drill(engine: str, times: int) -> int:
    problems: list[str] = []
    budget = Budget()
    with (
        Relay("a", engine, budget) as a,
        Relay("b", engine, budget) as b,
        GateProcess([Named("a", a.url), Named("b", b.url)]) as gate,
    ):
        for kind, (path, sampling) in KINDS.items():
            whole = lost = odd = 0
            for number in range(times):
                body = _body(path, number) | sampling
                expected = _ask(f"{engine}/v1/{path}", body)
                odd += _tokens(engine, expected.text) != expected.tokens
                budget.cut_after(expected.events // 2)
                got = _ask(f"{gate.url}/v1/{path}", body)
                lost += bool(got.error)
                wrong = "" if got.error else _wrong(expected, got, is_greedy=sampling["temperature"] == 0)
                problems += [f"{kind}, {number}: {wrong}"] if wrong else []
                whole += not (got.error or wrong)
                if got.error:
                    print(f"    {kind}, {number}: {got.error[:200]}")
            print(
                f"{kind}: {whole} of {times} as asked, {lost} ended by an error; {odd} spelt oddly",
                flush=True,
            )
        print(f"{budget.spent} streams were cut")
    print_problems(problems)
    return 1 if problems else 0


def _body(path: str, number: int) -> dict[str, Any]:
    prompt = f"{number} gates stand before the engine"
    return ASKED | ({"prompt": prompt} if path == "completions" else {"messages": [_user(prompt)]})


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _wrong(expected: Answer, got: Answer, *, is_greedy: bool) -> str:
    """What is wrong with an answer that has come; empty: nothing."""
    if is_greedy and (got.text, got.ends, got.tokens) != (expected.text, expected.ends, expected.tokens):
        return f"{got.tokens} tokens, {got.ends}, {len(got.text)} characters; not {expected}"
    if got.ends == ["length"] and got.tokens != TOKENS:
        return f"it ended by its length of {got.tokens} tokens"
    if got.tokens > TOKENS or len(got.ends) != 1:
        return f"{got.tokens} tokens, {got.ends}"
    return ""


def _tokens(engine: str, text: str) -> int:
    """How many tokens the tokenizer makes of a text."""
    body = orjson.dumps({"model": "tiny", "prompt": text, "add_special_tokens": False})
    return int(orjson.loads(fetch(f"{engine}/tokenize", body, silence_s=SILENCE_S).body)["count"])


def _ask(url: str, body: dict[str, Any]) -> Answer:
    try:
        reply = fetch(url, orjson.dumps(body), silence_s=SILENCE_S)
    except OSError as failed:
        return Answer("", [], 0, 0, f"{failed!r}")
    text, tokens, events, error = "", 0, 0, "" if reply.status == 200 else f"{reply.status}"
    ends: list[str] = []
    for event in reply.body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{"):
            continue
        document = orjson.loads(data)
        events += 1
        error = error or str((document.get("error") or {}).get("message", ""))
        tokens = (document.get("usage") or {}).get("completion_tokens", tokens)
        for choice in document.get("choices", ()):
            assert not choice.get("token_ids")
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            ends += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return Answer(text, ends, tokens, events, error)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
