"""Units of Redis: a source in a configuration that comes from another process, and what its feed hands on."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides
from cellgate.proxy.config.settings import RedisSource
from cellgate.proxy.discovery.base import Feed, Found


def test_it_comes_through_a_pickle_and_works(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("discovery: redis\nredis: redis://127.0.0.1:6379\n")
    settings = load(str(file), Overrides(), {})
    (source,) = pickle.loads(pickle.dumps(settings)).sources
    assert isinstance(source, RedisSource)
    # A configuration that is read again names the source that there is.
    assert source == settings.sources[0]

    async def follow() -> Found:
        feed = Feed()
        feed.put(found)
        async for one in feed.follow():
            return one
        raise AssertionError("it ended")

    found = Found()
    assert asyncio.run(follow()) is found
