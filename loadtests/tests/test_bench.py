"""The pure parts of the benchmark: its bytes, statistics and tables, and what it refuses to be told."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest

from loadtests.bench import __main__ as bench
from loadtests.bench import engine_pages, payload, report, run_file
from loadtests.bench.figures import Figure, Point, beside, difference, of, ratio
from loadtests.bench.loads import LOADS, Requests, Streams
from loadtests.bench.targets import TARGETS
from loadtests.kit.report import columns


def figure(target: str, load: str, number: int, cpu_us: float, **rest: float) -> Figure:
    """One that is as plain as can be."""
    given = {"answers": 100, "seconds": 1.0, "engine_us": 5.0, "generator_us": 6.0, "reads_each": 1.0}
    given |= {"lag_ms": 0.1, "others": 0.0} | rest
    return Figure(target=target, load=load, round=number, cpu_us=cpu_us, **given)  # type: ignore[arg-type]


FIGURES = [
    *(figure("haproxy", "1kB", number, cpu_us) for number, cpu_us in enumerate((10.0, 20.0, 40.0))),
    *(figure("cellgate", "1kB", number, cpu_us) for number, cpu_us in enumerate((30.0, 50.0, 80.0))),
    figure("direct", "2000-streams", 0, 0.0, pace=1.0, ttft_p50_ms=200.0, ttft_p99_ms=201.0),
    figure("cellgate", "2000-streams", 0, 20.0, pace=1.0, ttft_p50_ms=200.5, ttft_p99_ms=203.0, idle_mb=90.0),
]
RUN = report.Run("a machine", "python -m loadtests.bench", FIGURES, {"nginx": "not installed"}, {}, {})


def test_a_ratio_is_that_of_the_same_round_and_the_middle_of_all_is_told() -> None:
    found = beside(FIGURES, "cellgate", "haproxy", "1kB", lambda each: each.cpu_us, ratio)
    assert found == (2.5, 2.0, 3.0)
    assert of(FIGURES, "cellgate", "1kB", lambda each: each.cpu_us) == (50.0, 30.0, 80.0)
    assert beside(FIGURES, "cellgate", "nginx", "1kB", lambda each: each.cpu_us, ratio) is None
    added = beside(FIGURES, "cellgate", "direct", "2000-streams", lambda each: each.ttft_p99_ms, difference)
    assert added == (2.0, 2.0, 2.0)
    assert ratio(1.0, 0.0) == float("inf")


def test_a_point_of_growth_is_without_what_is_taken_at_rest() -> None:
    assert Point("units", 2, 0.001, 0.1, figure("cellgate", "1kB", 0, 30.0)).net_us == pytest.approx(20.0)


def test_a_target_that_is_missing_says_so_in_each_table_and_the_rest_has_figures() -> None:
    about = dict.fromkeys(("haproxy", "nginx", "cellgate", "direct"), "as it is")
    loads = {name: LOADS[name].about for name in ("2000-streams", "1kB")}
    tables = report.tables(replace(RUN, about=about, loads=loads))
    head, *rows = tables["CPU, in microseconds"]
    assert head == ("", "haproxy", "nginx", "cellgate", "direct")
    by_title = {row[0]: row[1:] for row in rows}
    assert by_title["a request, requests of 1 kB"] == ("20.0 (10.0-40.0)", "-", "50.0 (30.0-80.0)", "-")
    assert [rows[0][2] for _, *rows in tables.values()] == ["missing"] * 4
    _, ratios = tables["Ratio: CPU of cellgate / CPU of each"]
    assert ratios == ("a request, requests of 1 kB", "2.50 (2.00-3.00)", "missing", "-", "-")
    waits = {row[0]: row[1:] for row in tables["Waits, memory, leaks"][1:]}
    assert waits["TTFT added, p99, ms; 2,000 streams"] == ("-", "-", "2.00", "-")
    assert waits["leaked: connections to units"] == ("-", "-", "0", "-")


def test_tables_are_shown_as_text_and_as_markdown() -> None:
    rows = [("", "a", "b"), ("cost", "1", "22")]
    assert columns(rows, numbers=True).splitlines() == ["      a   b", "cost  1  22"]
    assert report.as_markdown(rows).splitlines() == ["|  | a | b |", "|---|---:|---:|", "| cost | 1 | 22 |"]


def test_a_run_is_the_same_when_read_from_its_file() -> None:
    text = run_file.as_json(RUN)
    assert run_file.from_json(text) == RUN
    assert set(json.loads(text)) == {"machine", "arguments", "missing", "about", "loads", "figures"}


def test_the_page_shows_the_run_that_is_beside_it() -> None:
    page = run_file.PAGE.read_text()
    assert run_file.page_with(run_file.from_json(run_file.DATA.read_text()), page) == page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--targets", "haproxy,apache"], "no 'apache'; there are haproxy, nginx, "),
        (["--loads", "1GB"], "no '1GB'; there are 2000-streams, "),
        (["--rounds", "0"], "'0' is not a count of at least 1"),
        (["--requests", "many"], "'many' is not a count of at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_told(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_all_names_are_the_usual_ones_in_order() -> None:
    read = bench.names_of(("a", "b", "c"), ("a", "b"))
    assert read("all") == ("a", "b")
    assert read("c,a") == ("a", "c")
    with pytest.raises(ArgumentTypeError):
        read("")


@pytest.mark.parametrize("size", [1000, 200_000, 1_000_000])
def test_a_request_is_as_large_as_it_says_and_half_of_it_is_its_own(size: int) -> None:
    one, other = (str(payload.User(number, 20, size)) for number in (1, 2))
    body, others = (payload.ask(user, stream=True, tokens=7) for user in (one, other))
    assert len(body) == size
    asked, also = json.loads(body), json.loads(others)
    assert asked["stream_options"] == {"include_usage": True}
    assert asked["messages"][0] == also["messages"][0]
    assert asked["messages"][1]["content"][60:] != also["messages"][1]["content"][60:]
    assert payload.user_in(body) == one
    assert payload.User.of(one) == (0, 20, size)


def test_an_answer_that_was_written_anew_says_the_same() -> None:
    stream = payload.stream("u", 3)
    assert payload.said(stream) == " token 0 token 1 token 2"
    assert payload.said(stream.replace(b'"id":"chatcmpl-u"', b'"id":"x"')) == payload.said(stream)
    assert payload.said(payload.reply("u")) == " token 0"
    assert b'"completion_tokens":3' in stream


def test_the_engine_tokenizes_so_that_a_continuation_can_be_proven() -> None:
    def tokens(messages: list[dict[str, str]]) -> list[int]:
        body = json.dumps({"messages": messages}).encode()
        found: list[int] = json.loads(engine_pages.PAGES[b"/tokenize"](engine_pages.Counters(), body)[1])[
            "tokens"
        ]
        return found

    asked = [{"role": "user", "content": "Why?"}]
    prompt, said = tokens(asked), tokens([*asked, {"role": "assistant", "content": " because"}])
    assert said[: len(prompt)] == prompt
    body = json.dumps({"tokens": said[len(prompt) :]}).encode()
    answer = engine_pages.PAGES[b"/detokenize"](engine_pages.Counters(), body)[1]
    assert json.loads(answer) == {"prompt": " because"}


def test_loads_are_flags_of_the_generator() -> None:
    small, many = LOADS["1kB"], LOADS["2000-streams"]
    assert isinstance(small, Requests)
    assert isinstance(many, Streams)
    assert small.flags(12_000, TARGETS["litellm"].share)["count"] == 300
    assert small.flags(10, 1 / 40)["count"] == small.connections
    assert many.flags(1, 1.0)["connections"] == 2000
