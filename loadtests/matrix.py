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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from backports import zstd

from loadtests.kit.engine_fakes import FAKES, FakeServer, Page, serving
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
"""What a real engine says in other words each time."""


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


def asks(path: str, page: Page) -> Iterator[Ask]:
    """The rows of one endpoint."""
    if path.startswith("/v1/audio/trans"):
        form = (("content-type", "multipart/form-data; boundary=x"),)
        yield Ask("form", "POST", path, _FORM, form)
        yield Ask("streamed form", "POST", path, _STREAMED + _FORM, form)
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
    usual = stream if page.events else _json(fields)
    odd = {"a mark": usual.decode().encode("utf-8-sig"), "UTF-16": usual.decode().encode("utf-16")}
    odd["NaN"] = usual[:-1] + b', "seed": NaN}'
    for name, body in odd.items():
        yield Ask(name, "POST", path, body, (_JSON,))
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


_SDK_KEYS = {
    "/v1/chat/completions": ("model", "messages", "stream"),
    "/v1/responses": ("model", "input", "stream"),
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
        words = {key: document[key] for key in _SDK_KEYS[ask.path] if key in document}
        got = call[ask.path](**words, extra_body={"bad": 1} if "bad" in document else None)
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
    words = {key: document[key] for key in (*_SDK_KEYS[ask.path], "bad") if key in document}
    command = ["node", "-e", _NODE_SDK, url, ask.path, json.dumps(words)]
    out = subprocess.run(command, capture_output=True, check=True, timeout=ANSWER_S).stdout
    status, objects = json.loads(out)
    return Answer(status, (), _json(objects))


def _has_node_package(name: str) -> bool:
    command = ["node", "-e", f"require.resolve({name!r})"]
    return subprocess.run(command, capture_output=True, check=False, timeout=ANSWER_S).returncode == 0


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
    """A client, and what it needs: a program, a module of Python, or a package of Node. `paths` and `asks`:
    those it is for, else all.
    """

    client: Client
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
    "openai for node": Way(_node_sdk, package="openai", paths=_SDK_PATHS, asks=_SDK_ASKS),
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


def _asked_differently(server: FakeServer) -> Iterator[str]:
    """The same of what reached the engine, in the last two requests."""
    (method, path, lines, body), (method2, path2, lines2, body2) = server.asked[-2:]
    if (method, path, body) != (method2, path2, body2):
        yield "the request"
    one, other = ({line for line in each if not _CLIENTS_OWN.fullmatch(line[0])} for each in (lines, lines2))
    yield from (f"the request's {name}" for name in sorted({name for name, _ in one ^ other}))


def compare(
    engine: str, url: str, pages: Mapping[str, Page], server: FakeServer | None, args: argparse.Namespace
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
    for name in [each for each in args.clients if not CLIENTS[each].is_there()]:
        print(f"{name} is not installed, and left out")
        args.clients.remove(name)
    named, problems, seen, rows = named_differences(PAGE.read_text()), [], dict[str, int](), 0
    with ExitStack() as stack:
        todo: list[tuple[str, str, Mapping[str, Page], FakeServer | None]] = []
        for engine in args.engines:
            server = stack.enter_context(serving(FAKES[engine]))
            todo.append((engine, f"http://127.0.0.1:{server.server_port}", FAKES[engine].pages, server))
        for each in args.engine:
            name, url = each.split("=", 1)
            todo.append((name, url, FAKES.get(name, FAKES["vllm"]).pages, None))
        for one in todo:
            for row, found in compare(*one, args):
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
