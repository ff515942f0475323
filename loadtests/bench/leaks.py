"""What a router still has open once its clients have left in mid-stream: connections, and generations."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.kit import processes
from loadtests.kit.waiting import wait_until
from loadtests.wire.blocking import fetch

PATIENCE_S = 5.0
_LISTEN = "0A"
_RUNNING = re.compile(r"^vllm:num_requests_running\S* (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Left:
    """`clients`: connections from clients; `generating`: answers that units still compute for nobody, each on
    a connection that is leaked; `idle`: connections to units that are kept for later, which is no leak.
    """

    clients: int
    generating: int
    idle: int

    @property
    def leaked(self) -> int:
        """All that nobody needs any more."""
        return self.clients + self.generating


def wait(pid: int, port: int, units: Sequence[int]) -> Left:
    """What is left when nothing is leaked any more, or after `PATIENCE_S`."""
    wait_until(lambda: not _look(pid, port, units).leaked, PATIENCE_S, 0.2)
    return _look(pid, port, units)


def _look(pid: int, port: int, units: Sequence[int]) -> Left:
    own = processes.sockets(pid)
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [(_port(line[1]), _port(line[2])) for line in lines if line[9] in own and line[3] != _LISTEN]
    generating = sum(map(_running, units))
    return Left(
        clients=sum(local == port for local, _ in ends),
        generating=generating,
        idle=max(0, sum(remote in units for _, remote in ends) - generating),
    )


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _running(unit: int) -> int:
    found = _RUNNING.search(fetch(f"http://127.0.0.1:{unit}/metrics").body.decode())
    return int(found[1]) if found else 0
