"""What the gate gives a meaning to, and what the files in deploy/ do with it when a client says it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.http.heads import INTERNAL_REPLY_FIELDS, KEY_FIELDS, MEANINGS, REQUEST_FIELDS, Said
from cellgate.proxy.request.routes import FIELDS as CORS_FIELDS
from cellgate.proxy.request.routes import RoutingHeaders

DEPLOY = Path(__file__).parents[3] / "deploy"
FRAMING = frozenset(
    (
        b"connection content-length keep-alive proxy-authenticate proxy-authorization proxy-connection te "
        b"trailer transfer-encoding upgrade"
    ).split()
)
"""HTTP's own, which every proxy writes again."""

Dealt = tuple[set[str], set[str], set[str]]
"""Fields of requests that are removed; that are replaced, or appended to; of answers that are removed."""


def haproxy(text: str) -> Dealt:
    frontend = text[text.index("frontend") : text.index("\nbackend")]
    return (
        set(re.findall(r"^ +http-request del-header (\S+)$", frontend, re.MULTILINE)),
        set(re.findall(r"^ +http-request set-header (\S+) \S+$", frontend, re.MULTILINE)),
        set(re.findall(r"^ +http-response del-header (\S+)$", frontend, re.MULTILINE)),
    )


def nginx(text: str) -> Dealt:
    sets = dict(re.findall(r"^ +proxy_set_header (\S+) (\S+);$", text, re.MULTILINE))
    return (
        {name.lower() for name, value in sets.items() if value == '""'},
        {name.lower() for name, value in sets.items() if value != '""'},
        set(re.findall(r"^ +proxy_hide_header (\S+);$", text, re.MULTILINE)),
    )


def envoy(text: str) -> Dealt:
    (listener,) = yaml.safe_load(text)["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]
    # Envoy writes both itself for whoever connects to it.
    own = {"x-forwarded-for", "x-forwarded-proto"} if manager["use_remote_address"] else set()
    return set(routes["request_headers_to_remove"]), own, set(routes["response_headers_to_remove"])


FILES: dict[str, Callable[[str], Dealt]] = {
    "ingress/haproxy.cfg": haproxy,
    "ingress/haproxy-units.cfg": haproxy,
    "compose/haproxy.cfg": haproxy,
    "ingress/nginx.conf": nginx,
    "ingress/envoy.yaml": envoy,
}


def test_each_field_that_the_gate_reads_is_in_the_table() -> None:
    routing = RoutingHeaders(HeaderNames()).names
    read = REQUEST_FIELDS | KEY_FIELDS | CORS_FIELDS | routing
    assert read - FRAMING - MEANINGS.keys() == set()


def test_no_other_field_of_the_gate_is_read_anywhere() -> None:
    sources = "".join(path.read_text() for path in (DEPLOY.parent / "proxy").rglob("*.py"))
    named = set(re.findall(r'b"(x-(?:cellgate|gateway|haproxy|envoy)-[a-z-]+)[":]', sources))
    answers = {"x-envoy-degraded", "x-envoy-immediate-health-check-fail", "x-cellgate-reason"}
    answers |= {"x-cellgate-model", "x-cellgate-fallback-from", "x-cellgate-unit-request-id"}
    assert named - answers - {name.decode() for name in MEANINGS} == set()


@pytest.mark.parametrize("file", FILES)
def test_an_ingress_passes_on_nothing_of_its_clients_that_is_not_theirs_to_say(file: str) -> None:
    removed, replaced, _ = FILES[file]((DEPLOY / file).read_text())
    said = {who: {name.decode() for name, by in MEANINGS.items() if by is who} for who in Said}
    assert said[Said.BY_OPERATOR] - removed == set()
    assert said[Said.BY_INGRESS] - removed - replaced == set()
    assert said[Said.BY_CLIENTS] & removed == set()
    assert "x-forwarded-for" in replaced


@pytest.mark.parametrize("file", FILES)
def test_an_ingress_shows_users_nothing_of_the_fleet(file: str) -> None:
    _, _, hidden = FILES[file]((DEPLOY / file).read_text())
    assert {name.decode() for name in INTERNAL_REPLY_FIELDS} - hidden == set()


def test_no_other_file_is_an_ingress() -> None:
    found = {
        str(path.relative_to(DEPLOY))
        for path in DEPLOY.rglob("*")
        if path.is_file()
        and re.search(r"\n(frontend|    upstream) |http_connection_manager", path.read_text())
    }
    assert found == FILES.keys()
