"""The process that parses large bodies for a gate: bodies in on stdin, asks out on stdout.

1. Each body has a limit of CPU time and of memory. Out of memory is answered; out of time, the kernel ends
   the process, because the parser cannot be interrupted otherwise.
2. After a body that leaves much memory allocated the process ends, and announces that in its answer.
3. It ends when the gate ends, because its stdin is closed then.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import time
from typing import BinaryIO, NamedTuple

from cellgate.proxy.config.limits import LIMITS, REACHED, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.process.malloc import return_large_blocks
from cellgate.proxy.request.body import read_large_ask
from cellgate.router.nouns import Ask

LENGTH_BYTES = 8
"""Each message is its length, big-endian, followed by that many bytes."""
_BYTES_EACH = 16
"""Memory for each byte of a body, beside the constant: a character of a text may take four, twice."""
_KEPT_BYTES = 128 << 20
_NICE = 5


class ReadResult(NamedTuple):
    """The answer: the ask of the body or its failure; or `trouble`, a defect of this process.

    `reached` are the limits that took effect, `ends` says that the process has now ended, `cpu_s` is
    what it took.
    """

    ask: Ask | Failure | None
    trouble: str
    reached: tuple[str, ...]
    ends: bool
    cpu_s: float


def main() -> None:
    """Read bodies until there are no more."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # These signals may be sent to all processes of a service, but are meant for the gate.
        signal.signal(each, signal.SIG_IGN)
    os.nice(_NICE)
    return_large_blocks()
    bodies, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := bodies.read(LENGTH_BYTES):
        length = int.from_bytes(head, "big")
        _bound(length)
        told = read(bodies, length)
        packed = pickle.dumps(told)
        answers.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
        answers.flush()
        if told.ends:
            return


def read(bodies: BinaryIO, length: int) -> ReadResult:
    """Read the next body, of `length` bytes."""
    before, trouble, ends, begun_s = dict(REACHED), "", False, time.process_time()
    ask: Ask | Failure | None = None
    try:
        ask = read_large_ask(bodies.read(length))
    except MemoryError:
        reached("large_body_memory")
        ask = Failure(FailureKind.BODY_TOO_LARGE, "parsing the request's body takes too much memory")
        ends = True
    except Exception as error:
        trouble = repr(error)
    counted = tuple(name for name, count in REACHED.items() for _ in range(count - before[name]))
    cpu_s = time.process_time() - begun_s
    return ReadResult(ask, trouble, counted, ends or _resident_bytes() > _KEPT_BYTES, cpu_s)


def _bound(length: int) -> None:
    """Set the limits of CPU time and memory for the next body."""
    size, (_, hard) = LIMITS.large_body_memory + _BYTES_EACH * length, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard < 0 else min(size, hard), hard))
    # It counts CPU time only, so waiting for the next body does not count.
    signal.setitimer(signal.ITIMER_PROF, LIMITS.large_body_cpu_s)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
