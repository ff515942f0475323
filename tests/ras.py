"""A server that speaks like NCCL's RAS service, in a thread. The format is that of NCCL's user guide."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def rank(number: int, host: str, reduced: int, error: int = 0) -> dict[str, Any]:
    """A rank that has launched so many AllReduce."""
    return {
        "rank": number,
        "host": host,
        "pid": 1000 + number,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": {
            "init_state": 0,
            "async_error": error,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        },
        "collective_counts": dict.fromkeys(OPERATIONS, 3) | {"AllReduce": reduced},
    }


def missing(number: int, host: str, *, is_dead: bool = False) -> dict[str, Any]:
    """A rank that does not answer."""
    status = {"unresponsive": True, "considered_dead": is_dead}
    place = {"rank": number, "host": host, "pid": 1000 + number, "cuda_dev": number, "nvml_dev": number}
    return place | {"status": status}


def communicator(
    ranks: Sequence[Mapping[str, Any]], lost: Sequence[Mapping[str, Any]] = (), name: str = "0x1"
) -> dict[str, Any]:
    """One communicator of these ranks."""
    return {
        "hash": name,
        "secondary_hash": "0x2:0x3",
        "size": len(ranks) + len(lost),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(lost),
        "ranks": list(ranks),
        "missing_ranks": list(lost),
    }


def status(*communicators: Mapping[str, Any]) -> bytes:
    """What the service answers to STATUS."""
    whole = {
        "nccl_version": "2.29.1",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-01-01 00:00:00",
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }
    return json.dumps(whole, indent=2).encode() + b"\n"


class RasServer:
    """Answers each client; `said` is the status. `has_json`: False for one before NCCL 2.28.7."""

    def __init__(self, said: bytes, *, has_json: bool = True) -> None:
        self.said = said
        self.has_json = has_json
        self.commands: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", self.listener.getsockname()[1])

    def serve(self) -> None:
        """One client after the other, until the listener is closed."""
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                with client, suppress(OSError), client.makefile("rwb") as file:
                    self._answer(file)

    def _answer(self, file: Any) -> None:
        for line in file:
            command = line.decode().strip().lower()
            self.commands.append(command)
            if command == "status":
                file.write(self.said)
                return
            file.write(self._reply(command))
            file.flush()

    def _reply(self, command: str) -> bytes:
        if command.startswith("client protocol "):
            return b"SERVER PROTOCOL 2\n"
        if command.startswith("timeout ") or (command.startswith("set format ") and self.has_json):
            return b"OK\n"
        return f"ERROR: Unknown command {command}\n".encode()


@contextmanager
def ras(said: bytes, *, has_json: bool = True) -> Iterator[RasServer]:
    """A service that runs meanwhile."""
    server = RasServer(said, has_json=has_json)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.listener.shutdown(socket.SHUT_RDWR)
        server.listener.close()
        thread.join(5.0)
