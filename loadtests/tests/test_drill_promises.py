"""The checker of promises, the records behind it, and the picture."""

import math
from pathlib import Path

import pytest

from loadtests.drill import records
from loadtests.drill.answers import Answer, End
from loadtests.drill.load import user_class
from loadtests.drill.mixes import MIXES, Request
from loadtests.drill.plan import Drill, Step
from loadtests.drill.promises import PROMISES, Blow, Outcome, check
from loadtests.drill.records import Record, UnfinishedError, Writer
from loadtests.drill.run import Dealt, Run, unprovoked
from loadtests.drill.summary import Goal, Summary
from loadtests.drill.timeline import draw
from loadtests.drill.watch import Flip


def record(end: End, *, sent_at: float = 0.0, ttft_s: float | None = 0.5, gaps: int = 4) -> Record:
    first_at = None if ttft_s is None else sent_at + ttft_s
    gaps_s = [0.05] * gaps if first_at else []
    return Record("short-chat", end, "", sent_at, first_at, sent_at + 2.0, 10, len(gaps_s), gaps_s)


def outcome(*ends: Record, blows: tuple[Blow, ...] = (), flips: int = 0, continued: int = 0) -> Outcome:
    return Outcome(Summary(ends, Goal(1.0, 0.1)), blows, flips, continued, recoveries=0)


def kept(promises: dict[str, float], result: Outcome) -> dict[str, bool]:
    return {verdict.name: verdict.kept for verdict in check(promises, result)}


def blow(down_at: float | None, *, must_down: bool = True) -> Blow:
    return Blow("kill a1.leader", "a1", 10.0, 20.0, must_down, down_at)


def test_counts_are_bounds_from_above() -> None:
    result = outcome(record(End.WHOLE), record(End.LOST), record(End.ERROR_EVENT), record(End.ERROR_EVENT))
    promises = {"lost": 0.0, "hung": 0.0, "wrong": 0.0, "repeated": 0.0, "error_events": 2.0}
    assert kept(promises, result) == {name: name != "lost" for name in promises}


def test_shares_and_requests_are_bounds_from_below() -> None:
    result = outcome(*[record(End.WHOLE)] * 3, record(End.WHOLE, ttft_s=1.5))
    assert kept({"requests": 4, "goodput_share": 0.75}, result) == {"requests": True, "goodput_share": True}
    assert kept({"requests": 5, "goodput_share": 0.8}, result) == {"requests": False, "goodput_share": False}


def test_the_continued_share_is_of_streams_that_broke_after_a_token() -> None:
    broken = [record(End.ERROR_EVENT), record(End.LOST), record(End.LOST, ttft_s=None), record(End.WHOLE)]
    assert outcome(*broken, continued=6).continued_share() == 0.75


@pytest.mark.parametrize("promise", ["continued_share", "detection_s", "ttft_p99_s", "itl_p99_s"])
def test_a_promise_about_nothing_is_broken(promise: str) -> None:
    (verdict,) = check({promise: 1e9 if not PROMISES[promise].at_least else 0.0}, outcome())
    assert not verdict.kept
    assert "nothing to measure" in verdict.line()


def test_detection_is_the_slowest_of_those_that_had_to_be_found() -> None:
    assert outcome(blows=(blow(10.5), blow(12.0), blow(None, must_down=False))).detection_s() == 2.0
    assert outcome(blows=(blow(10.5), blow(None))).detection_s() == math.inf


def test_percentiles_are_of_streams() -> None:
    result = outcome(*[record(End.WHOLE, ttft_s=0.1)] * 98, *[record(End.WHOLE, ttft_s=0.9)] * 2)
    assert kept({"ttft_p99_s": 0.5, "itl_p99_s": 0.06}, result) == {"ttft_p99_s": False, "itl_p99_s": True}


def test_only_units_that_were_whole_flip_unprovoked() -> None:
    hurt = Dealt(Step(at_s=0, fault="kill", target="a1.leader"), at=100.0, healed_at=110.0)

    def flip(unit: str, at: float, before: str = "up") -> Flip:
        return Flip(0, unit, before, "suspect", at, "")

    own, late, other = flip("a1", 101.0), flip("a1", 200.0), flip("b1", 101.0)
    assert unprovoked([own, late, other, flip("b1", 102.0, before="suspect")], [hurt]) == [late, other]
    never_healed = Dealt(hurt.step, at=100.0)
    assert unprovoked([late], [never_healed]) == []


def test_a_rolling_restart_excuses_every_unit() -> None:
    rolled = Dealt(Step(at_s=0, fault="rolling_restart", target="units"), at=100.0, healed_at=130.0)
    assert unprovoked([Flip(0, "a1", "up", "down", 120.0, "")], [rolled]) == []


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r.jsonl")
    writer.begin()
    answer = Answer(Request("short-chat", " Why?", 1, 4), sent_at=1.0, status=503, ended_at=2.0)
    writer.write(Record.of(answer))
    writer.close()
    (read,) = records.read(tmp_path / "r.jsonl")
    assert read == Record.of(answer)
    assert read.end is End.LOST


def test_a_request_that_was_begun_and_has_no_record_is_noticed(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r.jsonl")
    writer.begin()
    writer.close()
    with pytest.raises(UnfinishedError, match="1 requests were begun, 0 have ended"):
        records.read(tmp_path / "r.jsonl")


@pytest.mark.parametrize("content", [None, b"", b'{"mix": "rag"}\n'])
def test_a_load_that_ended_before_its_time_is_noticed(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(UnfinishedError, match="before its time"):
        records.read(tmp_path / "r.jsonl")


def test_every_mix_has_its_class_of_users() -> None:
    text = (Path(__file__).parents[2] / "loadtests" / "locustfile.py").read_text()
    for mix in MIXES:
        assert f"class {user_class(mix)}(MixUser)" in text
        assert f'"{mix}"' in text


def test_the_picture_is_drawn_even_of_the_worst_run(tmp_path: Path) -> None:
    drill = Drill.model_validate(
        {"name": "d", "load": {"mix": {"rag": 1}, "streams": 1, "seconds": 20}, "promises": {"lost": 0}}
    )
    result = outcome(record(End.WHOLE), record(End.LOST, ttft_s=None), blows=(blow(None),))
    flips = [Flip(0, "a1", "up", "down", 12.0, "")]
    run = Run(drill, 0.0, result, flips, list(check(drill.promises, result)))
    draw(run, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
