"""Fault commands, and requests that a simulated unit refuses."""

import dataclasses

import pytest

from loadtests.simunit.faults import COMMANDS, Faults, apply_command


@pytest.mark.parametrize("name", COMMANDS)
def test_each_fault_sets_fields_of_their_own_type_and_heals(name: str) -> None:
    hurt = apply_command(Faults(), {"fault": name})
    assert hurt != Faults()
    for field in dataclasses.fields(Faults):
        assert isinstance(getattr(hurt, field.name), field.type)  # type: ignore[arg-type]
    assert apply_command(hurt, {"fault": "heal"}) == Faults()


def test_faults_add_up_and_take_parameters() -> None:
    slow = apply_command(Faults(), {"fault": "slow", "factor": 2})
    both = apply_command(slow, {"fault": "error_rate", "rate": 0.25, "status": 429})
    assert both == Faults(slow_factor=2, error_rate=0.25, error_status=429)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "JSON object"),
        ({"fault": 3}, "JSON object"),
        ({"fault": "melt"}, "unknown fault 'melt'; known are heal, spin"),
        ({"fault": "slow", "speed": 2}, "slow does not take 'speed'; it takes factor"),
        ({"fault": "refuse", "seconds": 2}, "refuse does not take 'seconds'; it takes nothing"),
        ({"fault": "slow", "factor": "2"}, "slow.factor must be a number"),
        ({"fault": "slow", "factor": True}, "slow.factor must be a number"),
        ({"fault": "spin", "rank": 1.5}, "spin.rank must be a number like 1"),
        ({"fault": "error_rate", "rate": 1.5}, "error_rate.rate must be between 0 and 1"),
        ({"fault": "answers", "kind": "melt"}, "answers.kind must be one of status_400, "),
        ({"fault": "slow", "factor": float("nan")}, "slow.factor must be between"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_by_name(command: object, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace(".", r"\.")):
        apply_command(Faults(), command)
