"""What the gate says of itself, as another process reads it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from cellgate.proxy.admin.health_process import SIZE, PublishedStatus, SharedStatus


@pytest.fixture
def sides() -> Iterator[tuple[SharedStatus, SharedStatus]]:
    """The gate's and the health process's; the clock stands at 7."""
    gate = SharedStatus(clock=lambda: 7.0)
    health_process = SharedStatus(os.dup(gate.fd))
    yield gate, health_process
    health_process.close()
    gate.close()


def test_a_new_one_says_that_the_gate_is_starting(sides: tuple[SharedStatus, SharedStatus]) -> None:
    _, health_process = sides
    assert health_process.read() == PublishedStatus(
        7.0, False, b'{"ready": false, "reason": "the gate is starting"}\n'
    )


def test_the_last_word_counts_shorter_or_longer(sides: tuple[SharedStatus, SharedStatus]) -> None:
    gate, health_process = sides
    for body in (b"x" * 1000, b"", b"yes"):
        gate.publish(True, body)
        assert health_process.read() == PublishedStatus(7.0, True, body)


def test_a_record_that_is_only_half_written_is_not_believed(sides: tuple[SharedStatus, SharedStatus]) -> None:
    gate, health_process = sides
    gate.publish(True, b"whole")
    assert health_process.read().body == b"whole"
    with mmap.mmap(gate.fd, SIZE) as memory:
        position = memory.find(b"whole")
        memory[position : position + 2] = b"ne"
    assert health_process.read() == PublishedStatus(7.0, True, b"whole")
    gate.publish(False, b"new")
    assert health_process.read() == PublishedStatus(7.0, False, b"new")


def test_a_body_that_does_not_fit_is_replaced_by_a_short_one(
    sides: tuple[SharedStatus, SharedStatus],
) -> None:
    gate, health_process = sides
    gate.publish(True, b"x" * SIZE)
    assert health_process.read().ready
    assert health_process.read().body.startswith(b'{"ready": true, "reason": "too many units')


def test_after_its_end_nothing_is_published() -> None:
    """A gate that fails at its start ends its parts while its timer still runs."""
    gate = SharedStatus()
    gate.close()
    gate.publish(True, b"late")
