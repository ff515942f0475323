"""Units from a watched YAML file: `units: [...]`, each with the keys that a unit of the configuration has.

A file that cannot be read as a whole changes nothing; it is read again whenever its bytes have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ValidationError

from proxy import config_yaml
from proxy.config_errors import dotted, explained
from proxy.config_units import Keys, NodeKeys, ProbeKeys, UnitKeys, unit_of
from proxy.config_yaml import Problem
from proxy.discovery.base import Found, LostError
from router.nouns import Unit

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


@dataclass(frozen=True, slots=True)
class FileSource:
    """Looks at the file every `period_s`. Units get the cell of `like`, and its API key if they name none."""

    kind: ClassVar[str] = "file"
    gone_is_dead: ClassVar[bool] = False

    like: Unit
    path: str
    period_s: float = 1.0

    @property
    def title(self) -> str:
        """The file."""
        return f"file {self.path}"

    async def follow(self) -> AsyncGenerator[Found, None]:
        """What is in the file, each time that it has changed."""
        before: bytes | None = None
        while True:
            data = await asyncio.to_thread(self._bytes)
            if data != before:
                yield Found(units=await asyncio.to_thread(self._units, data))
                before = data
            await asyncio.sleep(self.period_s)

    def _bytes(self) -> bytes:
        # Not its time: files of a ConfigMap are links that change, and a copy may keep the old time.
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise LostError(f"{self.path} cannot be read: {error.strerror}") from None

    def _units(self, data: bytes) -> tuple[Unit, ...]:
        try:
            found, problems = config_yaml.parse(self.path, data, "units")
            keys = UnitsKeys.model_validate(found)
        except config_yaml.UnreadableError as error:
            raise LostError(str(error)) from None
        except ValidationError as error:
            problems = [explained(detail, SCHEMA) for detail in error.errors(include_url=False)]
        else:
            problems += _repeated_names(keys)
        if problems:
            shown = "; ".join(f"{dotted(place)}: {text}" for place, text in problems[:PROBLEMS_SHOWN])
            more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
            raise LostError(f"{self.path}: {shown}{more}")
        return tuple(unit_of(self.like.cell, unit, self.like.api_key) for unit in keys.units)


def _repeated_names(keys: UnitsKeys) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, unit in enumerate(keys.units):
        if unit.name in seen:
            yield ("units", index, "name"), f"expected a name of its own, found {unit.name!r} a second time"
        seen.add(unit.name)
