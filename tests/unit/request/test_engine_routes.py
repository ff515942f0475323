"""What engines serve, by their own route tables: administration never passes, in whatever spelling."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

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
    assert {one.engine for one in KNOWN} == {"vllm", "sglang", "llamacpp", "triton"}
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


@pytest.mark.parametrize(
    "path",
    ["/frobnicate", "/updateWeights", "/flushcache", "/x/pause", "/engine/v9x", "/reconfigure_everything"],
)
def test_a_verb_that_nobody_knows_does_not_pass(path: str) -> None:
    assert not passes(path, "POST")


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
