"""Any client, any engine: what is asked and answered through the gate, beside the same without it.

`python -m loadtests.matrix` asks fakes of engines, which answer as their public documentation says, once
directly and once through a gate; real engines are added with `--engine NAME=URL`. It prints every difference
and fails for one that docs/api.md ("What differs from the engine itself") does not name. A client that is not
installed is named and left out.
"""

import argparse
import base64
import gzip
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from backports import zstd

from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.report import columns, print_problems, verdict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
ANSWER_S = 60.0
_CLIENTS_OWN = re.compile(
    "host|connection|content-length|transfer-encoding|accept-encoding|content-encoding|expect|te|upgrade|"
    "http2-settings|keep-alive|origin|x-request-id|x-forwarded-(for|proto|host)|authorization|date"
)
"""Header lines of requests that are the gate's matter (docs/api.md, "Header lines of requests")."""
_CHANGING = re.compile(
    rb'"(?:id|created|created_at|completed_at|system_fingerprint|timings|item_id|prompt_ms|request_id)"\s*:\s*'
    rb'(?:"[^"]*"|[0-9.e+-]+|\{[^{}]*\})'
)
"""What a real engine says anew each time."""


class Ask(NamedTuple):
    """One request: a row of the matrix."""

    name: str
    method: str
    path: str
    body: bytes = b""
    lines: tuple[tuple[str, str], ...] = ()


class Answer(NamedTuple):
    """What a client got."""

    status: int
    lines: tuple[tuple[str, str], ...]
    body: bytes


Client = Callable[[str, Ask], Answer]


# -- engines -------------------------------------------------------------------------------------------------


class Page(NamedTuple):
    """What an engine answers at a path: a whole answer, and events where it streams."""

    whole: bytes
    events: tuple[bytes, ...] = ()
    content_type: str = "application/json"


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


def _data(*documents: object, done: bool = True) -> tuple[bytes, ...]:
    return tuple(b"data: %b\n\n" % _json(each) for each in documents) + (
        (b"data: [DONE]\n\n",) if done else ()
    )


