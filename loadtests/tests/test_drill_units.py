"""Units of real engines, as faults reach them."""

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from loadtests.drill import load
from loadtests.drill.plan import Drill
from loadtests.drill.units import RealDrillUnit, start_real


class Recorded:
    """Processes that only note what becomes of them."""

    def __init__(self, *, comes_up: bool = True) -> None:
        self.deeds: list[str] = []
        self._comes_up = comes_up

    def start(self) -> None:
        self.deeds.append("start")

    def wait_ready(self) -> None:
        self.deeds.append("wait")
        if not self._comes_up:
            raise RuntimeError("it did not start")

    def pids(self) -> dict[str, int]:
        return {"leader": 1 << 30}

    def stop(self) -> None:
        self.deeds.append("stop")


def test_a_fault_of_a_node_that_a_unit_does_not_have_cannot_be_dealt() -> None:
    unit = RealDrillUnit("a1", "", Recorded())
    with pytest.raises(RuntimeError, match="a1 has no follower-1; it has leader"):
        unit.signal("follower-1", signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        unit.signal("leader", signal.SIGKILL)


def test_a_restarted_unit_takes_requests_again_before_the_fault_counts_as_undone() -> None:
    recorded = Recorded()
    RealDrillUnit("a1", "", recorded).restart()
    assert recorded.deeds == ["start", "stop", "start", "wait"]


def test_units_of_which_one_does_not_start_are_all_stopped() -> None:
    whole, broken = Recorded(), Recorded(comes_up=False)
    with pytest.raises(RuntimeError, match="it did not start"):
        start_real({"a1": ("", whole), "a2": ("", broken)})
    assert whole.deeds[-1] == broken.deeds[-1] == "stop"


@pytest.mark.parametrize(
    ("topology", "texts"),
    [({}, "known"), ({"engine": "vllm"}, "unknown"), ({"router": "dynamo"}, "unknown")],
)
def test_only_texts_of_simulated_units_are_known(
    topology: Mapping[str, str], texts: str, tmp_path: Path
) -> None:
    keys = {"name": "d", "topology": topology, "load": {"mix": {"short-chat": 1}, "streams": 1, "seconds": 1}}
    drill = Drill.model_validate(keys | {"promises": {}})
    command = load.command(drill, "http://127.0.0.1:1", tmp_path)
    assert command[command.index("--texts") + 1] == texts
