"""The schema of a file of units, and its units. Only gates that follow one import this."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from cellgate.proxy.config import yaml_file
from cellgate.proxy.config.load import dotted, explained
from cellgate.proxy.config.units import Keys, NodeKeys, ProbeKeys, UnitKeys, unit_of
from cellgate.proxy.config.yaml_file import Problem
from cellgate.proxy.discovery.base import SourceError
from cellgate.router.nouns import Unit

PROBLEMS_SHOWN = 3


class UnitsKeys(Keys):
    """The file."""

    units: list[UnitKeys]


SCHEMA: dict[str, type[Keys]] = {
    "": UnitsKeys,
    "units[]": UnitKeys,
    "units[].nodes[]": NodeKeys,
    "units[].nodes[].probes[]": ProbeKeys,
}


def units_in(path: str, data: bytes, like: Unit) -> tuple[Unit, ...]:
    """The units of the file at `path`. Raises SourceError."""
    try:
        found, problems = yaml_file.parse(path, data, "units")
        keys = UnitsKeys.model_validate(found)
    except yaml_file.UnreadableError as error:
        raise SourceError("; ".join(error.problems)) from None
    except ValidationError as error:
        problems = [explained(detail, SCHEMA) for detail in error.errors(include_url=False)]
    else:
        problems += _repeated_names(keys)
    if problems:
        shown = "; ".join(f"{dotted(key_path)}: {text}" for key_path, text in problems[:PROBLEMS_SHOWN])
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        raise SourceError(f"{path}: {shown}{more}")
    return tuple(unit_of(like.cell, unit, like.api_key) for unit in keys.units)


def _repeated_names(keys: UnitsKeys) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, unit in enumerate(keys.units):
        if unit.name in seen:
            yield ("units", index, "name"), f"duplicate name {unit.name!r}"
        seen.add(unit.name)
