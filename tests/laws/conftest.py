"""Each law of transports is tried on every kind of loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.laws.transport import LOOPS, TIMEOUT_S, Law, Play, Problems


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest) -> Iterator[Play]:
    """Runs a law on one kind of loop."""
    loop = LOOPS[request.param]()
    unexpected: Problems = []
    loop.set_exception_handler(lambda _, context: unexpected.append(context))

    def run(law: Law) -> None:
        loop.run_until_complete(asyncio.wait_for(law, 2 * TIMEOUT_S))
        assert unexpected == []

    try:
        yield run
    finally:
        loop.close()
