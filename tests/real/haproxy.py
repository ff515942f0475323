"""HAProxy with the project's own configurations, before gates of a test."""

from __future__ import annotations

import csv
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.real.programs import ROOT, find, free_port, running, tail

CONFIGURATIONS = ROOT / "deploy" / "ingress"


class Gate(Protocol):
    """What HAProxy needs of a gate."""

    port: int
    agent_port: int


class Server(NamedTuple):
    """What HAProxy thinks of one server. `weight` is the one in force, `places` its maxconn (0: no limit)."""

    status: str
    weight: int
    places: int
    agent_says: str


class Haproxy:
    """A running HAProxy."""

    def __init__(self, port: int, stats: Path, log: Path) -> None:
        self.port = port
        self.log = log
        self._stats = stats

    def servers(self) -> dict[str, Server]:
        """Its servers, by name; none while it starts."""
        if not self._stats.exists():
            return {}
        rows = csv.DictReader(self.command("show stat").removeprefix("# ").splitlines())
        return {
            row["svname"]: Server(
                row["status"], int(row["weight"]), int(row["slim"] or 0), row["last_agt"].strip()
            )
            for row in rows
            if row["svname"] not in ("FRONTEND", "BACKEND")
        }

    def command(self, words: str) -> str:
        """The answer to an operator's command."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5.0)
            sock.connect(str(self._stats))
            sock.sendall(words.encode() + b"\n")
            return b"".join(iter(lambda: sock.recv(65536), b"")).decode()


@contextmanager
def haproxy(
    folder: Path,
    gates: Mapping[str, Gate],
    *,
    configuration: str = "haproxy.cfg",
    node: str = "lb1",
    changed: Mapping[str, str] | None = None,
) -> Iterator[Haproxy]:
    """HAProxy before gates by the address they have in the configuration; `changed` are more replacements."""
    program, port, stats = find("haproxy"), free_port(), folder / f"{node}.sock"
    text = (CONFIGURATIONS / configuration).read_text()
    replacements = {
        "global\n": f"global\n    stats socket {stats} level admin\n    node {node}\n",
        "bind :8080": f"bind 127.0.0.1:{port}",
        # What takes a second in the field; a check has as long as there to be answered, and more.
        "inter 1s": "inter 100ms",
        "    timeout connect 1s\n": "    timeout connect 1s\n    timeout check 2s\n",
        **(changed or {}),
    }
    for address, gate in gates.items():
        replacements[f"{address}:8000"] = f"127.0.0.1:{gate.port}"
        replacements[f"agent-addr {address} agent-port 9902"] = f"agent-port {gate.agent_port}"
    for before, after in replacements.items():
        assert before in text, before
        text = text.replace(before, after)
    file, log = folder / f"{node}.cfg", folder / f"{node}.log"
    file.write_text(text)
    with running([program, "-db", "-L", node, "-f", str(file)], log):
        try:
            yield Haproxy(port, stats, log)
        except BaseException:
            print(tail(log))
            raise
