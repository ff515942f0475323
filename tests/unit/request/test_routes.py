"""The table of paths, what engines serve by their own tables, and what header lines and other sites get."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.config.settings import Cors, HeaderNames
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.request import Request
from cellgate.proxy.request.cors import CorsRules
from cellgate.proxy.request.routes import (
    DENIED,
    GENERATE,
    NAME_CHARS,
    OWN,
    STICKY,
    RouteKind,
    RoutingHeaders,
    find_route,
    why_refused,
)
from cellgate.router.nouns import Ask
from tests.engine_routes import Served, served, table

KINDS = {
    RouteKind.GENERATE: """/v1/chat/completions /v1/embeddings /v1/responses /v1/audio/transcriptions
        /generate /v2/models/llama/versions/3/infer /v2/models/llama/generate_stream""",
    RouteKind.READ: """/tokenize /version /v1/models/org/model /v1/models/org%2fmodel /v1/models/..org/model..
        /v1/models/.../x /v1/models/org/.hidden /v2 /v2/health/ready /v2/models/llama /v2/models/llama/ready
        /v2/models/llama/versions/3/config""",
    RouteKind.STICKY: "/v1/responses/resp_1 /v1/responses/resp_1/cancel /v1/responses/resp_1/input_items",
    RouteKind.LOCAL: "/v1/models /health /readyz /livez /healthz/unit/a1",
    RouteKind.DENIED: """/pause /sleep/ /x/pause /flush_cache /abort_request /update_weights_from_disk
        /v1/load_lora_adapter /v2/repository/index /%70ause /fl%75sh_cache /%73leep%2f""",
    RouteKind.AMBIGUOUS_PATH: r"""/v1/models/../../pause /v1/models/%2e%2E/..%2fpause /v1/models/%2e./x
        /v1/models/x/.. /v1/models/..;/pause /v1/models/..\..\pause /v1/models/x%5c..%5Cpause /v1/models/./x
        /v1/models//x /v1/models/%2f%2Fx //pause /%2fpause /./pause /v1/responses/../x /healthz/unit/..
        /v2/models/../repository/index /..""",
    RouteKind.UNLISTED: """/ /v1/chat/completions/ /v1/chat/completions/x /pausing /v1/responses/ /metrics
        /v2/models/llama/versions/x/infer /%""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_each_path_is(kind: RouteKind) -> None:
    for path in KINDS[kind].split():
        assert find_route(path.encode()).kind is kind, path


def test_json_is_expected_where_a_model_is_named_in_it_and_audio_is_a_form() -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"):
        route = find_route(path.encode())
        assert (route.json, route.methods) == (True, (b"POST",))
    assert not find_route(b"/v1/audio/transcriptions").json


# What engines serve, by their own route tables: administration never passes, in whatever spelling.

KNOWN = table()
ADMINISTER = [one for one in KNOWN if one.what == "administers"]
VARIANTS: dict[str, Callable[[str], str]] = {
    "as it is": lambda path: path,
    "with a slash behind": lambda path: path + "/",
    "in capitals": lambda path: path.upper(),
    "encoded": lambda path: "/" + "".join(f"%{ord(char):02x}" for char in path[1:]),
    "encoded twice": lambda path: path[0] + "%25" + f"{ord(path[1]):02x}" + path[2:],
    "slashes encoded": lambda path: "/" + path[1:].replace("/", "%2f"),
    "doubled slash": lambda path: "/" + path,
    "with a parameter": lambda path: path + ";a=b",
    "with a space": lambda path: path + "%20",
    "below a prefix": lambda path: "/vllm" + path,
    "with more behind": lambda path: path + "/x",
}


def passes(path: str, method: str) -> bool:
    route = find_route(path.encode())
    return why_refused(route, method.encode(), pass_unlisted=True) is None


def test_the_table_has_what_engines_serve() -> None:
    assert {one.engine for one in KNOWN} == {"vllm", "sglang", "llamacpp", "triton", "ollama", "tgi", "tei"}
    assert {one.what for one in KNOWN} == {"administers", "computes", "tells"}
    paths = {one.path for one in ADMINISTER}
    assert {
        "/abort_requests",
        "/release_kv_cache_memory",
        "/start_weight_update",
        "/set_internal_state",
    } <= paths
    assert {"/get_weights_by_name", "/load_lora_adapter_from_tensors", "/v2/logging"} <= paths


@pytest.mark.parametrize("how", VARIANTS)
def test_administration_never_passes(how: str) -> None:
    for one in ADMINISTER:
        path = VARIANTS[how](one.path)
        if find_route(path.encode()).kind in (GENERATE, OWN, STICKY):
            continue
        for method in (*one.methods.split(","), "POST", "GET"):
            assert not passes(path, method), (method, path)


