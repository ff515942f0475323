"""The table of paths: what each is, and what never passes."""

from __future__ import annotations

import pytest

from cellgate.proxy.request.routes import RouteKind, find_route

KINDS = {
    RouteKind.GENERATE: [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/audio/transcriptions",
        "/generate",
        "/v2/models/llama/generate",
        "/v2/models/llama/versions/3/infer",
        "/v2/models/llama/generate_stream",
    ],
    RouteKind.READ: [
        "/tokenize",
        "/detokenize",
        "/version",
        "/v1/models/org/model",
        "/v1/models/org%2fmodel",
        "/v1/models/..org/model..",
        "/v1/models/.../x",
        "/v1/models/org/.hidden",
        "/v2",
        "/v2/health/ready",
        "/v2/models/llama",
        "/v2/models/llama/ready",
        "/v2/models/llama/versions/3/config",
    ],
    RouteKind.STICKY: [
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/v1/responses/resp_1/input_items",
    ],
    RouteKind.LOCAL: ["/v1/models", "/health", "/readyz", "/livez", "/healthz/unit/a1"],
    RouteKind.DENIED: [
        "/pause",
        "/sleep",
        "/sleep/",
        "/x/pause",
        "/flush_cache",
        "/abort_request",
        "/update_weights_from_disk",
        "/v1/load_lora_adapter",
        "/v2/repository/index",
        "/%70ause",
        "/fl%75sh_cache",
        "/%73leep%2f",
    ],
    RouteKind.AMBIGUOUS_PATH: [
        "/v1/models/../../pause",
        "/v1/models/%2e%2E/..%2fpause",
        "/v1/models/%2e./x",
        "/v1/models/x/..",
        "/v1/models/..;/pause",
        "/v1/models/..\\..\\pause",
        "/v1/models/x%5c..%5Cpause",
        "/v1/models/./x",
        "/v1/models/..\\..\\pause",
        "/v1/models/x%5c..%5Cpause",
        "/v1/models//x",
        "/v1/models/%2f%2Fx",
        "//pause",
        "/%2fpause",
        "/./pause",
        "//v1/chat/completions",
        "/v1/responses/../x",
        "/healthz/unit/..",
        "/v2/models/../repository/index",
        "/..",
    ],
    RouteKind.UNLISTED: [
        "/",
        "/v1/chat/completions/",
        "/v1/chat/completions/x",
        "/pausing",
        "/v1/responses/",
        "/metrics",
        "/v2/models/llama/versions/x/infer",
        "/%",
    ],
}


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in KINDS.items() for path in paths])
def test_what_each_path_is(kind: RouteKind, path: str) -> None:
    assert find_route(path.encode()).kind is kind


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"])
def test_json_is_expected_where_a_model_is_named_in_it(path: str) -> None:
    route = find_route(path.encode())
    assert (route.json, route.methods) == (True, (b"POST",))


def test_audio_is_a_form_and_not_json() -> None:
    assert not find_route(b"/v1/audio/transcriptions").json
