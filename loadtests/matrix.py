"""Any client, any engine: what is asked and answered through the gate, beside the same without it.

`python -m loadtests.matrix` asks fakes of engines, which answer as their public documentation says, once
directly and once through a gate; real engines are added with `--engine NAME=URL`. It prints every difference
and fails for one that docs/api.md ("What differs from the engine itself") does not name. A client that is not
installed is named and left out.
"""

import argparse
import gzip
import http.client
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from backports import zstd

from loadtests.kit.engine_fakes import FAKES, FakeServer, Page, serving
from loadtests.kit.gate import GateProcess, Named
from loadtests.kit.report import columns, print_problems, verdict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
ANSWER_S = 60.0
TRIES = 30
"""Of a row of a real engine: it may say two tokens in one event, or one in each."""
_CLIENTS_OWN = re.compile(
    "host|connection|content-length|transfer-encoding|accept-encoding|content-encoding|expect|te|upgrade|"
    "http2-settings|keep-alive|origin|x-request-id|x-forwarded-(for|proto|host)|authorization|date"
)
"""Header lines of requests that are the gate's matter (docs/api.md, "Header lines of requests")."""
_CHANGING = re.compile(
    rb'"(?:id|created|created_at|completed_at|system_fingerprint|timings|item_id|prompt_ms|request_id)"\s*:\s*'
    rb'(?:"[^"]*"|[0-9.e+-]+|\{[^{}]*\})'
)
"""What a real engine says in other words each time."""


class Ask(NamedTuple):
    """One request: a row of the matrix. `plain` is its body before it was compressed."""

    name: str
    method: str
    path: str
    body: bytes = b""
    lines: tuple[tuple[str, str], ...] = ()
    plain: bytes = b""


class Answer(NamedTuple):
    """What a client got."""

    status: int
    lines: tuple[tuple[str, str], ...]
    body: bytes


Client = Callable[[str, Ask], Answer]


# -- requests ------------------------------------------------------------------------------------------------

_JSON = ("content-type", "application/json")
_FORM = (
    b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--x--\r\n'
)
_STREAMED = b'--x\r\ncontent-disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
_CLAUDE = (
    _JSON,
    ("anthropic-version", "2023-06-01"),
    ("anthropic-beta", "claude-code-20250219,interleaved-thinking-2025-05-14"),
    ("x-app", "cli"),
    ("x-stainless-lang", "js"),
)


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


_HI = [{"role": "user", "content": "Hi"}]
_FIELDS: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {"messages": _HI, "max_tokens": 8, "temperature": 0},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 8, "temperature": 0},
    "/v1/messages": {"messages": _HI, "max_tokens": 8, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": _HI},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 8, "temperature": 0},
}
"""Greedy: an answer that is sampled is another one each time, with or without a gate."""
_OTHER_FIELDS = {"prompt": "Hi", "input": "Hi", "inputs": "Hi", "text": "Hi", "voice": "a"} | {
    "query": "a",
    "documents": ["a"],
    "tokens": [1],
}


def asks(path: str, page: Page) -> Iterator[Ask]:
    """The rows of one endpoint."""
    if path.startswith("/v1/audio/trans"):
        form = (("content-type", "multipart/form-data; boundary=x"),)
        yield Ask("form", "POST", path, _FORM, form)
        yield Ask("streamed form", "POST", path, _STREAMED + _FORM, form)
        return
    fields = {"model": "tiny", **_FIELDS.get(path, _OTHER_FIELDS)}
    yield Ask("whole", "POST", path, _json(fields), (_JSON,))
    yield Ask("bad", "POST", path, _json({**fields, "temperature": "bad"}), (_JSON,))
    stream = _json({**fields, "stream": True})
    usual = stream if page.events else _json(fields)
    odd = {"a mark": usual.decode().encode("utf-8-sig"), "UTF-16": usual.decode().encode("utf-16")}
    odd["NaN"] = usual[:-1] + b', "seed": NaN}'
    for name, body in odd.items():
        yield Ask(name, "POST", path, body, (_JSON,))
    if page.events:
        yield Ask("stream", "POST", path, stream, (_JSON,))
        for coding, compress in (("gzip", gzip.compress), ("zstd", zstd.compress)):
            # Codex sends zstd.
            lines = (_JSON, ("content-encoding", coding))
            yield Ask(coding, "POST", path, compress(stream), lines, stream)
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
    return Answer(int(first.split()[1]), _pairs(lines), body)


