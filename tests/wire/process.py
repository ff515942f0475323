"""The gate as a process of its own, as an operator starts it: by its command line and a file."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import yaml

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""A machine that is busy with other things may take that long; who waits for nothing in vain waits less."""
_LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+), admin on 127\.0\.0\.1:(\d+)")


def eventually(is_so: Callable[[], object]) -> bool:
    """Whether it comes to be so while anyone would wait."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.005)
    return True


def program_after(first: str) -> list[str]:
    """The command `cellgate`, in a Python that has run `first` before: a place to change constants."""
    if not first:
        return [sys.executable, "-m", "cellgate"]
    return [
        sys.executable,
        "-c",
        f"{first}\nfrom cellgate.proxy.cli.main import main\nraise SystemExit(main())",
    ]


class GateProcess:
    """`python -m cellgate serve` with a file of this configuration. Inside its context it listens.

    `units` are the names and URLs of its units, `keys` more of the file's; `flags` and `environ` are more of
    the command line and of the environment; `operator` is what stands in the operator's file; `first` is
    Python that runs before the gate in its process, `tree` where its sources are.
    """

    def __init__(
        self,
        folder: Path,
        units: dict[str, str],
        *,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
        operator: Mapping[str, Any] = MappingProxyType({}),
        first: str = "",
        tree: Path = ROOT,
        **keys: Any,
    ) -> None:
        self._file = folder / "cellgate.yaml"
        self._log = folder / "gate.log"
        self._keys = keys
        if operator:
            self.operator_file = folder / "operator.yaml"
            self.operate(**operator)
            self._keys = {"operator": str(self.operator_file), **keys}
        self._program, self._tree = program_after(first), tree
        self._flags = flags
        self._environ = {**os.environ, **environ}
        self.configure(units)
        self.port = self.admin_port = 0

    def operate(self, **keys: Any) -> None:
        """Write the operator's file again."""
        self.operator_file.write_text(yaml.safe_dump(keys))

    def configure(self, units: dict[str, str], **unit_keys: Any) -> None:
        """Write the file again; nothing follows from that before a SIGHUP."""
        rows = [{"name": name, "url": url, **unit_keys} for name, url in units.items()]
        self._file.write_text(yaml.safe_dump({"cells": [{"name": "c", "units": rows}], **self._keys}))

    def __enter__(self) -> Self:
        command = [*self._program, "serve", "-c", str(self._file)]
        places = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--access-log", "off"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *places, *self._flags], cwd=self._tree, stdout=log, stderr=log, env=self._environ
            )
        try:
            assert eventually(lambda: _LISTENING.search(self.log) or self.process.poll() is not None)
            found = _LISTENING.search(self.log)
            assert found is not None, self.log
            self.port, self.admin_port = int(found[1]), int(found[2])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        """Where its data port is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """All that it has printed."""
        return self._log.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(PATIENCE_S)

    def connect(self, *, admin: bool = False) -> http.client.HTTPConnection:
        """A connection to its data port, or to its admin port."""
        port = self.admin_port if admin else self.port
        return http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def admin(self, method: str, path: str) -> tuple[int, Any]:
        """Status and JSON of a request to the admin port."""
        connection = self.connect(admin=True)
        try:
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def units(self) -> dict[str, Any]:
        """What it thinks of its units, by name."""
        return {unit["name"]: unit for unit in self.admin("GET", "/units")[1]}

    def until_up(self, *names: str) -> None:
        """Wait until these are exactly its units, and all are up."""
        assert eventually(
            lambda: (
                {name: unit["verdict"] for name, unit in self.units().items()} == dict.fromkeys(names, "up")
            )
        ), self.log


class Stream:
    """A streamed completion on a connection of its own, begun."""

    def __init__(self, gate: GateProcess, tokens: int) -> None:
        self.connection = gate.connect()
        body = json.dumps({"model": "sim", "prompt": "Once", "max_tokens": tokens, "stream": True})
        try:
            self.connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            self.reply = self.connection.getresponse()
        except ConnectionError:
            self.connection.close()
            raise
        self.unit = self.reply.headers["x-cellgate-unit"]
        self.lines = [self.reply.readline()]

    def is_whole(self) -> bool:
        """Read on to the end; whether all of it has come."""
        try:
            self.lines += self.reply.readlines()
        except (http.client.IncompleteRead, ConnectionError):
            return False
        finally:
            self.reply.close()
            self.connection.close()
        events = [line for line in self.lines if line.startswith(b"data: ")]
        return events[-1] == b"data: [DONE]\n" and not any(b'"error"' in event for event in events)


def metrics(gate: GateProcess, accept: str = "*/*") -> str:
    """The text of /metrics."""
    connection = gate.connect(admin=True)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        return connection.getresponse().read().decode()
    finally:
        connection.close()
