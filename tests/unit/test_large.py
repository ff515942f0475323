"""Large bodies are parsed elsewhere; where that cannot be, on the loop."""

import asyncio

import pytest

from proxy import large
from proxy.ask import read_ask
from proxy.failure import Failure, Kind
from proxy.large import LargeBodies
from router.nouns import Ask


def read(body: bytes) -> Ask | Failure:
    async def run() -> Ask | Failure:
        bodies = LargeBodies()
        try:
            return await bodies.read(body)
        finally:
            bodies.close()

    return asyncio.run(run())


def test_a_body_is_read_in_another_process() -> None:
    body = b'{"model": "m", "stream": true}'
    assert read(body) == read_ask(body)


def test_what_is_wrong_with_a_body_comes_back_from_there() -> None:
    answer = read(b'{"model": 1}')
    assert isinstance(answer, Failure)
    assert (answer.kind, answer.param) == (Kind.BAD_JSON, "model")


def test_without_a_process_the_body_is_read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "no shared memory here")

    monkeypatch.setattr(large, "ProcessPoolExecutor", refuse)
    body = b'{"model": "m"}'
    assert read(body) == read_ask(body)
