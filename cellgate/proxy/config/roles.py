"""Which roles of units, and which transfer of their cell, go together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cellgate.proxy.config.schema import CellKeys
from cellgate.proxy.config.yaml_file import Problem

_ENGINES = {"nixl": "vllm", "sglang": "sglang"}


def role_misfits(cells: Sequence[CellKeys]) -> Iterator[Problem]:
    """What cannot work, with its place."""
    for number, cell in enumerate(cells):
        place = ("cells", number)
        if cell.transfer == "none":
            for index, unit in enumerate(cell.units):
                if unit.role != "both":
                    reason = f"role: {unit.role} requires a transfer of its cell, such as transfer: nixl"
                    yield (*place, "units", index, "role"), reason
            continue
        engine = _ENGINES[cell.transfer]
        for unit in cell.units:
            if unit.engine not in ("", engine):
                reason = f"transfer: {cell.transfer} requires {engine}, and unit {unit.name} is {unit.engine}"
                yield (*place, "transfer"), reason
        # What is discovered is not known yet.
        if cell.discover is None and (reason := _why_no_pair(cell)):
            yield (*place, "transfer"), reason


def _why_no_pair(cell: CellKeys) -> str:
    """Why no two units of a cell are a pair; empty: some are."""
    roles = [unit.role for unit in cell.units]
    if cell.transfer == "sglang":
        missing = " and none with role: ".join(role for role in ("prefill", "decode") if role not in roles)
        more = "transfer: sglang requires both; units with role: both get whole requests only"
        return f"cell {cell.name} has no unit with role: {missing}; {more}" if missing else ""
    if all(role == "prefill" for role in roles):
        return f"cell {cell.name} has no unit for answers: give one of its units role: decode or both"
    if len(roles) < 2 or all(role == "decode" for role in roles):
        return f"cell {cell.name} has no pair: give it a second unit, with role: prefill or both"
    return ""
