"""Drill files: what is wrong with one is said before anything is started."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.drill.plan import Drill
from loadtests.drill.reader import DrillFileError, read

DRILLS = Path(__file__).parents[2] / "loadtests" / "drills"
GOOD: dict[str, Any] = {
    "name": "small",
    "topology": {"cells": 2, "units": 2},
    "load": {"mix": {"short-chat": 1}, "streams": 4, "seconds": 60},
    "faults": [{"at_s": 5, "fault": "kill", "target": "a1.leader", "heal_after_s": 5}],
    "promises": {"lost": 0},
}


def drill(tmp_path: Path, **changes: object) -> Drill:
    file = tmp_path / "drill.yaml"
    file.write_text(yaml.safe_dump(GOOD | changes))
    return read(file)


def problems(tmp_path: Path, **changes: object) -> list[str]:
    with pytest.raises(DrillFileError) as caught:
        drill(tmp_path, **changes)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]


def step(**changes: object) -> list[dict[str, object]]:
    return [{"at_s": 5, "fault": "kill", "target": "a1.leader"} | changes]


@pytest.mark.parametrize("file", sorted(DRILLS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_drill_of_the_project_can_be_read(file: Path) -> None:
    assert read(file).name == file.stem


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"faults": step(fault="freez")}, "faults[0].fault: unknown 'freez'; did you mean 'freeze'?"),
        (
            {"faults": step(target="a3.leader")},
            "faults[0].target: unknown 'a3.leader'; did you mean 'b2.leader'?",
        ),
        ({"promises": {"losst": 0}}, "promises.losst: unknown 'losst'; did you mean 'lost'?"),
        (
            {"faults": step(fault="slow", factr=2)},
            "faults[0].factr: unknown 'factr'; did you mean 'factor'?",
        ),
        ({"topology": {"unit": 2}}, "topology.unit: unknown 'unit'; did you mean 'units'?"),
        (
            {"topology": {"timing": {"stepms": 5}}},
            "topology.timing.stepms: unknown 'stepms'; did you mean 'step_ms'?",
        ),
        ({"topology": {"router": "haproxi"}}, "topology.router: unknown 'haproxi'; did you mean 'haproxy'?"),
        (
            {"load": GOOD["load"] | {"mix": {"short-chats": 1}}},
            "load.mix.short-chats: unknown 'short-chats'; did you mean 'short-chat'?",
        ),
        ({"load": GOOD["load"] | {"stream": 4}}, "load.stream: unknown 'stream'; did you mean 'streams'?"),
        ({"promisses": {}}, "promisses: unknown 'promisses'; did you mean 'promises'?"),
    ],
)
def test_an_unknown_name_is_told_with_its_key_and_a_near_miss(
    tmp_path: Path, changes: dict[str, object], line: str
) -> None:
    (found,) = problems(tmp_path, **changes)
    # Which of several units is nearest is not promised.
    assert found.partition("; ")[0] == f"drill.yaml: {line}".partition("; ")[0]
    assert "did you mean" in found


def test_a_target_that_the_fault_cannot_befall_is_refused(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, faults=step(fault="spin", target="a1.leader"))
    assert line.startswith("drill.yaml: faults[0].target: unknown 'a1.leader'; did you mean 'a1.follower-1'")


def test_a_real_unit_cannot_be_asked_for_a_fault(tmp_path: Path) -> None:
    changes = {"topology": {"engine": "vllm"}, "faults": step(fault="slow")}
    (line,) = problems(tmp_path, **changes)
    assert "faults[0].target: unknown 'a1.leader'" in line


def test_what_a_fault_needs_must_be_there(tmp_path: Path) -> None:
    outage = {"at_s": 5, "fault": "redis_outage", "target": "redis"}
    roll = {"at_s": 5, "fault": "rolling_restart", "target": "gates"}
    assert problems(tmp_path, faults=[outage, roll]) == [
        "drill.yaml: faults[0].target: there is no Redis; say topology.redis: true",
        "drill.yaml: faults[1].target: one gate cannot roll; say topology.gates: 2",
    ]


def test_a_value_of_the_wrong_kind_is_shown(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, load=GOOD["load"] | {"streams": 0})
    assert line.startswith("drill.yaml: load.streams: ")
    assert line.endswith("found 0")


@pytest.mark.parametrize("text", ["a: [", "- 1", ""])
def test_what_is_no_drill_at_all_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "drill.yaml"
    file.write_text(text)
    with pytest.raises(DrillFileError) as caught:
        read(file)
    (line,) = caught.value.problems
    assert line.startswith(f"{file}: ")
    assert "\n" not in line


def test_a_plan_starts_anew_until_the_time_is_over(tmp_path: Path) -> None:
    plan = drill(tmp_path, repeat_s=25).steps()
    assert [each.at_s for each in plan] == [5, 30]
    assert [each.at_s for each in drill(tmp_path).steps()] == [5]
