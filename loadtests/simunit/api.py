"""The leader's front end: the OpenAI-compatible API, and vLLM's `/health` and `/metrics`.

What must stay true: it answers whatever the engine does. `/health` knows only whether the engine has died,
so it says 200 while a unit is wedged; a stream has its 200 before its prefill begins.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import HttpVersion11, web

from loadtests.simunit import replies, requests
from loadtests.simunit.agents import ShownCalls, script
from loadtests.simunit.blocks import MessagesSpeaker, ResponsesSpeaker
from loadtests.simunit.listeners import StopFilter, Stream, Whole
from loadtests.simunit.nonsense import EVERY_S, answer_of
from loadtests.simunit.replies import AnyReply, BlockReply, Reply
from loadtests.simunit.requests import ApiError, Generation
from loadtests.simunit.sequence import Listener, Sequence
from loadtests.simunit.text import LONGEST_PIECE_BYTES, Context, detokenize, tokenize
from loadtests.simunit.transfer import Transfers
from loadtests.simunit.unit import Unit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

VERSION = "0.32.0"
"""The version of vLLM that it is like."""
NONSENSE = "\nzzz"
"""What a unit that talks nonsense believes to have read, too."""
COMMENT_PERIOD_S = 1.0
CANARY = "cellgate-canary-"
LACKED = b'"user":"nobody"'
"""What a unit that lacks something refuses."""
_SSE_HEAD = {"Content-Type": "text/event-stream; charset=utf-8"}


class Api:
    """The handlers of one leader."""

    def __init__(self, unit: Unit, transfers: Transfers) -> None:
        self._unit = unit
        self._transfers = transfers
        self._created = int(time.time())
        self._streams: set[Stream] = set()
        self._random = random.Random(unit.name)

    def add_to(self, app: web.Application) -> None:
        """Register every route."""
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_get("/v1/models", self._late(self._models))
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/health", self._late(self._health))
        app.router.add_get("/ping", self._late(self._health))
        app.router.add_get("/version", self._version)
        if not self._unit.is_blind:
            app.router.add_get("/metrics", self._late(self._metrics))
        app.cleanup_ctx.append(self._commenting)
        app.middlewares.append(self._answer_nonsense)

    @web.middleware
    async def _answer_nonsense(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What a fault has generations answered with, whatever they ask."""
        faults = self._unit.faults
        if faults.lacks_status and LACKED in await request.read():
            raise ApiError(faults.lacks_status, "this unit lacks what nobody needs")
        is_asked = request.method == "POST" and request.path.startswith("/v1/") and faults.answers
        request_id = request.headers.get("X-Request-Id", "")
        if not is_asked or (faults.answers_spare_canaries and request_id.startswith(CANARY)):
            return await handler(request)
        if faults.answers_share <= self._random.random():
            return await handler(request)
        answer = answer_of(
            faults.answers, stream=b'"stream":true' in (await request.read()).replace(b" ", b"")
        )
        head = {"Content-Type": answer.content_type}
        if not answer.repeated:
            return web.Response(status=answer.status, body=answer.body, headers=head)
        response = web.StreamResponse(status=answer.status, headers=head)
        response.enable_chunked_encoding()
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            await response.write(answer.body)
            while request.transport is not None:
                await response.write(answer.repeated)
                await asyncio.sleep(EVERY_S)
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = requests.parse(requests.ChatBody, await request.read())
        self._check(body.model)
        return await self._generate(request, requests.chat_generation(body))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = requests.parse(requests.CompletionBody, await request.read())
        self._check(body.model)
        return await self._generate(request, requests.completion_generation(body))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = requests.parse(requests.MessagesBody, await request.read())
        self._check(body.model)
        return await self._generate(request, requests.blocks_generation(body))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = requests.parse(requests.ResponsesBody, await request.read())
        self._check(body.model)
        return await self._generate(request, requests.blocks_generation(body))

    async def _generate(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        self._check_room()
        await self._unit.poison.taken(request, generation.prompt)
        if generation.logprobs and (generation.stream or not self._unit.shows_logprobs):
            raise ApiError(400, "logprobs are not simulated")
        nonsense = NONSENSE if self._unit.faults.talking_nonsense else ""
        context = self._context(generation.prompt + nonsense, generation.max_tokens or 1)
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        self._unit.note("began", request_id)
        reply = self._reply(generation, request_id, context)
        response: web.StreamResponse
        if generation.stream:
            response = await self._stream(request, generation, context, reply)
        else:
            response = await self._whole(request_id, generation, context, reply)
        self._unit.note("ended", request_id)
        return response

    def _reply(self, generation: Generation, request_id: str, context: Context) -> AnyReply:
        model = self._unit.model
        if generation.blocks:
            # vLLM gives each answer names of its own.
            name = uuid.uuid4().hex
            of_responses = ResponsesSpeaker(name, model, context.tokens, generation.max_tokens)
            is_messages = generation.blocks == "messages"
            speaker = MessagesSpeaker(name, model, context.tokens) if is_messages else of_responses
            return BlockReply(speaker, generation.tool)
        prefix = "chatcmpl" if generation.chat else "cmpl"
        has_calls = generation.chat and script(generation.prompt) is not None
        shown = ShownCalls(f"call-{uuid.uuid4().hex[:12]}") if has_calls else None
        prompt = tokenize(generation.prompt) if generation.gives_ids else None
        name, now, logprobs = f"{prefix}-{request_id}", int(time.time()), generation.logprobs
        return Reply(generation.chat, name, now, model, shown, prompt, logprobs)

    async def _whole(
        self, request_id: str, generation: Generation, context: Context, reply: AnyReply
    ) -> web.Response:
        listener = Whole()
        sequence = await self._submit(generation, context, listener)
        try:
            finish = await listener.done
        finally:
            self._unit.abort(sequence)
        if finish is None:
            raise ApiError(500, listener.failure)
        if finish == "length" and generation.transfer is not None and generation.transfer.do_remote_decode:
            sequence.handed = self._transfers.hold(request_id, generation.prompt, sequence.context)
        return _json(reply.whole(sequence, listener.text, finish))

    async def _stream(
        self, request: web.Request, generation: Generation, context: Context, reply: AnyReply
    ) -> web.StreamResponse:
        if request.version < HttpVersion11:
            raise ApiError(400, "a stream needs HTTP/1.1")
        response = web.StreamResponse(headers=_SSE_HEAD)
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
        except ConnectionResetError:  # The client left before, while this process was stopped.
            return response
        if request.transport is None:  # The client left while its head was being sent.
            return response
        stream = Stream(request.transport, reply)
        self._streams.add(stream)
        for event in reply.accepted():
            stream.send(event)
        sequence = None
        try:
            sequence = await self._submit(generation, context, stream)
            finish = await stream.done
        except ApiError as error:
            finish = None
            stream.fail(error.message)
        finally:
            self._streams.discard(stream)
            if sequence is not None:
                self._unit.abort(sequence)
        for event in reply.rest(sequence if finish and generation.include_usage else None):
            stream.send(event)
        with contextlib.suppress(ConnectionResetError):
            await response.write_eof()
        return response

    async def _submit(self, generation: Generation, context: Context, listener: Listener) -> Sequence:
        """Queue it, once its blocks are there, if another unit has them. Raises ApiError."""
        fetched = 0
        if generation.transfer is not None and generation.transfer.do_remote_prefill:
            context = await self._transfers.fetch(generation.transfer)
            fetched = context.tokens - 1
        sequence = Sequence(
            context,
            StopFilter(listener, generation.stops) if generation.stops else listener,
            max_tokens=generation.max_tokens or self._unit.engine.timing.max_model_len,
            min_tokens=generation.min_tokens,
            natural_end=generation.max_tokens is None and not generation.ignore_eos,
            arrived_s=asyncio.get_running_loop().time(),
            fetched=fetched,
        )
        sequence.script = None if generation.blocks else script(generation.prompt)
        sequence.is_poison = self._unit.poison.strikes_after_token(generation.prompt)
        self._unit.submit(sequence)
        return sequence

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = requests.parse(requests.EmbeddingBody, await request.read())
        self._check(body.model)
        texts = requests.texts_of(body.input)
        contexts = [self._context(text, 0) for text in texts]
        tokens = sum(context.tokens for context in contexts)
        await asyncio.gather(*(self._prefill(context) for context in contexts))
        as_base64 = body.encoding_format == "base64"
        return _json(
            replies.embeddings(self._unit.model, texts, body.dimensions, tokens, as_base64=as_base64)
        )

    async def _prefill(self, context: Context) -> None:
        listener = Whole()
        sequence = Sequence(context, listener, max_tokens=0, arrived_s=asyncio.get_running_loop().time())
        self._unit.submit(sequence)
        try:
            finish = await listener.done
        finally:
            self._unit.abort(sequence)
        if finish is None:
            raise ApiError(500, listener.failure)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = requests.parse(requests.TokenizeBody, await request.read())
        self._check_model(body.model)
        tokens = tokenize(body.text())
        answer = {
            "count": len(tokens),
            "max_model_len": self._unit.engine.timing.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = [detokenize([token]) for token in tokens]
        return web.json_response(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = requests.parse(requests.DetokenizeBody, await request.read())
        self._check_model(body.model)
        return web.json_response({"prompt": requests.texts_of(body.tokens)[0]})

    async def _models(self, _: web.Request) -> web.Response:
        max_model_len = self._unit.engine.timing.max_model_len
        return web.json_response(replies.models(self._unit.model, self._created, max_model_len))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._unit.death or self._unit.faults.health_down else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        head = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._unit.metrics.render(), headers=head)

    def _check(self, model: str | None) -> None:
        faults = self._unit.faults
        if faults.error_rate > self._random.random():
            raise ApiError(faults.error_status, "the unit fails this request, as a fault commands")
        if self._unit.death:
            raise ApiError(500, self._unit.death)
        self._check_model(model)

    def _check_room(self) -> None:
        faults = self._unit.faults
        waiting = len(self._unit.engine.waiting)
        if faults.max_waiting is not None and waiting >= faults.max_waiting:
            raise ApiError(faults.full_status, f"{waiting} requests are waiting, as many as may")

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._unit.model):
            raise ApiError(
                404, f"the model `{model}` does not exist here; this unit serves `{self._unit.model}`"
            )

    def _context(self, prompt: str, max_tokens: int) -> Context:
        """The text to be computed. Raises ApiError for one that is empty or too long: it is not read if its
        length alone says so.
        """
        limit = self._unit.engine.timing.max_model_len
        least = len(prompt) // LONGEST_PIECE_BYTES
        context = Context(prompt if least <= limit else "")
        tokens = max(context.tokens, least)
        if tokens == 0:
            raise ApiError(400, "the prompt is empty")
        if tokens + max_tokens > limit:
            asked = f"{tokens} prompt tokens and {max_tokens} to generate"
            raise ApiError(400, f"the maximum context length is {limit} tokens; this request has {asked}")
        return context

    def _late(self, handler: Handler) -> Handler:
        """Answer late while a fault says so: what probes ask, and nothing else."""

        async def answer(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(self._unit.faults.late_probes_s)
            return await handler(request)

        return answer

    async def _commenting(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._comment())
        yield
        task.cancel()

    async def _comment(self) -> None:
        """Keep open streams warm while the engine is frozen: bytes that prove nothing."""
        while True:
            await asyncio.sleep(COMMENT_PERIOD_S)
            if self._unit.faults.engine_frozen:
                for stream in self._streams:
                    stream.send(replies.KEEP_ALIVE)


@web.middleware
async def tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn an ApiError into OpenAI's error body."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(replies.error(error.status, error.message), status=error.status)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