def _pairs(lines: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, _, value in (line.partition(": ") for line in lines))


def program(stack: ExitStack, source: str, *command: str) -> Client:
    """A client that is a program: it reads a line of words for each request (URL, method, a file with the
    body, one for the answer's, header lines), and says status and header lines, up to an empty line.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    sent, got, script = folder / "sent", folder / "got", folder / "Ask.java"
    script.write_text(source)
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, str(script)], stdin=pipe, stdout=pipe, text=True)
    # Without input it ends.
    stack.enter_context(process)
    assert process.stdin is not None
    assert process.stdout is not None
    asked, said = process.stdin, process.stdout

    def ask_it(url: str, ask: Ask) -> Answer:
        sent.write_bytes(ask.body)
        words = [f"{url}{ask.path}", ask.method, str(sent), str(got)]
        print(*words, *(word for line in ask.lines for word in line), sep="\t", file=asked, flush=True)
        status, *lines = iter(lambda: said.readline().rstrip("\n"), "")
        return Answer(int(status), _pairs(lines), got.read_bytes())

    return ask_it


_JAVA = """
import java.io.*; import java.net.URI; import java.net.http.*; import java.nio.file.*;
class Ask { public static void main(String[] none) throws Exception {
  var in = new BufferedReader(new InputStreamReader(System.in));
  for (String line; (line = in.readLine()) != null; System.out.println()) {
    var a = line.split("\\t");
    var body = Files.readAllBytes(Path.of(a[2]));
    var ask = HttpRequest.newBuilder(URI.create(a[0])).method(a[1], body.length == 0
      ? HttpRequest.BodyPublishers.noBody() : HttpRequest.BodyPublishers.ofByteArray(body));
    for (int i = 4; i + 1 < a.length; i += 2) ask.header(a[i], a[i + 1]);
    try {
      var got = HttpClient.newHttpClient().send(ask.build(), HttpResponse.BodyHandlers.ofByteArray());
      Files.write(Path.of(a[3]), got.body());
      System.out.println(got.statusCode());
      got.headers().map().forEach((n, vs) -> vs.forEach(v -> System.out.println(n + ": " + v)));
    } catch (IOException e) { Files.writeString(Path.of(a[3]), e.toString()); System.out.println(0); }
  }
} }
"""
_NODE = """
const fs = require('fs'); const lines = require('readline').createInterface({input: process.stdin});
(async () => { for await (const line of lines) {
  const [url, method, sent, got, ...rest] = line.split('\\t');
  const headers = []; for (let i = 0; i + 1 < rest.length; i += 2) headers.push([rest[i], rest[i + 1]]);
  const body = fs.readFileSync(sent);
  try {
    const r = await fetch(url, {method, headers, body: body.length ? body : undefined});
    fs.writeFileSync(got, Buffer.from(await r.arrayBuffer())); console.log(r.status);
    r.headers.forEach((v, n) => console.log(n + ': ' + v));
  } catch (e) { fs.writeFileSync(got, String(e)); console.log(0); }
  console.log();
} })();
"""


_SDK_KEYS = {
    "/v1/chat/completions": ("model", "messages", "stream", "temperature", "max_tokens"),
    "/v1/responses": ("model", "input", "stream", "temperature", "max_output_tokens"),
}


def _sdk(url: str, ask: Ask) -> Answer:
    """OpenAI's library for Python: its objects, as it has read them."""
    import openai

    document = json.loads(ask.body)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    call: dict[str, Callable[..., Any]] = {
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/responses": client.responses.create,
    }
    try:
        got = call[ask.path](**{key: document[key] for key in _SDK_KEYS[ask.path] if key in document})
        objects = [each.to_json() for each in got] if document.get("stream") else [got.to_json()]
    except openai.APIStatusError as error:
        return Answer(error.status_code, (), error.response.content)
    return Answer(200, (), "\n".join(objects).encode())


_CLAUDE_KEYS = ("model", "messages", "max_tokens", "stream")


def _anthropic(url: str, ask: Ask) -> Answer:
    """Anthropic's library for Python, as above."""
    import anthropic  # type: ignore[import-not-found]

    document = json.loads(ask.body)
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    words = {key: document[key] for key in _CLAUDE_KEYS if key in document}
    try:
        got = client.messages.create(**words, extra_body={"temperature": document["temperature"]})
        objects = [each.to_json() for each in got] if document.get("stream") else [got.to_json()]
    except anthropic.APIStatusError as error:
        return Answer(error.status_code, (), error.response.content)
    return Answer(200, (), "\n".join(objects).encode())


