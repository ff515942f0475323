"""A gate that runs out of descriptors: who comes waits, who is served is served on, and one line says so."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, Stream, eventually, metrics

ALLOWED = 80
CLIENTS = 60
LONG = 100
"""Tokens: half a second."""


@pytest.fixture(scope="module")
def unit() -> Iterator[SimUnit]:
    (started,) = SimUnit.start_all(["a"], followers=0, step_ms=5)
    yield started
    started.stop()


@contextmanager
def allowed(most: int) -> Iterator[None]:
    """What is started inside may have so many descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("workers", [1, 2])
def test_out_of_descriptors_accepting_pauses_and_everyone_is_answered(
    workers: int, unit: SimUnit, tmp_path: Path
) -> None:
    gate = GateProcess(tmp_path, {"a": unit.url}, workers=workers)
    with allowed(ALLOWED):
        gate.__enter__()
    try:
        gate.until_up("a")
        clients = CLIENTS * workers
        with ThreadPoolExecutor(clients) as crowd:
            answers = [crowd.submit(lambda: Stream(gate, LONG).is_whole()) for _ in range(clients)]
            assert eventually(lambda: "so nobody is accepted" in gate.log), gate.log
            assert eventually(lambda: all(answer.done() for answer in answers))
        assert all(answer.result() for answer in answers)
        assert "cellgate_own_troubles_total 0.0" not in metrics(gate)
        # Workers that run short at about the same time are told of once.
        assert gate.log.count("nobody is accepted") == 1
        assert "room for some" in gate.log
        assert "Traceback" not in gate.log
        assert Stream(gate, 2).is_whole()
    finally:
        gate.__exit__(None, None, None)