def test_what_computes_or_tells_passes() -> None:
    for one in KNOWN:
        if one.what != "administers":
            methods = [method for method in one.methods.split(",") if method not in ("PUT", "DELETE")]
            # What has a row of its own may be for other methods.
            kind = find_route(one.path.encode()).kind
            assert kind is not DENIED, one
            assert kind is not RouteKind.UNLISTED or all(passes(one.path, each) for each in methods), one


UNKNOWN = """/frobnicate /updateWeights /flushcache /x/pause /engine/v9x /reconfigure_everything /-
/v1/frobnicate /v1/chat/frobnicate /v1/chat/completions/x /v2/models/m/frobnicate /inference/v1/quux
/cohere/v2/quux /v1 /v1/ /v1/- /v1/%c3%a9 /api/blobs/sha256:0a /v1/completions2 /v1/batches/b1/frobnicate
/V1/Frobnicate /v1/%66robnicate /v1//chat/x1"""
USED = """/v1/batches /v1/batches/batch_67ab/cancel /v1/files /v1/threads/thread_1/messages /v1/videos
/v1/vector_stores/vs_1/search /v1/conversations/conv_1/items /v1/audio/speech/stream /v1/audio/voices /v1/tts
/v1/health/ready /v1/chat/completions/batch /api/v1/generate /openai/v1/batches /v1/summarize /v1/ocr
/v1/ranking /v2/chat /v1/responses/input_tokens /v1/messages/batches /embed_all /generate_stream"""


def test_a_verb_that_nobody_knows_does_not_pass_and_what_users_of_other_engines_ask_does() -> None:
    verbs = [f"/v1/{verb}" for verb in ("exit", "hibernate", "undrain", "evacuate", "pin_prefix", "failover")]
    assert [path for path in (*UNKNOWN.split(), *verbs) if passes(path, "POST")] == []
    assert [path for path in USED.split() if not passes(path, "POST")] == []
    # What is below something known may be read, and not changed.
    for path in ("/v1/audio/voices/alloy", "/v1/files/x", "/v1/files/file-9/content"):
        assert passes(path, "GET")
    assert not any(passes("/v1/files/x", method) for method in ("DELETE", "PUT", "PATCH", "PURGE"))


@given(st.lists(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=9, max_size=20), min_size=1, max_size=3))
def test_nor_does_an_invented_one_below_a_version(words: list[str]) -> None:
    for begin in ("/v1/", "/v2/models/", "/api/", "/inference/v1/", "/v1/chat/"):
        assert not passes(begin + "/".join([*words, "zzz"]), "POST")


def test_routes_are_read_out_of_source(tmp_path: Path) -> None:
    source = """
router = APIRouter(prefix="/a")
@router.post("/b")
def b(): ...
@app.api_route("/c", methods=["GET", "PUT"])
def c(): ...
app.add_api_route("/d", d)
requests.get("http://x")
"""
    (tmp_path / "api.py").write_text(source)
    assert sorted(served(tmp_path)) == [("GET", "/d"), ("GET,PUT", "/c"), ("POST", "/a/b")]
    assert Served("tells", "vllm", "GET", "/version") in KNOWN


# What header lines say of how a request is to be routed.

NOW = 100.0


def heed(*lines: tuple[str, str], ask: Ask = Ask("m"), headers: HeaderNames = HeaderNames()) -> Ask:  # noqa: B008
    """The ask with what these lines say."""
    heeded = RoutingHeaders(headers).apply(
        ask, [(name.encode(), value.encode("latin-1")) for name, value in lines], NOW
    )
    assert isinstance(heeded, Ask), heeded
    return heeded


def test_session_tenant_and_priority_are_read_and_come_before_what_the_body_says() -> None:
    body = Ask("m", session="user", priority=7)
    lines = [("x-session-id", "s-1"), ("x-gateway-inference-fairness-id", "team"), ("x-priority", "-3")]
    for ask in (heed(*lines), heed(*lines, ask=body)):
        assert (ask.session, ask.tenant, ask.priority) == ("s-1", "team", -3)
    assert heed(("host", "gate"), ("accept", "*/*"), ask=body) == body
    assert heed(("x-chat", "c-9"), *lines, headers=HeaderNames(sessions=("x-chat",))).session == "c-9"


@pytest.mark.parametrize(
    "lines",
    [
        {"x-claude-code-session-id": "ROOT", "x-claude-code-agent-id": "sub"},
        {"session-id": "ROOT", "thread-id": "sub", "x-codex-parent-thread-id": "other"},
        {"x-session-affinity": "sub", "x-session-id": "sub", "x-parent-session-id": "ROOT"},
        {"x-opencode-session": "ROOT", "x-opencode-request": "1"},
        {"x-session-id": "", "x-session-affinity": "ROOT"},
    ],
    ids=["Claude Code", "Codex", "opencode", "opencode at its own gateway", "an empty line"],
)
def test_sub_agents_of_the_usual_clients_are_of_the_session_above_them(lines: dict[str, str]) -> None:
    for order in (lines.items(), reversed(lines.items())):
        assert heed(*order, ask=Ask("m", session="of the body")).session == "ROOT"


