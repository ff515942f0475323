"""Fakes of engines, for `python -m loadtests.matrix`: what each answers at its paths, in its own words and
its own framing, as its public documentation says.
"""

import gzip
import http.client
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from backports import zstd


class Page(NamedTuple):
    """What an engine answers at a path: a whole answer, and events where it streams. `in_chunks`: what is
    whole comes in chunks as well.
    """

    whole: bytes
    events: tuple[bytes, ...] = ()
    content_type: str = "application/json"
    in_chunks: bool = False


class Fake(NamedTuple):
    """An engine: its pages, header lines that others do not send, and what it says to a parameter that it
    refuses.
    """

    pages: Mapping[str, Page]
    lines: str = "server: uvicorn\r\n"
    bad: tuple[int, object] = (400, {"object": "error", "message": "bad is no parameter", "code": 400})
    stream_type: str = "text/event-stream; charset=utf-8"


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


def _data(*documents: object, done: bool = True) -> tuple[bytes, ...]:
    return tuple(b"data: %b\n\n" % _json(each) for each in documents) + (
        (b"data: [DONE]\n\n",) if done else ()
    )


_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def _chat(
    extra: Mapping[str, object],
    *,
    each: Mapping[str, object] = MappingProxyType({}),
    choice: Mapping[str, object] = MappingProxyType({}),
    repeats_role: bool = False,
    last: Mapping[str, object] = MappingProxyType({}),
) -> Page:
    """A chat: what is in every object, in each event, in each choice, and in the last event beside usage."""
    base = {"id": "chatcmpl-1", "created": 1, "model": "tiny", **extra}
    role = {"role": "assistant"}
    chunk = {"object": "chat.completion.chunk", **base, **each}
    first: tuple[tuple[dict[str, object], str | None], ...] = (({**role, "content": ""}, None),)
    said: dict[str, object] = dict(role) if repeats_role else {}
    deltas = (() if repeats_role else first) + (
        ({**said, "content": "Hello"}, None),
        ({**said, "content": " there"}, None),
        ({**said, "content": ""} if repeats_role else {}, "stop"),
    )
    message = {**role, "content": "Hello there"}
    whole = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    events = [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, **choice}]}
        for delta, reason in deltas
    ]
    return Page(
        _json({"object": "chat.completion", **base, "choices": [whole], "usage": _USAGE, **last}),
        _data(*events, {**chunk, "choices": [], "usage": _USAGE, **last}),
    )


def _messages() -> Page:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "tiny"}
    usage = {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 1}
    whole = {
        **message,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "usage": usage,
    }
    events: tuple[dict[str, object], ...] = (
        {"type": "message_start", "message": {**message, "content": [], "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    )
    return Page(
        _json(whole), tuple(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), _json(e)) for e in events)
    )


def _responses() -> Page:
    output = [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
        }
    ]
    base = {"id": "resp_1", "object": "response", "created_at": 1, "model": "tiny", "error": None}
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    whole = {**base, "status": "completed", "output": output, "usage": usage}
    begun = {**base, "status": "in_progress", "output": [], "instructions": "You are helpful. " * 40_000}
    events: tuple[dict[str, object], ...] = (
        {"type": "response.created", "sequence_number": 0, "response": begun},
        {"type": "response.in_progress", "sequence_number": 1, "response": begun},
        {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0, "item": output[0]},
        {"type": "response.output_text.delta", "sequence_number": 3, "item_id": "msg_1", "delta": "Hello"},
        {"type": "response.completed", "sequence_number": 4, "response": whole},
    )
    return Page(
        _json(whole), tuple(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), _json(e)) for e in events)
    )


def _embeddings() -> Page:
    vector = {"object": "embedding", "index": 0, "embedding": [0.25] * 64}
    return Page(_json({"object": "list", "model": "tiny", "data": [vector], "usage": {"total_tokens": 3}}))


def _transcription() -> Page:
    said = ("Hel", "lo")
    events = [{"type": "transcript.text.delta", "delta": each} for each in said]
    done = {"type": "transcript.text.done", "text": "Hello", "usage": {"type": "duration", "seconds": 1}}
    return Page(_json({"text": "Hello", "usage": {"type": "duration", "seconds": 1}}), _data(*events, done))


