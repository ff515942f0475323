"""A drill file becomes a Drill, or a line for each thing that is wrong with it: file, key, near miss."""

import difflib
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from loadtests.drill import plan

SECTIONS: dict[tuple[str, ...], type[plan.Keys]] = {
    (): plan.Drill,
    ("topology",): plan.Topology,
    ("load",): plan.Load,
    ("load", "bursts"): plan.Bursts,
    ("load", "goal"): plan.Goal,
    ("faults",): plan.Step,
}


class DrillFileError(Exception):
    """The file cannot be used. `problems` has a line for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read(path: Path) -> plan.Drill:
    """The drill in a file. Raises DrillFileError with all that is wrong."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DrillFileError([f"{path}: cannot be read: {error}"]) from None
    except yaml.YAMLError as error:
        raise DrillFileError([f"{path}: is no YAML: {' '.join(str(error).split())}"]) from None
    try:
        drill = plan.Drill.model_validate(document)
    except ValidationError as error:
        lines = [_line(path, detail) for detail in error.errors(include_url=False)]
        raise DrillFileError(lines) from None
    if unknown := [_unknown(path, each) for each in plan.unknown_names(drill)]:
        raise DrillFileError(unknown)
    if lacking := list(_lacking(drill)):
        raise DrillFileError([f"{path}: {each}" for each in lacking])
    return drill


def _line(path: Path, detail: ErrorDetails) -> str:
    place = detail["loc"]
    if detail["type"] == "extra_forbidden":
        known = list(SECTIONS[tuple(part for part in place[:-1] if isinstance(part, str))].model_fields)
        return _unknown(path, plan.UnknownError(place, place[-1], known))
    found = "" if detail["type"] == "missing" else f", found {detail['input']!r}"
    return f"{path}: {_dotted(place)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}{found}"


def _unknown(path: Path, error: plan.UnknownError) -> str:
    near = difflib.get_close_matches(error.name, error.known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(error.known)}"
    return f"{path}: {_dotted(error.place)}: unknown {error.name!r}{hint}"


def _lacking(drill: plan.Drill) -> Iterator[str]:
    """What does not fit the rest: roles; what a fault needs and the topology does not have."""
    if drill.topology.roles and len(drill.topology.roles) != drill.topology.units:
        yield f"topology.roles: {len(drill.topology.roles)} for {drill.topology.units} units of a cell"
    for number, step in enumerate(drill.faults):
        if step.target == "redis" and not drill.topology.redis:
            yield f"faults[{number}].target: there is no Redis; say topology.redis: true"
        if step.target == "gates" and drill.topology.gates < 2:
            yield f"faults[{number}].target: one gate cannot roll; say topology.gates: 2"


def _dotted(place: tuple[str | int, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".") or "the file"