def _chat(extra: Mapping[str, object]) -> Page:
    base = {"id": "chatcmpl-1", "created": 1, "model": "tiny", **extra}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    message = {"role": "assistant", "content": "Hello there"}
    chunk = {"object": "chat.completion.chunk", **base}
    deltas: tuple[tuple[dict[str, object], str | None], ...] = (
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hello"}, None),
        ({"content": " there"}, None),
        ({}, "stop"),
    )
    return Page(
        _json(
            {
                "object": "chat.completion",
                **base,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": usage,
            }
        ),
        _data(
            *(
                {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
                for delta, reason in deltas
            ),
            {**chunk, "choices": [], "usage": usage},
        ),
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


_OPENAI = {
    "/v1/chat/completions": _chat({}),
    "/v1/completions": Page(
        _json({"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": "Hello"}]}),
        _data({"id": "cmpl-1", "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}]}),
    ),
    "/v1/embeddings": _embeddings(),
}
_TOKEN = {"token": {"id": 1, "text": "Hello", "logprob": -0.1, "special": False}, "generated_text": None}
_TGI_END = {"generated_text": "Hello", "details": {"finish_reason": "length", "generated_tokens": 1}}
FAKES: Mapping[str, Mapping[str, Page]] = {
    # https://huggingface.co/docs/text-generation-inference/reference/api_reference
    "tgi": {
        "/v1/chat/completions": _chat({"system_fingerprint": "3.3.4-sha"}),
        "/generate": Page(_json(_TGI_END), _data({**_TOKEN, **_TGI_END}, done=False)),
    },
    # https://docs.ollama.com/openai
    "ollama": {**_OPENAI, "/v1/chat/completions": _chat({"system_fingerprint": "fp_ollama"})},
    # https://lmdeploy.readthedocs.io/en/latest/llm/api_server.html
    "lmdeploy": {**_OPENAI, "/v1/responses": _responses()},
    # https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/
    "tensorrt-llm": {**_OPENAI, "/v1/responses": _responses()},
    # https://docs.sglang.ai/basic_usage/native_api.html
    "sglang": {
        **_OPENAI,
        "/v1/messages": _messages(),
        "/v1/messages/count_tokens": Page(_json({"input_tokens": 3})),
        "/generate": Page(
            _json({"text": "Hello", "meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}),
            _data({"text": "Hello", "meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}),
        ),
        "/v1/rerank": Page(_json([{"score": 0.5, "document": "a", "index": 0}])),
    },
    # https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
    "vllm": {
        **_OPENAI,
        "/v1/responses": _responses(),
        "/v1/messages": _messages(),
        "/v1/messages/count_tokens": Page(_json({"input_tokens": 3})),
        "/tokenize": Page(_json({"count": 1, "max_model_len": 4096, "tokens": [1]})),
    },
    # https://platform.openai.com/docs/api-reference/audio
    "whisper": {
        **_OPENAI,
        "/v1/audio/transcriptions": Page(_json({"text": "Hello", "usage": {"seconds": 1}})),
    },
    "speech": {**_OPENAI, "/v1/audio/speech": Page(bytes(range(256)) * 500, content_type="audio/wav")},
}


class _Server(ThreadingHTTPServer):
    """A fake; `asked` are the heads and bodies of all requests but those of probes."""

    daemon_threads = True

    def __init__(self, pages: Mapping[str, Page]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages = pages
        self.asked: list[tuple[str, str, tuple[tuple[str, str], ...], bytes]] = []


class _Handler(BaseHTTPRequestHandler):
    """Answers as uvicorn frames it: a body with its length, events in chunks."""

    server: _Server
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
        page = self.server.pages.get(urlsplit(self.path).path)
        if page is None:
            self._whole(404, Page(_json({"detail": "no such path"})))
        elif b'"bad"' in body:
            self._whole(400, Page(_json({"object": "error", "message": "bad is no parameter", "code": 400})))
        elif page.events and re.search(rb'"stream"\s*:\s*true', body):
            self._events(page.events)
        else:
            self._whole(200, page)

    def _whole(self, status: int, page: Page) -> None:
        self._head(status, page.content_type, f"content-length: {len(page.whole)}\r\n")
        self.wfile.write(page.whole)

    def _events(self, events: tuple[bytes, ...]) -> None:
        self._head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked\r\n")
        for event in events:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\nx-checksum: 1\r\n\r\n")

    def _head(self, status: int, content_type: str, framing: str) -> None:
        head = (
            f"HTTP/1.1 {status} {http.client.responses[status]}\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
            f"server: uvicorn\r\nx-request-id: engine-1\r\naccess-control-allow-origin: *\r\n"
            f"content-type: {content_type}\r\n{framing}\r\n"
        )
        self.wfile.write(head.encode())


@contextmanager
def _serving(pages: Mapping[str, Page]) -> Iterator[_Server]:
    with _Server(pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


# -- requests ------------------------------------------------------------------------------------------------

_JSON = ("content-type", "application/json")
_FORM = (
    b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--x--\r\n'
)
_CLAUDE = (
    _JSON,
    ("anthropic-version", "2023-06-01"),
    ("anthropic-beta", "claude-code-20250219,interleaved-thinking-2025-05-14"),
    ("x-app", "cli"),
    ("x-stainless-lang", "js"),
)


def asks(path: str, page: Page) -> Iterator[Ask]:
    """The rows of one endpoint."""
    if path.startswith("/v1/audio/transcriptions"):
        yield Ask("form", "POST", path, _FORM, (("content-type", "multipart/form-data; boundary=x"),))
        return
    fields: dict[str, object] = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "prompt": "Hi",
        "input": "Hi",
    }
    fields |= {"messages": [{"role": "user", "content": "Hi"}], "inputs": "Hi", "text": "Hi", "voice": "a"}
    fields |= {"query": "a", "documents": ["a"]}
    yield Ask("whole", "POST", path, _json(fields), (_JSON,))
    yield Ask("bad", "POST", path, _json({**fields, "bad": 1}), (_JSON,))
    stream = _json({**fields, "stream": True})
    if page.events:
        yield Ask("stream", "POST", path, stream, (_JSON,))
        for coding, compress in (("gzip", gzip.compress), ("zstd", zstd.compress)):
            # Codex sends zstd.
            yield Ask(coding, "POST", path, compress(stream), (_JSON, ("content-encoding", coding)))
    if path.startswith("/v1/messages"):
        yield Ask("?beta=true", "POST", f"{path}?beta=true", stream, _CLAUDE)
        yield Ask("model", "GET", "/v1/models/tiny", b"", _CLAUDE)


# -- clients -------------------------------------------------------------------------------------------------


def raw(url: str, ask: Ask) -> Answer:
    """Python's http.client."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request(ask.method, ask.path, ask.body or None, dict(ask.lines))
        reply = connection.getresponse()
        return Answer(reply.status, tuple(reply.getheaders()), reply.read())
    finally:
        connection.close()


def curl(url: str, ask: Ask) -> Answer:
    """curl, which asks for HTTP/2 by an upgrade."""
    with tempfile.TemporaryDirectory() as folder:
        sent, head = Path(folder) / "sent", Path(folder) / "head"
        sent.write_bytes(ask.body)
        command = ["curl", "--http2", "-s", "-X", ask.method, "-D", str(head), f"{url}{ask.path}"]
        command += ["--data-binary", f"@{sent}"] if ask.body else []
        for name, value in ask.lines:
            command += ["-H", f"{name}: {value}"]
        body = subprocess.run(command, capture_output=True, check=True, timeout=ANSWER_S).stdout
        heads = [each for each in head.read_bytes().split(b"\r\n\r\n") if each.startswith(b"HTTP/")]
    first, *lines = heads[-1].decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return Answer(int(first.split()[1]), tuple((name, value) for name, _, value in pairs), body)


_JAVA = """
import java.net.URI; import java.net.http.*; import java.nio.file.*;
class Ask { public static void main(String[] a) throws Exception {
  var body = Files.readAllBytes(Path.of(a[2]));
  var ask = HttpRequest.newBuilder(URI.create(a[0])).method(a[1], body.length == 0
    ? HttpRequest.BodyPublishers.noBody() : HttpRequest.BodyPublishers.ofByteArray(body));
  for (int i = 4; i + 1 < a.length; i += 2) ask.header(a[i], a[i + 1]);
  var got = HttpClient.newHttpClient().send(ask.build(), HttpResponse.BodyHandlers.ofByteArray());
  Files.write(Path.of(a[3]), got.body());
  System.out.println(got.statusCode());
  got.headers().map().forEach((n, vs) -> vs.forEach(v -> System.out.println(n + ": " + v)));
} }
"""
_NODE = """
const fs = require('fs'); const [url, method, sent, got, ...rest] = process.argv.slice(1);
const headers = []; for (let i = 0; i + 1 < rest.length; i += 2) headers.push([rest[i], rest[i + 1]]);
const body = fs.readFileSync(sent);
fetch(url, {method, headers, body: body.length ? body : undefined}).then(async (r) => {
  fs.writeFileSync(got, Buffer.from(await r.arrayBuffer())); console.log(r.status);
  r.headers.forEach((v, n) => console.log(n + ': ' + v));
});
"""


def _by(program: Callable[[Path], list[str]]) -> Client:
    """A client that is a program: its words are the URL, the method, two files, and header lines."""

    def ask_it(url: str, ask: Ask) -> Answer:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sent, got = folder / "sent", folder / "got"
            sent.write_bytes(ask.body)
            words = [word for line in ask.lines for word in line]
            command = [*program(folder), f"{url}{ask.path}", ask.method, str(sent), str(got), *words]
            out = subprocess.run(command, capture_output=True, check=True, text=True, timeout=ANSWER_S).stdout
            status, *lines = out.splitlines()
            pairs = (line.partition(": ") for line in lines)
            return Answer(int(status), tuple((n, v) for n, _, v in pairs), got.read_bytes())

    return ask_it


def _java(folder: Path) -> list[str]:
    source = folder / "Ask.java"
    source.write_text(_JAVA)
    return ["java", "-XX:TieredStopAtLevel=1", str(source)]


def _sdk(url: str, ask: Ask) -> Answer:
    """OpenAI's library for Python: its objects, as it has read them."""
    import openai

    document = json.loads(ask.body)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    call: dict[str, Callable[..., Any]] = {
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/responses": client.responses.create,
    }
    keys = {
        "/v1/chat/completions": ("model", "messages", "stream"),
        "/v1/responses": ("model", "input", "stream"),
    }
    try:
        got = call[ask.path](**{key: document[key] for key in keys[ask.path] if key in document})
        objects = [each.to_json() for each in got] if document.get("stream") else [got.to_json()]
    except openai.APIStatusError as error:
        return Answer(error.status_code, (), error.response.content)
    return Answer(200, (), "\n".join(objects).encode())


def _anthropic(url: str, ask: Ask) -> Answer:
    """Anthropic's library for Python, as above."""
    import anthropic  # type: ignore[import-not-found]

    document = json.loads(ask.body)
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    words = {key: document[key] for key in ("model", "messages", "max_tokens", "stream") if key in document}
    try:
        got = client.messages.create(**words)
        objects = [each.to_json() for each in got] if document.get("stream") else [got.to_json()]
    except anthropic.APIStatusError as error:
        return Answer(error.status_code, (), error.response.content)
    return Answer(200, (), "\n".join(objects).encode())


_PAGE = """<script>
const [url, method, lines, sent] = %s;
fetch(url, {method, headers: lines, body: sent === "" ? undefined : sent}).then(async (r) => {
  const body = new Uint8Array(await r.arrayBuffer());
  const got = [r.status, [...r.headers], Array.from(body, (b) => String.fromCharCode(b)).join("")];
  document.title = btoa(unescape(encodeURIComponent(JSON.stringify(got))));
}).catch((e) => { document.title = btoa(JSON.stringify([0, [], String(e)])); });
</script>"""
_BROWSER = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_READS = ("--virtual-time-budget=30000", "--dump-dom")


def browser(url: str, ask: Ask) -> Answer:
    """`fetch` in a page of another site: Chromium asks with OPTIONS first, and shows what CORS allows."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(_PAGE % json.dumps([f"{url}{ask.path}", ask.method, ask.lines, ask.body.decode()]))
        command = ["chromium", *_BROWSER, f"--user-data-dir={folder}/profile", *_READS, page.as_uri()]
        shown = subprocess.run(command, capture_output=True, check=True, timeout=ANSWER_S).stdout
    found = re.search(rb"<title>([^<]*)</title>", shown)
    status, lines, body = json.loads(base64.b64decode(found[1])) if found else (0, [], "no answer")
    return Answer(status, tuple((name, value) for name, value in lines), body.encode("latin-1"))


_SDK_PATHS = ("/v1/chat/completions", "/v1/responses")
_SDK_ASKS = ("whole", "stream", "bad")


class Way(NamedTuple):
    """A client, and what it needs: a program or a module. `paths` and `asks`: those it is for, else all."""

    client: Client
    program: str = ""
    module: str = ""
    paths: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()

    def is_there(self) -> bool:
        """Whether it is installed."""
        if self.module:
            return find_spec(self.module) is not None
        return not self.program or shutil.which(self.program) is not None

    def asks_for(self, path: str, ask: Ask) -> bool:
        """Whether this row is for it."""
        return (not self.paths or path in self.paths) and (not self.asks or ask.name in self.asks)


CLIENTS: Mapping[str, Way] = {
    "raw": Way(raw),
    "curl": Way(curl, "curl"),
    "java": Way(_by(_java), "java"),
    "node": Way(_by(lambda _: ["node", "-e", _NODE]), "node"),
    "chromium": Way(browser, "chromium", asks=_SDK_ASKS),
    "openai": Way(_sdk, module="openai", paths=_SDK_PATHS, asks=_SDK_ASKS),
    "anthropic": Way(_anthropic, module="anthropic", paths=("/v1/messages",), asks=_SDK_ASKS),
}


# -- comparison ----------------------------------------------------------------------------------------------


def named_differences(page: str) -> tuple[str, ...]:
    """The parts that the documentation names; one that ends with … is the begin of a name."""
    section = page.partition("## What differs from the engine itself")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return tuple(name for cell in cells for name in re.findall(r"`([^`/ ]+)(?: [^`]*)?`", cell))


def is_named(difference: str, named: tuple[str, ...]) -> bool:
    """Whether the documentation names this difference."""
    return any(difference.startswith(n[:-1]) if n.endswith("…") else difference == n for n in named)


def differences(direct: Answer, gated: Answer) -> Iterator[str]:
    """The parts of an answer that are not the same: names of header lines, `status`, `body`."""
    if direct.status == 415 != gated.status:
        yield "415"
        return
    if direct.status != gated.status:
        yield f"status {direct.status} -> {gated.status}"
    one, other = (
        {(name.lower(), value) for name, value in answer.lines if name.lower() != "date"}
        for answer in (direct, gated)
    )
    yield from sorted({name for name, _ in one ^ other})
    if _CHANGING.sub(b"", direct.body) != _CHANGING.sub(b"", gated.body):
        yield f"body of {len(direct.body)} -> {len(gated.body)} bytes"


def _asked_differently(server: _Server) -> Iterator[str]:
    """The same of what reached the engine, in the last two requests."""
    (method, path, lines, body), (method2, path2, lines2, body2) = server.asked[-2:]
    if (method, path, body) != (method2, path2, body2):
        yield "the request"
    one, other = ({line for line in each if not _CLIENTS_OWN.fullmatch(line[0])} for each in (lines, lines2))
    yield from (f"the request's {name}" for name in sorted({name for name, _ in one ^ other}))


def compare(
    engine: str, url: str, pages: Mapping[str, Page], server: _Server | None, args: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Each row of one engine, with what differs."""
    with GateProcess([Named(engine, url)], settings={"cors": {"origins": ["*"]}}) as gate:
        for path, page in pages.items():
            for ask in asks(path, page):
                for name in args.clients:
                    if not CLIENTS[name].asks_for(path, ask):
                        continue
                    client = CLIENTS[name].client
                    if server is None:
                        # It caches prompts, and says so.
                        client(url, ask)
                    found = list(differences(client(url, ask), client(gate.url, ask)))
                    if server is not None and ask.method == "POST":
                        found += _asked_differently(server)
                    yield f"{engine} {ask.method} {ask.path} {ask.name} {name}", ", ".join(found)


def main() -> int:
    """Exit code 1: something differs that the documentation does not name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=URL", help="a real engine")
    parser.add_argument("--engines", nargs="*", default=list(FAKES), choices=list(FAKES), help="fakes")
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    args = parser.parse_args()
    for name in [each for each in args.clients if not CLIENTS[each].is_there()]:
        print(f"{name} is not installed, and left out")
        args.clients.remove(name)
    named, problems, seen, rows = named_differences(PAGE.read_text()), [], dict[str, int](), 0
    with ExitStack() as stack:
        todo: list[tuple[str, str, Mapping[str, Page], _Server | None]] = []
        for engine in args.engines:
            server = stack.enter_context(_serving(FAKES[engine]))
            todo.append((engine, f"http://127.0.0.1:{server.server_port}", FAKES[engine], server))
        todo += [(*each.split("=", 1), _OPENAI, None) for each in args.engine]
        for each in todo:
            for row, found in compare(*each, args):
                rows += 1
                for difference in filter(None, found.split(", ")):
                    seen[difference] = seen.get(difference, 0) + 1
                    if not is_named(difference, named):
                        problems.append(f"{row}: {difference}")
    print(columns([(name, f"{count} of {rows}") for name, count in sorted(seen.items())]))
    print_problems(problems)
    print(verdict(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
