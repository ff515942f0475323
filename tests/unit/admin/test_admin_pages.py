"""What a person is told of a unit and the gate: pages, their standing, and what the health process says."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import product

import pytest

from cellgate.proxy.admin.health_process import (
    SIZE,
    HealthRequest,
    PublishedStatus,
    SharedStatus,
    parse_health_request,
)
from cellgate.proxy.admin.pages import load_page
from cellgate.proxy.admin.views import Moment, explain, unit_page
from cellgate.proxy.ingress.reasons import Rotation, rotation_of
from cellgate.router.board import Board
from cellgate.router.health import hear
from cellgate.router.judge import open_case
from cellgate.router.nouns import (
    Ask,
    Cell,
    EnginePause,
    Evidence,
    Fleet,
    HoldKind,
    Node,
    Role,
    Rules,
    Sign,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.outliers import Outlier
from cellgate.router.pick import Bounds, find_candidates
from cellgate.router.unit_state import UnitState

NODES = (Node("a1-0", Role.LEADER), Node("a1-1", Role.FOLLOWER))
UNIT = Unit("a1", "a", "http://10.0.0.1:8000", max_in_flight=2, nodes=NODES)
PASSED = Evidence("a1", Sign.GOOD, Strength.STRONG, "canary", "one token by chat", 100.0)
FAILED = Evidence("a1", Sign.BAD, Strength.STRONG, "canary", "no token within 1.25 s", 200.0)
REFUSED = Evidence("a1", Sign.BAD, Strength.FATAL, "request", "connection refused", 200.0)
GONE = Evidence("a1", Sign.BAD, Strength.FATAL, "agent", "process 33 is gone", 200.0, node="a1-1")
STREAM = Ask("tiny", stream=True)


def board(*evidence: Evidence, rules: Rules | None = None) -> Board:
    """The Board after some evidence about its only unit."""
    made = Board(rules or Rules())
    made.configure(Fleet((Cell("a"),), (UNIT,)), 90.0)
    for piece in evidence:
        made.observe(piece)
    return made


def up() -> UnitState:
    """A unit that has been UP for long."""
    state = board(PASSED).units["a1"]
    state.answered_at = 209.9
    return state


def told(
    state: UnitState, now: float = 210.0, canary_s: float | None = 0.8, panic_at: float | None = None
) -> str:
    """All that is told, as one text."""
    return "\n".join(explain(state, Moment(now, Rules(), panic_at, canary_s)))


def test_a_unit_that_works_is_in_rotation_with_its_last_proof() -> None:
    assert explain(up(), Moment(210.0, Rules(), canary_s=0.8)) == [
        "a1 is in rotation, for 1m 50s.",
        "Because: one token by chat (canary, 1m 50s ago).",
        "0 of 2 requests are in flight.",
        "Last good evidence: canary (1m 50s ago).",
        "Next: a canary (a request for one token) within 0.8 s, unless the unit shows work before that.",
        "You can take it out of rotation (cellgate drain a1); requests in flight finish.",
    ]


OLD = Evidence("a1", Sign.BAD, Strength.STRONG, "request", "the connection broke", 99.0)
READ = Evidence("a1", Sign.NEUTRAL, Strength.WEAK, "engine_metrics", "started at 5", 101.0, epoch="5")
READ_AGAIN = replace(READ, reason="started at 6", at=200.0, epoch="6")
LATE = Evidence("a1", Sign.BAD, Strength.WEAK, "readiness", "GET /health: timeout", 205.0)
OPEN = Evidence("a1", Sign.NEUTRAL, Strength.WEAK, "agent", "not a cellgate agent", 206.0, node="a1-1")
SERVES = Evidence("a1", Sign.GOOD, Strength.WEAK, "readiness", "GET /health: HTTP 200", 90.5)
WELL = Evidence("a1", Sign.GOOD, Strength.WEAK, "agent", "3 processes", 207.0, node="a1-0")


@pytest.mark.parametrize(
    ("evidence", "now", "words"),
    [
        (
            [],
            91.0,
            "a1 is starting, for 1.0 s: no probe has answered yet.…It must pass; then it gets requests, "
            "one at a time or 10% of its share at first, all after 10 s.",
        ),
        ([SERVES], 91.0, "a1 is starting, for 1.0 s: no token yet; GET /health: HTTP 200"),
        ([PASSED], 104.0, "a1 is in…Slow start: it gets 40% of its share now, all of it in 6.0 s."),
        (
            [PASSED, FAILED],
            200.4,
            "a1 is suspect, for 0.4 s: no token within 1.25 s (canary, 0.4 s ago).…If it passes",
        ),
        (
            [PASSED, REFUSED],
            210.0,
            "a1 is down, for 10.0 s: connection refused (requests of clients, 10.0 s ago).…within 0.8 s. 2 "
            "must pass in a row; then it…You can make sure that its engine runs and listens at http://10.0.0.1:8000",
        ),
        (
            [PASSED, REFUSED, replace(PASSED, at=209.0)],
            210.0,
            "a1 is still out of rotation: it was down, and has answered again for 1.0 s.…1 of 2 have passed",
        ),
        (
            [PASSED, GONE],
            210.0,
            "a1 is down, for 10.0 s: process 33 is gone (agent of node a1-1, 10.0 s ago).…"
            "Next: it stays out until agent of node a1-1 reports no fault; then…"
            "You can check node a1-1: let a process that is stopped go on",
        ),
        (
            [PASSED, GONE, replace(GONE, node="a1-0", reason="process 7 is stopped", at=201.0)],
            210.0,
            "a1 is down…Open fault: agent of node a1-0: process 7 is stopped.…"
            "until agent of node a1-0 and agent of node a1-1 reports",
        ),
        (
            [PASSED, LATE, OPEN, WELL],
            210.0,
            "a1…No evidence: not a cellgate agent (agent of node a1-1, 4.0 s ago).…"
            "Also bad: GET /health: timeout (readiness, 5.0 s ago).…"
            "Last good evidence: agent of node a1-0 (for 3.0 s), canary (1m 50s ago).",
        ),
        ([PASSED, replace(OLD, at=101.0)], 210.0, "a1…the connection broke"),
        ([PASSED, READ, READ_AGAIN], 210.0, "a1…started at 6 (engine_metrics, 10.0 s ago)."),
    ],
)
def test_evidence_is_told_with_what_comes_next(evidence: list[Evidence], now: float, words: str) -> None:
    """`…` stands for any words."""
    pattern = ".*".join(map(re.escape, words.split("…")))
    assert re.match(pattern, told(board(*evidence).units["a1"], now), re.DOTALL)


def test_what_has_been_answered_and_a_reading_of_the_epoch_are_no_news() -> None:
    assert "the connection broke" not in told(board(OLD, PASSED).units["a1"])
    assert "started at 5" not in told(board(PASSED, READ).units["a1"])


def test_what_keeps_requests_from_a_unit_that_is_up_is_told() -> None:
    state = up()
    state.restart_suspected_at = 209.5
    text = told(state, canary_s=0.0)
    assert text.startswith("a1 gets no requests for now: it closed a connection unexpectedly 0.5 s ago")
    assert "Next: a canary (a request for one token) is in flight." in text
    assert "the suspicion of a restart, and so do 4.5 s without another cut." in text
    state = up()
    state.answered_at = 205.0
    text = told(state, panic_at=207.0)
    assert text.startswith("a1 is kept in rotation, although it has not answered for 5.0 s")
    assert "in 27.0 s at the latest" in text
    assert "You can check the network of this gate first" in text
    state = up()
    state.outlier = Outlier(0.5)
    text = told(state)
    slow = (
        "a1 is in rotation, for 1m 50s, but slow: a token takes 2.0 times as long as on other units of its "
    )
    assert text.startswith(slow)
    assert "Its share of requests is 50% smaller, as it is slow." in text
    assert "You can compare clocks, temperatures and links" in text


def test_an_operators_will_is_told_first() -> None:
    state = board(PASSED, REFUSED).units["a1"]
    state.drained = True
    text = told(state)
    assert text.startswith(
        "a1 is out of rotation: an operator drained it. 0 of 2 requests are still in flight."
    )
    assert "Its verdict is down, for 10.0 s." in text
    assert "cellgate undrain a1" in text


def test_silence_is_told_beside_what_is_allowed_and_a_full_unit_says_what_its_bound_is() -> None:
    made = board(PASSED)
    made.open("a1", STREAM, 209.3, retry=False)
    assert "Stalled for 0.7 s; with its present work up to 1.0 s are normal." in told(made.units["a1"])
    assert "Stalled" not in told(made.units["a1"], now=209.4)
    made.open("a1", STREAM, 209.9, retry=False)
    text = told(made.units["a1"])
    assert text.startswith("a1 is in rotation, but full: 2 of 2 requests are in flight")
    assert "raise its max_in_flight" in text


@pytest.mark.parametrize(
    ("verdict", "drained", "restart_suspected", "full"), list(product(Verdict, *[(False, True)] * 3))
)
def test_whatever_is_believed_a_person_is_told_in_short_lines(
    verdict: Verdict, drained: bool, restart_suspected: bool, full: bool
) -> None:
    """Every line is one, ends, and has no hole left in it; and who may get requests is never called out."""
    made = board(PASSED)
    state = made.units["a1"]
    for _ in range(2 if full else 0):
        made.open("a1", STREAM, 209.9, retry=False)
    state.case = replace(state.case, verdict=verdict)
    state.drained, state.restart_suspected_at = drained, 205.0 if restart_suspected else -1.0
    lines = explain(state, Moment(210.0, Rules(), canary_s=0.8))
    assert all("\n" not in line and "{" not in line and line.endswith(".") for line in lines)
    assert all(len(line) < 160 for line in lines)
    assert sum(line.startswith("Next: ") for line in lines) == 1
    rows = find_candidates(made, Ask(), 210.0, (), Bounds(1.0)).rows
    rotation = rotation_of(state, 210.0, None)
    assert any(row.has_room for row in rows) is (rotation in (Rotation.IN, Rotation.SUSPECT) and not full)


def test_the_page_of_a_unit_has_each_word_at_its_node() -> None:
    made = board(PASSED, replace(GONE, epoch="boot 33"))
    made.panic_at = 201.0
    page = unit_page(made.units["a1"], made, 210.0, None)
    assert page["faults"] == [{"node": "a1-1", "source": "agent"}]
    assert page["news"] == {"canary": {"sign": "good", "reason": "one token by chat", "age_s": 110.0}}
    assert page["nodes"] == [
        {"name": "a1-0", "role": "leader", "news": {}},
        {
            "name": "a1-1",
            "role": "follower",
            "news": {"agent": {"sign": "bad", "reason": "process 33 is gone", "age_s": 10.0}},
        },
    ]
    assert page["epochs"] == {"agent a1-1": "boot 33"}
    assert (page["held_by_panic"], page["restart_suspected"], page["degraded"]) == (False, False, 0.0)
    assert (page["silent_s"], page["silent_limit_s"], page["next_canary_s"]) == (None, 1.0, None)
    assert page["why"][0].startswith("a1 is down")


def test_what_a_unit_has_refused_lately_is_told_though_it_is_in_rotation() -> None:
    state = up()
    state.refusals["images"] = "refuses what other units serve of /chat with images: 400 (5 of 5)", 200.0
    line = (
        "It refuses what other units serve of /chat with images: 400 (5 of 5), 10.0 s ago; others get these."
    )
    assert line in told(state)
    assert line not in told(state, now=900.0)


def test_a_unit_on_hold_says_so_and_what_lets_it_go_on() -> None:
    state = UnitState(Unit("u", "c", "http://u"), Cell("c"), replace(open_case(0.0), verdict=Verdict.UP))
    hear(state, EnginePause("u", HoldKind.PAUSED, 90.0))
    lines = explain(state, Moment(100.0, Rules(), canary_s=None))
    assert lines[0].startswith("u is out of rotation: its engine is paused, for 10.0 s.")
    assert "590 s at the latest" in next(line for line in lines if line.startswith("Next: "))
    assert "cellgate engine resume u" in lines[-1]
    state.drained = True
    lines = explain(state, Moment(101.0, Rules(), canary_s=None))
    assert "Besides, its engine is paused, for 11.0 s." in lines
    assert "cellgate engine resume u" in lines[-1]


# The status page as a file: nothing from elsewhere, its policy fits it, and its words can be read.

TEXT = files("cellgate.proxy.admin").joinpath("page.html").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", block))
    for block in re.findall(r":root \{(.*?)\}", TEXT, re.DOTALL)
)


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio, WCAG 2.2: 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_word_can_be_read_in_both_themes(theme: dict[str, str]) -> None:
    # 4.5 is what WCAG 2.2 AA asks of text of this size.
    colours = ["ink", "muted", "up", "suspect", "down", "starting", "probation", "drained"]
    assert [each for each in colours if contrast(theme[each], theme["card"]) < 4.5] == []


def test_the_page_asks_for_nothing_from_elsewhere_and_reads_nothing_as_html() -> None:
    assert not re.search(r"https?://|//[a-z]+\.|@import|<link(?! rel=\"icon\" href=\"data:,\")| src=", TEXT)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", TEXT)


def test_the_policy_lets_only_this_script_and_this_style_run() -> None:
    body, headers = load_page()
    policy = dict(rule.split(" ", 1) for rule in dict(headers)["Content-Security-Policy"].split("; "))
    assert body == TEXT.encode()
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["style-src"])
    assert policy["script-src"] != policy["style-src"]


# Which requests the health process answers itself.


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: g\r\n\r\n", ("livez", False, True)),
        (b"GET /readyz HTTP/1.1\r\n\r\n", ("readyz", False, True)),
        (b"HEAD /readyz?verbose=1 HTTP/1.1\r\nHost: g\r\n\r\n", ("readyz", True, True)),
        (b"GET /livez HTTP/1.0\r\n\r\n", ("livez", False, False)),
        (b"GET /livez HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", ("livez", False, True)),
        (b"GET /livez HTTP/1.1\r\nHost: g\r\nconnection: a, Close\r\nB: c\r\n\r\n", ("livez", False, False)),
        (b"GET /livez HTTP/1.1\r\nX-Connection: close\r\n\r\n", ("livez", False, True)),
    ],
)  # fmt: skip
def test_plain_questions_are_understood(head: bytes, expected: tuple[str, bool, bool]) -> None:
    assert parse_health_request(head) == HealthRequest(*expected, size=len(head))
    # What follows is not part of it.
    assert parse_health_request(head + b"GET /metrics HTTP/1.1\r\n\r\n") == HealthRequest(
        *expected, size=len(head)
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /livez HTTP/1.1\r\nHost: g\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"GET /livezz HTTP/1.1\r\n\r\n",
        b"GET /livez/ HTTP/1.1\r\n\r\n",
        b"GET http://g/livez HTTP/1.1\r\n\r\n",
        b"POST /livez HTTP/1.1\r\n\r\n",
        b"get /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/2.0\r\n\r\n",
        b"GET /livez HTTP/1.1\n\n",
        b"\r\nGET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /livez HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nexpect: 100-continue\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nUpgrade: h2c\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nName : value\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nA: \0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_all_else_is_left_to_a_whole_server(data: bytes) -> None:
    assert parse_health_request(data) is None


# What the gate says of itself, as another process reads it.


@pytest.fixture
def sides() -> Iterator[tuple[SharedStatus, SharedStatus]]:
    """The gate's and the health process's; the clock stands at 7."""
    gate = SharedStatus(clock=lambda: 7.0)
    health_process = SharedStatus(os.dup(gate.fd))
    yield gate, health_process
    health_process.close()
    gate.close()


def test_a_new_one_says_that_the_gate_is_starting(sides: tuple[SharedStatus, SharedStatus]) -> None:
    _, health_process = sides
    assert health_process.read() == PublishedStatus(
        7.0, False, b'{"ready": false, "reason": "the gate is starting"}\n'
    )


def test_the_last_whole_word_counts_shorter_or_longer_but_for_one_that_does_not_fit(
    sides: tuple[SharedStatus, SharedStatus],
) -> None:
    gate, health_process = sides
    for body in (b"x" * 1000, b"", b"whole"):
        gate.publish(True, body)
        assert health_process.read() == PublishedStatus(7.0, True, body)
    with mmap.mmap(gate.fd, SIZE) as memory:
        position = memory.find(b"whole")
        memory[position : position + 2] = b"ne"
    assert health_process.read() == PublishedStatus(7.0, True, b"whole")
    gate.publish(False, b"new")
    assert health_process.read() == PublishedStatus(7.0, False, b"new")
    gate.publish(True, b"x" * SIZE)
    assert health_process.read().ready
    assert health_process.read().body.startswith(b'{"ready": true, "reason": "too many units')
    (late := SharedStatus()).close()
    # A gate that fails at its start ends its parts while its timer still runs.
    late.publish(True, b"late")
