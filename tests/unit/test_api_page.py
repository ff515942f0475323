"""The page of the API has every path, header line and error code, and no others."""

from __future__ import annotations

import re

from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.http.errors import TABLE, FailureKind
from cellgate.proxy.http.heads import TOKEN_FIELD
from cellgate.proxy.request import routes
from cellgate.proxy.request.routes import ENDPOINT_FIELD, REASON_FIELD, SUBSET_FIELD, RouteKind, find_route
from tests.documented import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
KINDS = {
    "generate": RouteKind.GENERATE,
    "read": RouteKind.READ,
    "gate": RouteKind.LOCAL,
    "asks": RouteKind.STICKY,
    "403": RouteKind.DENIED,
}
IN_STREAMS = dict.fromkeys(("truncated", "stream_error", "not_continued", "cut"), "in a stream")


def rows(section: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def codes(cell: str) -> list[str]:
    """What is in code marks."""
    return re.findall(r"`([^`]+)`", cell)


def paths() -> list[tuple[str, str, str]]:
    """Each path of the table with its methods and what it is; `…` stands for the path before it."""
    found: list[tuple[str, str, str]] = []
    for cell, methods, kind in rows("Paths"):
        base = ""
        for code in codes(cell):
            base = base if code.startswith("…") else code.rpartition("/generate")[0] or code
            path = code.replace("…", base).replace("NAME", "m").replace("/ID", "/resp_1")
            found.append((path, methods, kind))
    return found


def test_every_path_is_on_the_page_and_is_what_it_says() -> None:
    for path, methods, kind in paths():
        route = find_route(path.encode())
        told = ", ".join(method.decode() for method in route.methods) or "any"
        assert (route.kind, told) == (KINDS[re.split(r"[ ;:]", kind)[0]], methods), path
    assert {path.decode() for path in routes._EXACT} <= {path for path, _, _ in paths()}


def test_every_code_is_on_the_page_with_its_status() -> None:
    told = {code: status for cell, status, _ in rows("Errors") for code in codes(cell)}
    kinds = {
        kind.value: "in a stream" if kind.value in IN_STREAMS else str(TABLE[kind].status)
        for kind in FailureKind
    }
    assert told == kinds


def test_every_header_line_that_routes_is_on_the_page() -> None:
    told = {code for row in rows("Header lines of requests") for code in codes(row[0])}
    names = HeaderNames()
    fields = {field.decode() for field in (ENDPOINT_FIELD, SUBSET_FIELD, TOKEN_FIELD)}
    assert told >= {names.session, names.tenant, names.priority, "x-slo-ttft-ms", "x-request-id", *fields}
    answers = {code for row in rows("Header lines of answers") for code in codes(row[0])}
    assert REASON_FIELD.decode() in answers
