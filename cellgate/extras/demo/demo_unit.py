"""The leader of a very small simulated unit for `cellgate demo`, with the OpenAI API of vLLM.

1. All requests take part in each step, and a step is done when the follower has done its part: stop the
   follower, and no token comes any more, while `/health` still says 200.
2. The next word is a function of all text before it: another unit goes on with a broken answer just so.

`python -m cellgate.extras.demo.demo_unit --port PORT`; standard input is the connection to the follower,
which answers each byte with one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from zlib import crc32

from aiohttp import web
from aiohttp.typedefs import Handler

MODEL = "sim"
DEMO_STEP_S = 0.02
MOST_TOKENS = 8192
"""The length of the context: of a prompt and its answer."""
_USUAL_TOKENS = 200
"""How long an answer is when the request has no limit."""
_TEXT = "blue light is short and red long so the air turns it to all sides but not at dusk when far"
_DEMO_TEXT_WORDS = _TEXT.split()
_PIECE = re.compile(rb" ?[A-Za-z0-9]{1,6}|.", re.DOTALL)


class DemoEngine:
    """Computes one token for each running request at each step."""

    def __init__(self, follower: socket.socket) -> None:
        self.running = self.prompt_tokens = self.generated_tokens = 0
        self._follower = follower
        self._step = asyncio.Condition()
        self._has_work = asyncio.Event()

    async def run(self) -> None:
        """Make steps while there are requests."""
        loop = asyncio.get_running_loop()
        while await self._has_work.wait():
            await loop.sock_sendall(self._follower, b"?")
            await loop.sock_recv(self._follower, 1)
            await asyncio.sleep(DEMO_STEP_S)
            async with self._step:
                self._step.notify_all()

    async def words(self, prompt: str, most: int) -> AsyncIterator[str]:
        """The words of an answer, one a step."""
        self.running += 1
        self.prompt_tokens += len(tokens_of(prompt))
        self._has_work.set()
        said = crc32(prompt.encode())
        try:
            for _ in range(most):
                async with self._step:
                    await self._step.wait()
                word = f" {_DEMO_TEXT_WORDS[said % len(_DEMO_TEXT_WORDS)]}"
                said = crc32(word.encode(), said)
                self.generated_tokens += 1
                yield word
        finally:
            self.running -= 1
            if not self.running:
                self._has_work.clear()


def prompt_of(body: dict[str, Any]) -> str:
    """The text that the engine continues. Raises LookupError and TypeError where there is none."""
    if "messages" not in body:
        return str(body["prompt"])
    text = "".join(f"<{each['role']}>{each['content']}</>" for each in body["messages"])
    return text.removesuffix("</>") if body.get("continue_final_message") else f"{text}<assistant>"


def tokens_of(text: str) -> list[int]:
    """The bytes of each piece, behind a leading 1, as a number; a word of an answer is one piece."""
    return [int.from_bytes(b"\1" + piece) for piece in _PIECE.findall(text.encode())]


def text_of(tokens: list[int]) -> str:
    pieces = (token.to_bytes(8).lstrip(b"\0")[1:] for token in tokens)
    return b"".join(pieces).decode(errors="replace")


class DemoApi:
    """The paths of the unit."""

    def __init__(self, engine: DemoEngine) -> None:
        self._engine = engine

    def application(self) -> web.Application:
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        for path, text in (("/health", ""), ("/version", '{"version": "0.11.0"}'), ("/v1/models", _models())):
            app.router.add_get(path, _page(text))
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _metrics(self, _: web.Request) -> web.Response:
        engine, labels = self._engine, f'{{model_name="{MODEL}",engine="0"}}'
        values = {
            "num_requests_running": engine.running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": min(1.0, engine.running / 64),
            "prompt_tokens_total": engine.prompt_tokens,
            "generation_tokens_total": engine.generated_tokens,
        }
        return web.Response(text="".join(f"vllm:{key}{labels} {at}\n" for key, at in values.items()))

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = tokens_of(prompt_of(await request.json()))
        document = {"tokens": tokens, "count": len(tokens), "max_model_len": MOST_TOKENS}
        return web.json_response(document)

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": text_of((await request.json())["tokens"])})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            prompt, asked = prompt_of(body), body.get("max_completion_tokens") or body.get("max_tokens")
            most = min(int(asked or _USUAL_TOKENS), MOST_TOKENS - len(tokens_of(prompt)))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            document = {
                "message": f"this is no request for text: {error!r}",
                "type": "BadRequestError",
                "code": 400,
            }
            return web.json_response({"error": document}, status=400)
        answer, words = (
            DemoAnswer("messages" in body, len(tokens_of(prompt)), most),
            self._engine.words(prompt, most),
        )
        if not body.get("stream"):
            return web.json_response(answer.whole("".join([word async for word in words])))
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with suppress(ConnectionResetError):  # A client that has left is no news, nor that many have.
            await stream.prepare(request)
            await self._send(stream, answer, words, body)
        return stream

    async def _send(
        self, stream: web.StreamResponse, answer: DemoAnswer, words: AsyncIterator[str], body: dict[str, Any]
    ) -> None:
        async for word in words:
            await stream.write(answer.event(word))
        if (body.get("stream_options") or {}).get("include_usage"):
            await stream.write(answer.last())
        await stream.write(b"data: [DONE]\n\n")


class DemoAnswer:
    """The JSON of an answer of `most` tokens: a chat's, or a completion's."""

    def __init__(self, is_chat: bool, prompt_tokens: int, most: int) -> None:
        self._is_chat, self._most, self._shown = is_chat, most, 0
        self._head = {"id": f"demo-{os.urandom(8).hex()}", "created": 0, "model": MODEL}
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": most}
        self._usage = {"usage": counts | {"total_tokens": prompt_tokens + most}}

    def whole(self, text: str) -> dict[str, Any]:
        """One that is not streamed."""
        said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        kind = "chat.completion" if self._is_chat else "text_completion"
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
        return self._head | {"object": kind, "choices": [choice]} | self._usage

    def event(self, word: str) -> bytes:
        delta: dict[str, Any] = {"delta": {"content": word}} if self._is_chat else {"text": word}
        if self._is_chat and not self._shown:
            delta["delta"]["role"] = "assistant"
        self._shown += 1
        ends = "length" if self._shown == self._most else None
        return self._event([{"index": 0, **delta, "logprobs": None, "finish_reason": ends}], {})

    def last(self) -> bytes:
        """What it has used."""
        return self._event([], self._usage)

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return b"data: %b\n\n" % json.dumps(self._head | {"object": kind, "choices": choices} | more).encode()


def _models() -> str:
    return json.dumps(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": MOST_TOKENS}]}
    )


def _page(text: str) -> Handler:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    return page


async def lead(follower: socket.socket, port: int) -> None:
    """Serve until the process ends."""
    follower.setblocking(False)
    engine = DemoEngine(follower)
    runner = web.AppRunner(DemoApi(engine).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await engine.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(lead(socket.socket(fileno=sys.stdin.fileno()), parser.parse_args().port))
