"""The pages: every link leads somewhere, every page can be found, and what they tell to type exists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import orjson
import yaml

from cellgate.probes import MORE_NODE_PROBES, NODE_PROBES, PROBES
from cellgate.probes.engines import ENGINES
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides
from cellgate.proxy.config.settings import HeaderNames
from cellgate.proxy.http.errors import TABLE, FailureKind
from cellgate.proxy.http.heads import TOKEN_FIELD
from cellgate.proxy.observe.access_log import json_line
from cellgate.proxy.request import routes
from cellgate.proxy.request.placement import ENDPOINT_FIELD, REASON_FIELD, SUBSET_FIELD
from cellgate.proxy.request.routes import RouteKind, find_route
from tests.documented import PLACES, PROGRAMS, typed
from tests.house.rooms import ORDER
from tests.unit.observe.test_logs import DONE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What links into a page may name: its headings, as forges spell them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def test_every_link_leads_somewhere() -> None:
    assert [f"{page.relative_to(ROOT)}: {link}" for page in PAGES for link in links_to_nowhere(page)] == []


def links_to_nowhere(page: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def test_every_page_is_in_the_index_and_in_it_once() -> None:
    index = (DOCS / "README.md").read_text().partition("\n## All pages\n")[2]
    listed = LINK.findall("\n".join(re.findall(r"^\|.*", index, re.MULTILINE)))
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    evidence = {f"evidence/{page.name}" for page in DOCS.glob("evidence/*.md")}
    assert sorted(listed) == sorted(pages | evidence | {"runbooks/README.md", "decisions/README.md"})


def test_fifteen_questions_have_a_page_and_a_command_that_is_one() -> None:
    index = (DOCS / "README.md").read_text()
    table = index.partition("## Fifteen questions of a user")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in re.findall(r"^\| .*\?.*", table, re.MULTILINE)]
    # Of these test_documented_commands.py checks that each is there, and takes its flags.
    checked = {str(each) for program in PROGRAMS for each in typed(program)}
    assert len(rows) == 15
    for question, page, command in rows:
        [link], [code] = LINK.findall(page), re.findall(r"`([^`]+)`", command)
        assert question.strip().endswith("?")
        assert (DOCS / link).is_file()
        assert code.replace("UNIT", PLACES["UNIT"]).replace("NAME", PLACES["NAME"]) in checked


def test_the_rooms_are_described_in_their_order_and_every_file_that_is_named_is_there() -> None:
    page = (DOCS / "architecture.md").read_text()
    table = page[page.index("## Rooms") :].partition("\n\nBeside")[0]
    rooms = [room for line in ORDER for room in line.split()]
    assert re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE) == rooms
    named = re.findall(r"`((?:router|policies|probes|proxy)/[\w/]+\.py)`", page)
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
    assert len(named) > 20


def test_every_picture_and_decision_is_shown_and_every_file_that_is_told_to_type_exists() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in DOCS.glob("images/*") if f"images/{path.name}" not in shown] == []
    listed = set(LINK.findall((DOCS / "decisions" / "README.md").read_text()))
    assert {page.name for page in DOCS.glob("decisions/0*.md")} <= listed
    told = re.findall(r"\b(?:pytest(?: -\w)*|loadtests\.drill) ([\w/.-]+\.\w+)", shown)
    assert [path for path in told if not (ROOT / path).exists()] == []


def test_the_configuration_of_the_readme_is_good(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "cellgate.yaml").write_text(text)
    settings = load(str(tmp_path / "cellgate.yaml"), Overrides(), {})
    assert [unit.name for unit in settings.fleet.units] == ["a1", "a2"]
    assert len(text.splitlines()) < 40


def test_blocks_of_yaml_are_yaml_and_say_something() -> None:
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            assert yaml.safe_load(block), page


def test_the_page_of_logs_has_all_fields_and_no_others() -> None:
    page = (DOCS / "logs.md").read_text()
    operators, access = (
        re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) for part in page.split("## The access log")
    )
    # logs/test_log.py has what a line of the operator's log is.
    assert operators == ["time", "level", "message", "exception"]
    assert access == list(orjson.loads(json_line(0.0, DONE)))


def test_the_page_of_probes_has_all_of_them_and_all_engines() -> None:
    tables = (DOCS / "probes.md").read_text().split("\n## Of a node")
    first = [re.findall(r"^\| `(\w+)`", part, re.MULTILINE) for part in tables]
    assert first == [[*PROBES, "known_answer", *ENGINES], [*NODE_PROBES, *MORE_NODE_PROBES]]


def test_the_pages_are_a_site_of_which_no_link_leads_nowhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", "docs/site/mkdocs.yml"]
    command += ["--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "deploy.html").read_text()
    for link in re.findall(r'href="(files/[^"]+)"', page):
        assert (tmp_path / link).is_file(), link
    assert (tmp_path / "images" / "status-page.png").is_file()


# The page of the API has every path, header line and error code, and no others.

API = (DOCS / "api.md").read_text()
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
    text = API.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
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
    assert told >= {*names.sessions, names.tenant, names.priority, "x-slo-ttft-ms", "x-request-id", *fields}
    answers = {code for row in rows("Header lines of answers") for code in codes(row[0])}
    assert REASON_FIELD.decode() in answers