def test_a_session_without_end_is_cut_and_what_is_no_session_changes_nothing() -> None:
    assert heed(("session-id", "s" * 9999)).session == "s" * NAME_CHARS
    assert heed(("session-id", ""), ask=Ask("m", session="of the body")).session == "of the body"


def test_who_shows_the_same_credentials_is_the_same_tenant_unless_a_line_says_otherwise() -> None:
    one, same, other = (heed(("authorization", f"Bearer {key}")).tenant for key in ("a", "a", "b"))
    assert one == same != other
    assert "Bearer" not in one
    named = ("x-gateway-inference-fairness-id", "team")
    assert (
        heed(("authorization", "Bearer a"), named).tenant
        == heed(named, ("authorization", "x")).tenant
        == "team"
    )


def test_the_nearest_deadline_counts() -> None:
    assert heed(("x-slo-ttft-ms", "1500")).deadline_at == NOW + 1.5
    both = heed(("x-slo-ttft-ms", "1500"), ("x-envoy-expected-rq-timeout-ms", "500"))
    assert both.deadline_at == NOW + 0.5
    assert heed().deadline_at == inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-priority", "high"),
        ("x-priority", ""),
        ("x-priority", "99999999999"),
        ("x-slo-ttft-ms", "soon"),
        ("x-slo-ttft-ms", "0"),
        ("x-slo-ttft-ms", "nan"),
        ("x-slo-ttft-ms", "inf"),
        ("x-gateway-inference-fairness-id", ""),
    ],
)
def test_a_line_that_makes_no_sense_is_named(name: str, value: str) -> None:
    failure = RoutingHeaders(HeaderNames()).apply(Ask("m"), [(name.encode(), value.encode())], NOW)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (FailureKind.BAD_HEADER, name)
    assert failure.message.startswith(f"{name}: expected ")
    assert len(failure.message) < 200


def test_what_another_system_says_wrongly_is_ignored() -> None:
    routing_headers = RoutingHeaders(HeaderNames())
    for value in (b"", b"none", b"0", b"-5"):
        assert routing_headers.apply(Ask("m"), [(b"x-envoy-expected-rq-timeout-ms", value)], NOW) == Ask("m")


# What pages of other sites are told.

APP = b"https://app.example"
RULES = CorsRules(Cors((APP.decode(),)))


def asked(method: bytes = b"POST", **fields: bytes) -> Request:
    request = Request(0.0, [], [], [])
    request.method = method
    request.routing = [(name.replace("_", "-").encode(), value) for name, value in fields.items()]
    request.lines = [b"%b: %b\r\n" % line for line in request.routing] + [b"accept: */*\r\n"]
    return request


def told(rules: CorsRules, request: Request) -> dict[str, str]:
    lines = rules.lines(request).decode().split("\r\n")[:-1]
    return dict(line.split(": ", 1) for line in lines)


def test_a_page_that_is_listed_may_read_the_answer() -> None:
    request = asked(origin=APP)
    lines = told(RULES, request)
    assert (lines["access-control-allow-origin"], lines["vary"]) == (APP.decode(), "origin")
    assert "x-request-id" in lines["access-control-expose-headers"]
    assert request.lines == [b"accept: */*\r\n"]


def test_others_may_not_unless_all_are_listed() -> None:
    assert told(RULES, asked(origin=b"https://evil.example")) == {"vary": "origin"}
    assert told(RULES, asked()) == {"vary": "origin"}
    assert told(CorsRules(Cors(("*",))), asked()) == {}
    assert told(CorsRules(Cors(("*",))), asked(origin=APP))["access-control-allow-origin"] == "*"


def test_a_preflight_is_told_methods_and_headers() -> None:
    preflight = asked(
        b"OPTIONS",
        origin=APP,
        access_control_request_method=b"POST",
        access_control_request_headers=b"authorization,content-type, x-stainless-os",
    )
    lines = told(RULES, preflight)
    assert lines["access-control-allow-headers"] == "authorization,content-type, x-stainless-os"
    assert "POST" in lines["access-control-allow-methods"]
    assert lines["access-control-max-age"] == "600"

    # Names that are none are not repeated.
    for names in (b"", b"a b", b"x" + b",x" * 100, b'"x"'):
        preflight.routing[-1] = (b"access-control-request-headers", names)
        assert "access-control-allow-headers" not in told(RULES, preflight)