_COMPLETION = Page(
    _json(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}],
            "usage": _USAGE,
        }
    ),
    _data({"id": "cmpl-1", "choices": [{"index": 0, "text": "Hello", "finish_reason": "length"}]}),
)
_OPENAI = {
    "/v1/chat/completions": _chat({}),
    "/v1/completions": _COMPLETION,
    "/v1/embeddings": _embeddings(),
}
_COUNT = Page(_json({"input_tokens": 3}))
_TOKENS = Page(_json({"count": 1, "max_model_len": 4096, "tokens": [1], "token_strs": None}))
_TEXT = Page(_json({"prompt": "Hi"}))
_SCORES = [{"index": 0, "object": "score", "score": 0.5}]
_RANKS = [{"index": 0, "document": {"text": "a"}, "relevance_score": 0.5}]
_TOKEN = {"token": {"id": 1, "text": "Hello", "logprob": -0.1, "special": False}, "generated_text": None}
_TGI_END = {"generated_text": "Hello", "details": {"finish_reason": "length", "generated_tokens": 1}}
_SGLANG = {"text": "Hello", "output_ids": [1], "meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}
_AUDIO = bytes(range(256)) * 500
_ALLOWS = "access-control-allow-origin: *\r\naccess-control-allow-credentials: true\r\n"
FAKES: Mapping[str, Fake] = {
    # https://huggingface.co/docs/text-generation-inference/reference/api_reference
    "tgi": Fake(
        {
            "/v1/chat/completions": _chat({"system_fingerprint": "3.3.4-sha"}, repeats_role=True),
            "/v1/completions": _COMPLETION,
            "/generate": Page(_json(_TGI_END), _data({"index": 1, **_TOKEN, **_TGI_END}, done=False)),
            "/tokenize": Page(_json([{"id": 1, "text": "Hi", "start": 0, "stop": 2}])),
        },
        "x-compute-type: 1-cpu\r\nx-compute-time: 0.1\r\nx-total-time: 100\r\nx-prompt-tokens: 3\r\n"
        "x-generated-tokens: 2\r\nx-compute-characters: 2\r\n"
        "vary: origin, access-control-request-method, access-control-request-headers\r\n" + _ALLOWS,
        (422, {"error": "Input validation error: bad is no parameter", "error_type": "validation"}),
        "text/event-stream",
    ),
    # https://docs.ollama.com/openai
    "ollama": Fake(
        {
            **_OPENAI,
            "/v1/chat/completions": _chat({"system_fingerprint": "fp_ollama"}, repeats_role=True),
            "/v1/responses": _responses(),
            "/v1/messages": _messages(),
        },
        "access-control-expose-headers: *\r\n",
        (400, {"error": {"message": "bad", "type": "invalid_request_error", "param": None, "code": None}}),
        "text/event-stream",
    ),
    # https://lmdeploy.readthedocs.io/en/latest/llm/api_server.html
    "lmdeploy": Fake(
        {
            **_OPENAI,
            "/v1/chat/completions": _chat({}, each={"usage": None}, choice={"logprobs": None}),
            "/v1/responses": _responses(),
            "/generate": Page(_json(_SGLANG), _data(_SGLANG)),
        },
        "server: uvicorn\r\n" + _ALLOWS,
        (400, {"message": "bad", "type": "invalid_request_error", "code": 400, "object": "error"}),
    ),
    # https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/
    "tensorrt-llm": Fake(
        {
            **_OPENAI,
            "/v1/chat/completions": _chat(
                {"prompt_token_ids": None}, choice={"stop_reason": None, "disaggregated_params": None}
            ),
            "/v1/responses": _responses(),
        },
        bad=(400, {"object": "error", "message": "bad", "type": "BadRequestError", "code": 400}),
    ),
    # https://docs.sglang.ai/basic_usage/native_api.html
    "sglang": Fake(
        {
            **_OPENAI,
            "/v1/chat/completions": _chat(
                {}, each={"usage": None}, choice={"logprobs": None, "matched_stop": 1}, last={"metadata": {}}
            ),
            "/v1/responses": _responses(),
            "/v1/messages": _messages(),
            "/v1/messages/count_tokens": _COUNT,
            "/generate": Page(_json(_SGLANG), _data(_SGLANG)),
            "/v1/rerank": Page(_json([{"score": 0.5, "document": "a", "index": 0}])),
            "/v1/score": Page(_json({"object": "scoring", "scores": [[0.5]], "score": 0.5})),
            "/tokenize": _TOKENS,
            "/detokenize": Page(_json({"text": "Hi"})),
        },
        bad=(400, {"object": "error", "message": "bad", "type": "Bad Request", "param": None, "code": 400}),
    ),
    # https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
    "vllm": Fake(
        {
            **_OPENAI,
            "/v1/chat/completions": _chat(
                {"system_fingerprint": "vllm-1", "prompt_token_ids": None},
                choice={"logprobs": None, "stop_reason": None, "token_ids": None},
                last={"kv_transfer_params": None},
            ),
            "/v1/responses": _responses(),
            "/v1/messages": _messages(),
            "/v1/messages/count_tokens": _COUNT,
            "/tokenize": _TOKENS,
            "/detokenize": _TEXT,
            "/v1/rerank": Page(_json({"id": "rerank-1", "model": "tiny", "results": _RANKS})),
            "/v1/score": Page(_json({"id": "score-1", "object": "list", "data": _SCORES})),
            "/pooling": Page(_json({"object": "list", "data": [{"index": 0, "data": [0.5]}]})),
            "/classify": Page(_json({"object": "list", "data": [{"label": "a", "probs": [0.5]}]})),
        },
        bad=(400, {"error": {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}}),
    ),
    # https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
    "llama.cpp": Fake(
        {
            **_OPENAI,
            "/v1/chat/completions": _chat({"system_fingerprint": "b1"}, last={"timings": {"prompt_n": 3}}),
            "/v1/responses": _responses(),
            "/v1/messages": _messages(),
            "/v1/messages/count_tokens": _COUNT,
            "/v1/rerank": Page(_json({"object": "list", "results": _RANKS})),
            "/tokenize": Page(_json({"tokens": [1]})),
            "/detokenize": Page(_json({"content": "Hi"})),
        },
        "Server: llama.cpp\r\nKeep-Alive: timeout=5, max=100\r\nAccess-Control-Allow-Origin: \r\n",
        (400, {"error": {"code": 400, "message": "bad", "type": "invalid_request_error"}}),
        "text/event-stream",
    ),
    # https://platform.openai.com/docs/api-reference/audio
    "whisper": Fake(
        {"/v1/audio/transcriptions": _transcription(), "/v1/audio/translations": _transcription()}
    ),
    "speech": Fake({"/v1/audio/speech": Page(_AUDIO, content_type="audio/wav", in_chunks=True)}),
}


_STREAM = re.compile(rb'"stream"\s*:\s*true|name="stream"\r\n\r\ntrue')
_CHUNK = 4096


class FakeServer(ThreadingHTTPServer):
    """A fake; `asked` are the heads and bodies of all requests but those of probes."""

    daemon_threads = True

    def __init__(self, fake: Fake) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake
        self.asked: list[tuple[str, str, tuple[tuple[str, str], ...], bytes]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A canary that has seen its token leaves."""


class _Handler(BaseHTTPRequestHandler):
    """Answers as uvicorn frames it: a body with its length, events in chunks."""

    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            self._whole(200, Page(b""))
        elif path.startswith("/v1/models"):
            model = {"id": "tiny", "object": "model", "created": 1, "owned_by": "me"}
            self._whole(
                200, Page(_json(model if path != "/v1/models" else {"object": "list", "data": [model]}))
            )
        else:
            self._whole(404, Page(_json({"error": "no such page"})))

    def do_OPTIONS(self) -> None:
        """As Starlette's CORSMiddleware, which vLLM and others have on by default."""
        self.send_response(200)
        for name in ("origin", "methods", "headers"):
            self.send_header(f"access-control-allow-{name}", "*")
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        coding = self.headers.get("content-encoding")
        body = {"gzip": gzip.decompress, "zstd": zstd.decompress}.get(coding or "", bytes)(body)
        lines = tuple((name.lower(), value) for name, value in self.headers.items())
        if not (self.headers.get("x-request-id") or "").startswith("cellgate-"):
            self.server.asked.append((self.command, self.path, lines, body))
        page = self.server.fake.pages.get(urlsplit(self.path).path)
        if page is None:
            self._whole(404, Page(_json({"detail": "no such path"})))
        elif b'"bad"' in body:
            status, document = self.server.fake.bad
            self._whole(status, Page(_json(document)))
        elif page.events and _STREAM.search(body):
            self._events(page.events)
        else:
            self._whole(200, page)

    def _whole(self, status: int, page: Page) -> None:
        if page.in_chunks:
            self._head(status, page.content_type, "transfer-encoding: chunked\r\n")
            for at in range(0, len(page.whole), _CHUNK):
                piece = page.whole[at : at + _CHUNK]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        self._head(status, page.content_type, f"content-length: {len(page.whole)}\r\n")
        self.wfile.write(page.whole)

    def _events(self, events: tuple[bytes, ...]) -> None:
        self._head(200, self.server.fake.stream_type, "transfer-encoding: chunked\r\n")
        for event in events:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\nx-checksum: 1\r\n\r\n")

    def _head(self, status: int, content_type: str, framing: str) -> None:
        head = (
            f"HTTP/1.1 {status} {http.client.responses[status]}\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
            f"{self.server.fake.lines}x-request-id: engine-1\r\n"
            f"content-type: {content_type}\r\n{framing}\r\n"
        )
        self.wfile.write(head.encode())


@contextmanager
def serving(fake: Fake) -> Iterator[FakeServer]:
    """The fake on a port of its own."""
    with FakeServer(fake) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
