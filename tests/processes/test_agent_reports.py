"""Reports of the agent as a process: of real command lines, and when a driver keeps the reader waiting."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from typing import Any, cast

import pytest

from cellgate.probes import agent
from tests.processes.test_agent_process import TOKEN, NotedTransport, get, running, watched_by
from tests.ras import communicator, rank, ras, status
from tests.wire.process import eventually


def test_a_report_has_the_flags_of_a_real_process_and_no_secret() -> None:
    mark = f"reported-{os.getpid()}"
    flags = ["--tp", "8", "--api-key", "sk-live", "--name", mark]
    command = [sys.executable, "-c", "import time; time.sleep(60)", *flags]
    process = subprocess.Popen(command)
    try:
        with running("--match", mark, token=TOKEN) as port:
            assert get(port, "/report")[0] == 401
            shown = {"Authorization": f"Bearer {TOKEN}"}
            assert eventually(lambda: "flag --tp" in get(port, "/report", **shown)[1]["stack"])
            status, said = get(port, "/report", **shown)
            stack = cast("dict[str, str]", said["stack"])
            assert (status, stack["flag --tp"], stack["flag --api-key"]) == (200, "8", agent.SECRET)
            assert mark not in json.dumps(said)
            assert "sk-live" not in json.dumps(said)
    finally:
        process.kill()
        process.wait()


def test_a_report_that_never_comes_is_given_up_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "REPORT_S", 0.1)
    hangs = threading.Event()

    async def scenario() -> list[NotedTransport]:
        watched = watched_by(NotedTransport(), agent.Status("ok", "", ""))[0]
        monkeypatch.setattr(watched.reporter, "_compose", lambda of_ranks: {of_ranks: hangs.wait()})
        transports = [NotedTransport() for _ in range(3)]
        for transport in transports:
            client = agent.Client(watched)
            client.connection_made(transport)
            client.data_received(b"GET /report HTTP/1.1\r\n\r\n")
        before = threading.active_count()
        await asyncio.sleep(0.3)
        assert threading.active_count() <= before, "one thread for all"
        hangs.set()
        await asyncio.sleep(0.1)
        return transports

    for transport in asyncio.run(scenario()):
        assert b"".join(transport.written).startswith(b"HTTP/1.1 503 ")
        assert len(transport.written) == 1


def test_who_wants_to_know_of_ranks_gets_no_report_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    composed: list[bool] = []

    def compose(of_ranks: bool) -> dict[str, Any]:
        composed.append(of_ranks)
        may_go_on.wait()
        return {"ranks": []} if of_ranks else {}

    async def scenario() -> list[bytes]:
        watched = watched_by(NotedTransport(), agent.Status("ok", "", ""))[0]
        monkeypatch.setattr(watched.reporter, "_compose", compose)
        transports = [NotedTransport() for _ in range(4)]
        for transport, query in zip(transports, (b"", b"?ranks", b"", b"?ranks"), strict=True):
            client = agent.Client(watched)
            client.connection_made(transport)
            client.data_received(b"GET /report%b HTTP/1.1\r\n\r\n" % query)
        may_go_on.set()
        async with asyncio.timeout(10.0):
            while not all(transport.written for transport in transports):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return [b"".join(transport.written) for transport in transports]

    replies = asyncio.run(scenario())
    assert [b'"ranks"' in reply for reply in replies] == [False, True, False, True]
    assert composed == [False, True], "one at a time, and no more than are needed"


def test_ranks_are_asked_only_by_who_wants_to_know() -> None:
    ranks = [rank(n, "10.0.0.1", 10 - (n == 1)) for n in range(4)]
    with ras(status(communicator(ranks))) as server:
        flags = ("--match", "no-process-has-this", "--ras", "{}:{}".format(*server.address))
        with running(*flags) as port:
            assert "ranks" not in get(port, "/report")[1]
            assert server.commands == []
            said: Any = get(port, "/report?ranks")[1]["ranks"]
    assert said[0]["behind"] == [[1, "10.0.0.1", 1001, "AllReduce", 9, 10]]
