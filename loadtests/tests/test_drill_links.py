"""Drills of units with roles: what is built, what befalls links, who is blamed."""

import math
from collections.abc import Mapping
from pathlib import Path

from loadtests.drill.links import Broken, Failed, LinkWatch, Pair
from loadtests.drill.plan import Drill, Step, Topology
from loadtests.drill.promises import Splits
from loadtests.drill.run import SETTLE_S, Dealt, blamed_for_nothing, run
from loadtests.drill.watch import Blamed
from loadtests.tests.test_drill_reader import problems, step

ROLES = {"cells": 2, "units": 3, "roles": ["prefill", "both", "decode"]}


def test_units_pair_within_their_cell() -> None:
    topology = Topology.model_validate(ROLES)
    assert topology.unit_roles()["b2"] == "both"
    assert [f"{p}-{d}" for p, d in topology.pairs()] == ["a1-a2", "a1-a3", "a2-a3", "b1-b2", "b1-b3", "b2-b3"]
    assert Topology().pairs() == []


def test_each_unit_of_a_cell_has_a_role_or_none(tmp_path: Path) -> None:
    assert problems(tmp_path, topology={"units": 2, "roles": ["prefill"]}) == [
        "drill.yaml: topology.roles: 1 for 2 units of a cell"
    ]


def test_a_link_must_be_one(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, topology=ROLES, faults=step(fault="cut_link", target="a3-a1.link"))
    assert "unknown 'a3-a1.link'" in line


class Decoder:
    """Tells of one failure, then is gone."""

    name = "d"

    def __init__(self) -> None:
        self.is_gone = False

    def failures(self) -> Mapping[str, list[tuple[float, float]]]:
        if self.is_gone:
            raise ConnectionRefusedError
        return {"p": [(1.0, 2.0)]}


def test_what_a_unit_said_before_it_was_killed_is_kept() -> None:
    unit = Decoder()
    watch = LinkWatch([unit])
    watch.look()
    unit.is_gone = True
    watch.look()
    assert watch.failures() == {Pair("p", "d"): [Failed(1.0, 2.0)]}


def test_a_broken_link_is_avoided_from_its_first_failure_on() -> None:
    before, on_its_way, try_again = Failed(9.0, 9.5), Failed(11.0, 13.0), Failed(18.0, 18.1)
    found = Broken.found("cut", 10.0, 30.0, [before, Failed(10.5, 10.6), on_its_way, try_again])
    assert math.isclose(found.avoided_s, 0.4)
    assert "failed 0.60 s later, avoided 0.40 s after that" in found.line()


def test_a_broken_link_that_nobody_used_shows_nothing() -> None:
    unused = Broken.found("cut", 10.0, 30.0, [])
    used = Broken.found("cut", 10.0, 30.0, [Failed(10.5, 10.6)])
    assert unused.line() == "cut: no transfer has failed"
    assert Splits(broken=[used]).avoided_s() == 0.0
    assert math.isnan(Splits(broken=[used, unused]).avoided_s())


def test_only_hurt_links_and_those_of_hurt_units_may_be_avoided() -> None:
    cut = Dealt(Step(at_s=0, fault="cut_link", target="a1-a3.link"), at=10.0, healed_at=20.0)
    killed = Dealt(Step(at_s=0, fault="kill", target="a2.leader"), at=50.0, healed_at=55.0)
    hurt = [Blamed(0, Pair("a1", "a3"), 12.0), Blamed(0, Pair("a2", "a4"), 52.0)]
    other = [Blamed(0, Pair("a1", "a4"), 12.0), Blamed(0, Pair("a2", "a3"), 56.0 + SETTLE_S)]
    assert blamed_for_nothing([*hurt, *other], [cut, killed]) == other


def test_a_small_drill_cuts_a_link_and_leaves_no_blocks_behind(tmp_path: Path) -> None:
    drill = Drill.model_validate(
        {
            "name": "small",
            "topology": {
                "cells": 1,
                "units": 2,
                "roles": ["prefill", "decode"],
                "timing": {"step_ms": 10, "prefill_tokens_per_s": 6000},
            },
            "load": {"mix": {"prefill-heavy": 1, "decode-heavy": 3}, "streams": 12, "seconds": 12},
            "faults": [{"at_s": 6, "fault": "cut_link", "target": "a1-a2.link", "heal_after_s": 5}],
            "promises": {
                "transferred": 1,
                "lost": 0,
                "wrong": 0,
                "flips": 0,
                "links_blamed": 0,
                "link_avoided_s": 3,
                "orphans": 0,
            },
        }
    )
    result = run(drill, tmp_path)
    assert [verdict.line() for verdict in result.verdicts if not verdict.kept] == []