_NODE_SDK = """
const OpenAI = require('openai'); const [base, path, sent] = process.argv.slice(1);
const ask = JSON.parse(sent);
const api = new OpenAI.OpenAI({baseURL: base + '/v1', apiKey: 'unused', maxRetries: 0});
const calls = {'/v1/chat/completions': api.chat.completions, '/v1/responses': api.responses};
calls[path].create(ask).then(async (got) => {
  const objects = [];
  if (ask.stream) for await (const each of got) objects.push(each); else objects.push(got);
  console.log(JSON.stringify([200, objects]));
}).catch((error) => { console.log(JSON.stringify([error.status, [error.error]])); });
"""


def _node_sdk(url: str, ask: Ask) -> Answer:
    """OpenAI's library for Node, as above; NODE_PATH says where it is."""
    document = json.loads(ask.body)
    words = {key: document[key] for key in _SDK_KEYS[ask.path] if key in document}
    command = ["node", "-e", _NODE_SDK, url, ask.path, json.dumps(words)]
    out = subprocess.run(command, capture_output=True, check=True, timeout=ANSWER_S).stdout
    status, objects = json.loads(out)
    return Answer(status, (), _json(objects))


def _has_node_package(name: str) -> bool:
    command = ["node", "-e", f"require.resolve({name!r})"]
    return subprocess.run(command, capture_output=True, check=False, timeout=ANSWER_S).returncode == 0


_PAGE = b"""<script>(async () => { for (;;) {
  const [url, method, lines, sent] = await (await fetch("/next")).json();
  let got;
  try {
    const r = await fetch(url, {method, headers: lines, body: sent === "" ? undefined : sent});
    const body = new Uint8Array(await r.arrayBuffer());
    got = [r.status, Array.from(body, (b) => String.fromCharCode(b)).join("")];
  } catch (e) { got = [0, String(e)]; }
  await fetch("/got", {method: "POST", body: JSON.stringify(got)});
} })();</script>"""
_BROWSER = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def browser(stack: ExitStack) -> Client:
    """`fetch` in a page of another site: Chromium asks with OPTIONS first, and shows what CORS allows. Which
    header lines that are is the gate's matter: only status and body are shown.
    """
    asked, got = Queue[bytes](), Queue[Any]()

    class Site(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            self._say(asked.get() if self.path == "/next" else _PAGE)

        def do_POST(self) -> None:
            got.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._say(b"")

        def _say(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    site = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site))
    site.daemon_threads = True
    Thread(target=site.serve_forever, daemon=True).start()
    stack.callback(site.shutdown)
    profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    command = ["chromium", *_BROWSER, f"--user-data-dir={profile}", f"http://127.0.0.1:{site.server_port}/"]
    none = subprocess.DEVNULL
    process = stack.enter_context(subprocess.Popen(command, stdout=none, stderr=none))
    stack.callback(process.terminate)

    def ask_it(url: str, ask: Ask) -> Answer:
        asked.put(_json([f"{url}{ask.path}", ask.method, ask.lines, ask.body.decode()]))
        status, body = got.get(timeout=ANSWER_S)
        return Answer(status, (), body.encode("latin-1"))

    return ask_it


_SDK_PATHS = ("/v1/chat/completions", "/v1/responses")
_SDK_ASKS = ("whole", "stream", "bad")


class Way(NamedTuple):
    """A client, and what it needs: a program, a module of Python, or a package of Node. `paths` and `asks`:
    those it is for, else all.
    """

    start: Callable[[ExitStack], Client]
    program: str = ""
    module: str = ""
    package: str = ""
    paths: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()

    def is_there(self) -> bool:
        """Whether it is installed."""
        if self.module:
            return find_spec(self.module) is not None
        if self.package:
            return shutil.which("node") is not None and _has_node_package(self.package)
        return not self.program or shutil.which(self.program) is not None

    def asks_for(self, ask: Ask) -> bool:
        """Whether this row is for it."""
        return (not self.paths or ask.path in self.paths) and (not self.asks or ask.name in self.asks)


