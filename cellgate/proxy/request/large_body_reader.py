"""The process that parses large bodies for a gate: bodies in on stdin, what they ask for out on stdout.

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
from cellgate.proxy.request.body import has_more_nodes, read_large_ask
from cellgate.proxy.request.conversation import Conversation, read_conversation
from cellgate.router.nouns import Ask

LENGTH_BYTES = 8
"""Each message is its length, big-endian, followed by that many bytes; before a body comes its route."""
ROUTE_BYTES = 16
_BYTES_EACH = 16
"""Memory for each byte of a body, beside the constant: a character of a text may take four, twice."""
_KEPT_BYTES = 128 << 20
_NICE = 5


class ReadResult(NamedTuple):
    """The answer: what the body asks for, or its failure; or `trouble`, a defect of this process.

    `reached` are the limits that took effect, `ends` says that the process has now ended, `cpu_s` is
    what it took.
    """

    found: Ask | Conversation | Failure | None
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
        length, route = int.from_bytes(head, "big"), bodies.read(ROUTE_BYTES).rstrip().decode()
        _bound(length)
        told = read(bodies, length, route)
        packed = pickle.dumps(told)
        answers.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
        answers.flush()
        if told.ends:
            return


def read(bodies: BinaryIO, length: int, route: str = "") -> ReadResult:
    """Read the next body, of `length` bytes."""
    before, trouble, ends, begun_s = dict(REACHED), "", False, time.process_time()
    found: Ask | Conversation | Failure | None = None
    try:
        found = _read(bodies.read(length), route)
    except MemoryError:
        reached("large_body_memory")
        found = Failure(FailureKind.BODY_TOO_LARGE, "parsing the request's body takes too much memory")
        ends = True
    except Exception as error:
        trouble = repr(error)
    counted = tuple(name for name, count in REACHED.items() for _ in range(count - before[name]))
    cpu_s = time.process_time() - begun_s
    return ReadResult(found, trouble, counted, ends or _resident_bytes() > _KEPT_BYTES, cpu_s)


def _read(body: bytes, route: str) -> Ask | Conversation | Failure:
    """One with few values may be read in parts, so that the gate can recognise them."""
    known = None if has_more_nodes(body, LIMITS.json_nodes) else read_conversation(body, route)
    return known or read_large_ask(body, route)


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
