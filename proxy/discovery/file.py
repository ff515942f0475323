"""Units from a watched YAML file: `units: [...]`, each with the keys that a unit of the configuration has.

A file that cannot be read as a whole changes nothing; it is read again whenever its bytes have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cellgate.proxy.discovery.base import Found, LostError
from cellgate.router.nouns import Unit


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
        from cellgate.proxy.discovery.file_units import (
            units_in,  # Late, for a gate without such a file does without.
        )

        return units_in(self.path, data, self.like)
