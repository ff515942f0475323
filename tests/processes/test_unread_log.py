"""A gate whose output nobody reads, as Docker's blocking log driver leaves it."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.extras import needs
from tests.wire.process import PATIENCE_S, ROOT, eventually

_LISTENING = re.compile(rb"listening on 127\.0\.0\.1:(\d+), admin on 127\.0\.0\.1:(\d+)")


def fill(pipe: int) -> None:
    """Leave no room in a pipe. By a description of its own: whether it blocks is so for all who share one."""
    writer = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * size)
    os.close(writer)


def status(port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--workers", "2"), marks=needs("workers"))], ids=["one process", "workers"]
)
def test_a_gate_serves_on_though_nobody_reads_what_it_logs(tmp_path: Path, flags: Sequence[str]) -> None:
    reader, pipe = os.pipe()
    os.set_blocking(reader, False)
    command = [sys.executable, "-m", "cellgate", "serve", "--unit", "a=http://127.0.0.1:9", *flags]
    places = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    process = subprocess.Popen([*command, *places], cwd=ROOT, stdout=pipe, stderr=pipe)
    said = bytearray()

    def listens() -> bool:
        try:
            said.extend(os.read(reader, 4096))
        except BlockingIOError:
            return process.poll() is not None
        return _LISTENING.search(said) is not None

    try:
        assert eventually(listens)
        found = _LISTENING.search(said)
        assert found is not None, said
        port, admin = int(found[1]), int(found[2])
        fill(pipe)
        for _ in range(20):
            # Each of these is a line of the operator's log, and each request one of the access log.
            assert status(admin, "POST", "/units/a/drain") == 200
            assert status(admin, "POST", "/units/a/undrain") == 200
            assert status(port, "GET", "/health") == 503
    finally:
        process.kill()
        process.wait()
        os.close(pipe)
        os.close(reader)
