"""NVIDIA Dynamo: its frontend, and its simulated workers as units: the two speak a protocol of their own.

What must stay true: workers are as fast as simulated units are, and Dynamo is set up to lose nothing:
streams migrate, and it routes by KV blocks.
"""

from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

from loadtests.kit import dynamo, processes

_MIGRATIONS = "3"
"""How often a stream may go on elsewhere; its default is never."""
_DECODE_SPEED = "0.2"
"""Of its workers: about 50 ms a step."""
_HEALTH = [
    "DYN_HEALTH_CHECK_ENABLED=true",
    "DYN_CANARY_WAIT_TIME=1",
    "DYN_HEALTH_CHECK_REQUEST_TIMEOUT=1",
]
"""A worker that cannot generate is to be found within a second."""


class DynamoWorker:
    """The processes of one unit: a worker, which is one process and has no followers."""

    def __init__(self, name: str, folder: Path) -> None:
        self._log = folder / f"{name}.log"
        self._folder = folder
        self._process: Popen[bytes]

    def start(self) -> None:
        """Start it."""
        speed = ("--decode-speedup-ratio", _DECODE_SPEED)
        command = dynamo.mocker(dynamo.word_model(self._folder), "sim", self._folder / "dynamo", *speed)
        self._process = processes.start(["env", *_HEALTH, *command], self._log)

    def wait_ready(self) -> None:
        """Return when it takes requests. Raises RuntimeError."""
        dynamo.wait_registered(self._process, self._log)

    def pids(self) -> dict[str, int]:
        """Its process, as the leader."""
        return {"leader": self._process.pid}

    def stop(self) -> None:
        """End it, whatever state it is in."""
        processes.stop(self._process)


def frontend(workers: Sequence[str], folder: Path) -> list[str]:
    """The port and command of a frontend; it finds the workers by the files that they leave in the folder."""
    port = processes.free_port()
    flags = ["--router-mode", "kv", "--migration-limit", _MIGRATIONS]
    flags += ["--router-min-initial-workers", str(len(workers))]
    return [str(port), "env", *_HEALTH, *dynamo.frontend(port, folder / "dynamo", *flags)]
