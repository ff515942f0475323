"""Units from a watched YAML file: `units: [...]`, each with the keys that a unit of the configuration has.

A file that cannot be read as a whole changes nothing; it is read again whenever its bytes have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from cellgate.proxy.config.sources import FileSource
from cellgate.proxy.discovery.base import Found, SourceError
from cellgate.router.nouns import Unit


async def follow(source: FileSource) -> AsyncGenerator[Found, None]:
    """The units of the file, each time it has changed."""
    before: bytes | None = None
    while True:
        data = await asyncio.to_thread(_bytes, source.path)
        if data != before:
            yield Found(units=await asyncio.to_thread(_units, source, data))
            before = data
        await asyncio.sleep(source.period_s)


def _bytes(path: str) -> bytes:
    # Not by its time: files of a ConfigMap are links that change, and a copy may keep the old time.
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None


def _units(source: FileSource, data: bytes) -> tuple[Unit, ...]:
    # Imported late, because most gates have no such file.
    from cellgate.proxy.discovery.file_units import units_in

    return units_in(source.path, data, source.like)