CLIENTS: Mapping[str, Way] = {
    "raw": Way(lambda _: raw),
    "curl": Way(lambda _: curl, "curl"),
    "java": Way(lambda stack: program(stack, _JAVA, "java", "-XX:TieredStopAtLevel=1"), "java"),
    "node": Way(lambda stack: program(stack, _NODE, "node"), "node"),
    "chromium": Way(browser, "chromium", asks=_SDK_ASKS),
    "openai": Way(lambda _: _sdk, module="openai", paths=_SDK_PATHS, asks=_SDK_ASKS),
    "openai for node": Way(lambda _: _node_sdk, package="openai", paths=_SDK_PATHS, asks=_SDK_ASKS),
    "anthropic": Way(lambda _: _anthropic, module="anthropic", paths=("/v1/messages",), asks=_SDK_ASKS),
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
    if direct.status == 404 == gated.status and b'"not_served"' in gated.body:
        yield "404"
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


def _asked_differently(server: FakeServer) -> Iterator[str]:
    """The same of what reached the engine, in the last two requests."""
    (method, path, lines, body), (method2, path2, lines2, body2) = server.asked[-2:]
    if (method, path, body) != (method2, path2, body2):
        yield "the request"
    one, other = ({line for line in each if not _CLIENTS_OWN.fullmatch(line[0])} for each in (lines, lines2))
    yield from (f"the request's {name}" for name in sorted({name for name, _ in one ^ other}))


def _of_row(client: Client, url: str, server: FakeServer | None, gate: str, ask: Ask) -> list[str]:
    """What differs between an engine's answer and the gate's, and between what the engine was asked."""
    direct, gated = client(url, ask), client(gate, ask)
    asked = list(_asked_differently(server)) if server is not None and ask.method == "POST" else []
    found = list(differences(direct, gated))
    if found and not 200 <= direct.status < 400:
        # The engine refuses a page, an upgrade, or a compressed body. The gate does not.
        plain = Ask("", ask.method, ask.path, ask.plain, (_JSON,)) if ask.plain else ask
        usual = raw(url, plain)
        found = list(differences(usual._replace(lines=usual.lines if gated.lines else ()), gated))
    return found + asked


def compare(
    engine: str, url: str, pages: Mapping[str, Page], server: FakeServer | None, clients: Mapping[str, Client]
) -> Iterator[tuple[str, str]]:
    """Each row of one engine, with what differs."""
    with GateProcess([Named(engine, url)], settings={"cors": {"origins": ["*"]}}) as gate:
        for ask in (ask for path, page in pages.items() for ask in asks(path, page)):
            # A real engine caches prompts, and says so.
            raw(url, ask)
            for name, client in clients.items():
                if not CLIENTS[name].asks_for(ask):
                    continue
                for _ in range(1 if server else TRIES):
                    found = _of_row(client, url, server, gate.url, ask)
                    if not any(each.startswith("body") for each in found):
                        break
                yield f"{engine} {ask.method} {ask.path} {ask.name} {name}", ", ".join(found)


def main() -> int:
    """Exit code 1: something differs that the documentation does not name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a real engine; of a NAME that has a fake, the same paths are asked for",
    )
    parser.add_argument("--engines", nargs="*", default=list(FAKES), choices=list(FAKES), help="fakes")
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    args = parser.parse_args()
    named, problems, seen, rows = named_differences(PAGE.read_text()), [], dict[str, int](), 0
    with ExitStack() as stack:
        clients = dict[str, Client]()
        for name in args.clients:
            if CLIENTS[name].is_there():
                clients[name] = CLIENTS[name].start(stack)
            else:
                print(f"{name} is not installed, and left out")
        todo: list[tuple[str, str, Mapping[str, Page], FakeServer | None]] = []
        for engine in args.engines:
            server = stack.enter_context(serving(FAKES[engine]))
            todo.append((engine, f"http://127.0.0.1:{server.server_port}", FAKES[engine].pages, server))
        for each in args.engine:
            name, url = each.split("=", 1)
            todo.append((name, url, FAKES.get(name, FAKES["vllm"]).pages, None))
        for one in todo:
            for row, found in compare(*one, clients):
                rows += 1
                for difference in filter(None, found.split(", ")):
                    seen[difference] = seen.get(difference, 0) + 1
                    if not is_named(difference, named):
                        problems.append(f"{row}: {difference}")
    print(columns([(name, f"{count} of {rows}") for name, count in sorted(seen.items())]))
    print_problems(problems)
    print(f"{rows} rows, {verdict(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
