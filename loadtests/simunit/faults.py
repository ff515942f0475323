"""The faults that a command can cause, as data: what is wrong with the unit, and how a command changes that.

Faults add up until `heal` ends them all. What each one does is decided where it hurts: `unit.py`, `api.py`,
`collective.py`, `key_check.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from loadtests.simunit.nonsense import KINDS


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with the unit. The defaults are a healthy one."""

    spinning_rank: int | None = None
    link_dropped: bool = False
    engine_frozen: bool = False
    slow_factor: float = 1.0
    slow_rank: int | None = None
    slow_rank_factor: float = 1.0
    error_rate: float = 0.0
    error_status: int = 500
    stall_after_tokens: int | None = None
    in_stream_error_after_tokens: int | None = None
    refusing: bool = False
    max_waiting: int | None = None
    full_status: int = 503
    talking_nonsense: bool = False
    late_probes_s: float = 0.0
    warm_up_s: float = 0.0
    answers: str = ""
    answers_share: float = 1.0
    answers_spare_canaries: int = 0
    lacks_status: int = 0
    health_down: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a command: its field, what it is when left out, and its bounds, or its words."""

    field: str
    default: int | float | str
    least: float = 0
    most: float = 1e6
    words: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """What a fault's name sets: fields to True, and fields to the command's parameters."""

    switches: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


COMMANDS: Mapping[str, Command] = {
    "spin": Command(parameters={"rank": Parameter("spinning_rank", 1, least=1)}),
    "drop_link": Command(switches=("link_dropped",)),
    "freeze_engine": Command(switches=("engine_frozen",)),
    "slow": Command(parameters={"factor": Parameter("slow_factor", 3.0)}),
    "slow_rank": Command(
        parameters={
            "rank": Parameter("slow_rank", 1, least=1),
            "factor": Parameter("slow_rank_factor", 2.0),
        }
    ),
    "error_rate": Command(
        parameters={
            "rate": Parameter("error_rate", 0.5, most=1),
            "status": Parameter("error_status", 500, least=400, most=599),
        }
    ),
    "stall_after": Command(parameters={"tokens": Parameter("stall_after_tokens", 8)}),
    "in_stream_error": Command(
        parameters={"after_tokens": Parameter("in_stream_error_after_tokens", 4, least=1)}
    ),
    "refuse": Command(switches=("refusing",)),
    "sick_health": Command(switches=("health_down",)),
    "full_queue": Command(
        parameters={
            "waiting": Parameter("max_waiting", 8),
            "status": Parameter("full_status", 503, least=400, most=599),
        }
    ),
    "nonsense": Command(switches=("talking_nonsense",)),
    "late_probes": Command(parameters={"seconds": Parameter("late_probes_s", 5.0)}),
    "warm_up": Command(parameters={"seconds": Parameter("warm_up_s", 5.0)}),
    "answers": Command(
        parameters={
            "kind": Parameter("answers", "status_400", words=KINDS),
            "share": Parameter("answers_share", 1.0, most=1),
            "spare_canaries": Parameter("answers_spare_canaries", 0, most=1),
        }
    ),
    "lacks": Command(parameters={"status": Parameter("lacks_status", 400, least=400, most=499)}),
}
"""Every fault by the name that `POST /sim/fault` knows it by; `heal` is the way back."""


def apply_command(faults: Faults, command: object) -> Faults:
    """Return `faults` after a command such as {"fault": "slow", "factor": 2}. Raises ValueError."""
    if not isinstance(command, dict) or not isinstance(command.get("fault"), str):
        raise ValueError('expected a JSON object with "fault" and its parameters')
    given = dict(command)
    name = given.pop("fault")
    if name == "heal":
        return Faults()
    if name not in COMMANDS:
        raise ValueError(f"unknown fault {name!r}; known are heal, {', '.join(COMMANDS)}")
    parameters = COMMANDS[name].parameters
    if unknown := sorted(given.keys() - parameters.keys()):
        raise ValueError(
            f"{name} does not take {unknown[0]!r}; it takes {', '.join(parameters) or 'nothing'}"
        )
    changes: dict[str, object] = dict.fromkeys(COMMANDS[name].switches, True)
    for key, parameter in parameters.items():
        changes[parameter.field] = _checked(f"{name}.{key}", given.get(key, parameter.default), parameter)
    return replace(faults, **changes)  # type: ignore[arg-type]  # The table's test proves names and types.


def _checked(where: str, value: object, parameter: Parameter) -> int | float | str:
    if isinstance(parameter.default, str):
        if not isinstance(value, str) or value not in parameter.words:
            raise ValueError(f"{where} must be one of {', '.join(parameter.words)}, not {value!r}")
        return value
    wanted = int if isinstance(parameter.default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ValueError(f"{where} must be a number like {parameter.default}, not {value!r}")
    if not parameter.least <= value <= parameter.most:
        raise ValueError(f"{where} must be between {parameter.least:g} and {parameter.most:g}, not {value!r}")
    return value
