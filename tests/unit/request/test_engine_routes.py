"""What engines serve, by their own route tables: administration never passes, in whatever spelling."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellgate.proxy.request.routes import DENIED, GENERATE, OWN, STICKY, RouteKind, find_route, why_refused
from tests.engine_routes import Served, served, table

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


@pytest.mark.parametrize("path", UNKNOWN.split())
def test_a_verb_that_nobody_knows_does_not_pass(path: str) -> None:
    assert not passes(path, "POST")


@given(st.lists(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=9, max_size=20), min_size=1, max_size=3))
def test_nor_does_an_invented_one_below_a_version(words: list[str]) -> None:
    for begin in ("/v1/", "/v2/models/", "/api/", "/inference/v1/", "/v1/chat/"):
        assert not passes(begin + "/".join([*words, "zzz"]), "POST")


@pytest.mark.parametrize("path", USED.split())
def test_what_users_of_other_engines_ask_passes(path: str) -> None:
    assert passes(path, "POST")


@pytest.mark.parametrize("path", ["/v1/audio/voices/alloy", "/v1/files/x", "/v1/files/file-9/content"])
def test_what_is_below_something_known_may_be_read(path: str) -> None:
    assert passes(path, "GET")


@pytest.mark.parametrize("verb", ["exit", "hibernate", "undrain", "evacuate", "pin_prefix", "failover"])
def test_a_verb_of_administration_does_not_pass_below_a_version_either(verb: str) -> None:
    assert not passes(f"/v1/{verb}", "POST")


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH", "PURGE"])
def test_a_method_that_changes_things_does_not_pass(method: str) -> None:
    assert not passes("/v1/files/x", method)
    assert passes("/v1/files/x", "GET")


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
    ast.parse(source)
    (tmp_path / "api.py").write_text(source)
    assert sorted(served(tmp_path)) == [("GET", "/d"), ("GET,PUT", "/c"), ("POST", "/a/b")]
    assert Served("tells", "vllm", "GET", "/version") in KNOWN
