"""Drill: streams of a real engine whose answers are spelt oddly break in the middle, and go on.

`python -m loadtests.vllm_spelt` starts one engine with random weights (`--load-format dummy`) on this
machine's CPU, the gate before it, and two relays between, which are its two units. Random weights say tokens
in any order: their text is seldom spelt as the tokenizer would spell it. Each stream is cut in its middle. A
greedy answer must be the one without a gate; a sampled one must be as long as was asked; or there is an
error event, which is counted. `--interval 3`: the engine sends three tokens in an event; `--engine sglang`:
chats and completions of SGLang. The exit code is 1 when an answer is another, or ends without a word.
"""

import argparse
import asyncio
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.report import print_problems
from loadtests.sglang import engine as sglang
from loadtests.sglang import install as sglang_install
from loadtests.vllm.install import set_up
from loadtests.vllm.relay import Budget, Relay
from loadtests.vllm.single import serving
from loadtests.wire.blocking import BlockingConnection, fetch
from loadtests.wire.messages import post
from loadtests.wire.reply import Reply

TIMES, TOKENS = 20, 120
SILENCE_S = 120.0
ASKED: dict[str, Any] = {"model": "tiny", "stream": True}
TELLING = {"max_tokens": TOKENS, "stream_options": {"include_usage": True}}
PATHS: dict[str, str] = {
    "completion": "completions",
    "chat": "chat/completions",
    "message": "messages",
    "response": "responses",
}
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 1.0}}
_LENGTH = ("length", "max_tokens", "incomplete")
"""How an answer ends that has all the tokens that were asked for."""


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
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--interval", type=int, default=1)
    asked = parser.parse_args()
    options = ["--load-format", "dummy", "--stream-interval", str(asked.interval)]
    if asked.engine == "sglang":
        sglang_install.set_up()
        async with sglang.serving(options) as engine:
            return await asyncio.to_thread(_drill, engine.url, asked.times, ("completion", "chat"))
    set_up()
    async with serving(options) as url:
        return await asyncio.to_thread(_drill, url, asked.times, tuple(PATHS))


def _drill(engine: str, times: int, routes: Sequence[str]) -> int:
    problems: list[str] = []
    budget = Budget()
    with (
        Relay("a", engine, budget) as a,
        Relay("b", engine, budget) as b,
        GateProcess([Named("a", a.url), Named("b", b.url)]) as gate,
    ):
        kinds = itertools.product(routes, SAMPLING)
        for kind, (path, sampling) in {f"{a}, {b}": (PATHS[a], SAMPLING[b]) for a, b in kinds}.items():
            whole = lost = odd = 0
            before = budget.spent
            for number in range(times):
                body = _body(path, number) | sampling
                expected = _ask(f"{engine}/v1/{path}", body)
                odd += _tokens(engine, expected.text) != expected.tokens
                # Another sample may be shorter.
                budget.cut_after(min(expected.events // 2, number + 9))
                got = _ask(f"{gate.url}/v1/{path}", body)
                lost += bool(got.error)
                budget.cut_after(None)
                wrong = "" if got.error else _wrong(expected, got, is_greedy=sampling["temperature"] == 0)
                problems += [f"{kind}, {number}: {wrong}"] if wrong else []
                whole += not (got.error or wrong)
                if got.error:
                    print(f"    {kind}, {number}: {got.error[:200]}")
            print(
                f"{kind}: {whole} of {times} as asked, {lost} ended by an error; {odd} spelt oddly; "
                f"{budget.spent - before} cut",
                flush=True,
            )
        print(f"{budget.spent} streams were cut")
    print_problems(problems)
    return 1 if problems else 0


def _body(path: str, number: int) -> dict[str, Any]:
    prompt = f"{number} gates stand before the engine"
    match path:
        case "completions":
            return ASKED | TELLING | {"prompt": prompt}
        case "responses":
            return ASKED | {"input": prompt, "max_output_tokens": TOKENS}
        case "messages":
            return ASKED | {"messages": [_user(prompt)], "max_tokens": TOKENS}
    return ASKED | TELLING | {"messages": [_user(prompt)]}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _wrong(expected: Answer, got: Answer, *, is_greedy: bool) -> str:
    """What is wrong with an answer that has come; empty: nothing."""
    if is_greedy and (got.text, got.ends, got.tokens) != (expected.text, expected.ends, expected.tokens):
        return f"{got.tokens} tokens, {got.ends}, {len(got.text)} characters; not {expected}"
    if got.ends and got.ends[0] in _LENGTH and got.tokens != TOKENS:
        return f"it ended by its length of {got.tokens} tokens"
    if got.tokens > TOKENS or len(got.ends) != 1:
        return f"{got.tokens} tokens, {got.ends}"
    return ""


def _tokens(engine: str, text: str) -> int:
    """How many tokens the tokenizer makes of a text."""
    body = orjson.dumps({"model": "tiny", "prompt": text, "add_special_tokens": False})
    return int(orjson.loads(fetch(f"{engine}/tokenize", body, silence_s=SILENCE_S).body)["count"])


def _ask(url: str, body: dict[str, Any]) -> Answer:
    reply, place = Reply(), urlsplit(url)
    failed = ""
    with BlockingConnection(url, SILENCE_S) as connection:
        try:
            connection.exchange(post(orjson.dumps(body), path=place.path, host=place.netloc), reply)
        except OSError as closed:
            # The gate ends a reply so, behind the event that says why.
            failed = f"{closed!r}"
    text, tokens, events, error = "", 0, 0, "" if reply.status == 200 else f"{reply.status}"
    ends: list[str] = []
    for event in reply.body.split(b"\n\n"):
        data = event.rpartition(b"data: ")[2]
        if not data.startswith(b"{"):
            continue
        document = orjson.loads(data)
        events += 1
        error = error or str((document.get("error") or {}).get("message", ""))
        piece, end, count = _read_block(document) if "type" in document else _read_choice(document)
        text, tokens = text + piece, tokens if count is None else count
        ends += [end] if end else []
    if failed and not error:
        ends.append(f"without a word: {failed}")
    return Answer(text, ends, tokens, events, error)


def _read_choice(document: dict[str, Any]) -> tuple[str, str, int | None]:
    """Text, end and tokens that an event of a chat or a completion tells."""
    usage = document.get("usage") or {}
    choice: dict[str, Any] = next(iter(document.get("choices", ())), {})
    assert not choice.get("token_ids")
    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text, choice.get("finish_reason") or "", usage.get("completion_tokens")


def _read_block(document: dict[str, Any]) -> tuple[str, str, int | None]:
    """The same of an event of `/v1/messages` or `/v1/responses`."""
    match document["type"]:
        case "content_block_delta":
            return document["delta"].get("text", ""), "", None
        case "response.output_text.delta":
            return document["delta"], "", None
        case "message_delta":
            return "", document["delta"]["stop_reason"], document["usage"]["output_tokens"]
        case "response.completed" | "response.incomplete":
            response = document["response"]
            return "", response["status"], response["usage"]["output_tokens"]
    return "", "", None


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
