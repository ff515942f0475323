"""Units from sources: a watched file, and Redis."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from cellgate.probes.nodes import TcpProbe
from cellgate.proxy.config.load import load
from cellgate.proxy.config.load_process import Overrides
from cellgate.proxy.config.sources import FileSource, RedisSource
from cellgate.proxy.discovery.base import Feed, Found, SourceError
from cellgate.proxy.discovery.sources import follow_file
from cellgate.router.nouns import Unit
from tests.extras import needs

LIKE = Unit(name="", cell="c", url="", api_key="key")
ONE = "units:\n- {name: a, url: http://a:1}\n"


def source(path: Path) -> FileSource:
    return FileSource(LIKE, str(path), period_s=0.01)


async def told(follow: AsyncGenerator[Found, None]) -> Found:
    async with asyncio.timeout(5.0):
        return await anext(follow)


def read(path: Path) -> Found:
    async def main() -> Found:
        async with aclosing(follow_file(source(path))) as follow:
            return await told(follow)

    return asyncio.run(main())


def test_units_of_a_file_have_the_keys_that_units_of_the_configuration_have(tmp_path: Path) -> None:
    path = tmp_path / "units.yaml"
    path.write_text(
        """
units:
- name: a
  url: http://a:1
  weight: 2
  max_in_flight: 8
  engine: vllm
  nodes:
  - {name: a-0, role: leader, agent: "a:9902"}
  - {name: a-1, role: follower, probes: [{probe: tcp, address: "b:22"}]}
"""
    )
    (unit,) = read(path).units
    assert (unit.name, unit.cell, unit.url, unit.weight) == ("a", "c", "http://a:1", 2.0)
    assert (unit.max_in_flight, unit.engine, unit.api_key) == (8, "vllm", "key")
    assert unit.nodes[0].agent == "a:9902"
    assert unit.nodes[1].probes == (TcpProbe("b:22"),)


async def test_a_change_of_the_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "units.yaml"
    path.write_text(ONE)
    async with aclosing(follow_file(source(path))) as follow:
        assert [unit.name for unit in (await told(follow)).units] == ["a"]
        path.write_text(ONE + "- {name: b, url: http://b:1}\n")
        assert [unit.name for unit in (await told(follow)).units] == ["a", "b"]
        path.write_text("units: []\n")
        assert (await told(follow)).units == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("units: [", ":1:9: expected YAML"),
        ("", "expected a mapping such as 'units: [...]', found an empty file"),
        ("cells: []\n", "cells: unknown key; "),
        ("units:\n- {nam: a, url: 'http://a:1'}\n", "units[0].nam: unknown key; did you"),
        ("units:\n- {name: a, url: 'http://a:1/v1'}\n", "units[0].url of unit a: expected http://HOST:PORT"),
        (ONE + "- {name: a, url: http://b:1}\n", "units[1].name: duplicate name 'a'"),
        ("units:\n- {name: a, name: b, url: http://b:1}\n", "units[0].name: duplicate key, again in line 2"),
        ("units:\n" + "- {name: a}\n" * 5, "; and 2 more"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_wrong_is_a_loss_that_says_where(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "units.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SourceError) as lost:
        read(path)
    assert says in str(lost.value)
    assert str(path) in str(lost.value)


# Units of Redis: a source in a configuration that comes from another process, and what its feed hands on.


@needs("redis")
async def test_it_comes_through_a_pickle_and_works(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("discovery: redis\nredis: redis://127.0.0.1:6379\n")
    settings = load(str(file), Overrides(), {})
    (source,) = pickle.loads(pickle.dumps(settings)).sources
    assert isinstance(source, RedisSource)
    # A configuration that is read again names the source that there is.
    assert source == settings.sources[0]
    feed, there = Feed(), Found()
    feed.put(there)
    async with aclosing(feed.follow()) as follow:
        assert await told(follow) is there
