"""The agent as a process, on real processes and real connections."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.extras import agent
from cellgate.probes.agents import AgentLink
from cellgate.probes.base import Net
from cellgate.probes.runner import Runner, Timers
from cellgate.proxy.cli import main as commands
from cellgate.proxy.http.fetch import UnitNet
from cellgate.router.nouns import Evidence, Sign, Strength
from tests.patient import FakePatient, reply
from tests.ras import communicator, rank, ras, status
from tests.wire.process import PATIENCE_S, eventually

SCRIPT = str(Path(str(agent.__file__)).resolve())
TOKEN = "s3cret"


def start_agent(*flags: str, token: str = "") -> tuple[subprocess.Popen[bytes], int]:
    """An agent on a free port, and the port."""
    command = [sys.executable, SCRIPT, "--listen", "127.0.0.1:0", *flags]
    environment = {**os.environ, agent.TOKEN_VARIABLE: token}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    first = process.stderr.readline().decode()
    assert first.startswith("cellgate agent: listens on 127.0.0.1:"), first
    return process, int(first.rpartition(":")[2])


@contextmanager
def running(*flags: str, token: str = "") -> Iterator[int]:
    """The port of an agent that runs meanwhile, and ends well on SIGTERM."""
    process, port = start_agent(*flags, token=token)
    try:
        yield port
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


@contextmanager
def worker(mark: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line holds `mark`."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *flags, "--name", mark])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Watching:
    """A connection to /watch, read line by line."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._socket.sendall(b"GET /watch HTTP/1.1\r\nHost: agent\r\n\r\n")
        self._file = self._socket.makefile("rb")
        self.head = b"".join(iter(self._file.readline, b"\r\n"))

    def line(self) -> dict[str, Any]:
        """The next line, a beat or a message."""
        data = self._file.read(int(self._file.readline(), 16) + 2)
        assert data.endswith(b"\n\r\n")
        said: dict[str, Any] = json.loads(data)
        assert said["cellgate_agent"] == 1
        return said

    def until(self, state: str) -> dict[str, Any]:
        """The first message that tells this state."""
        while (said := self.line()).get("state") != state:
            pass
        return said

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """An agent that waits for a process that never comes."""
    with running("--match", "no-process-has-this") as port:
        yield port


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str]]:
    """One request; its status and what was said."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


def send(port: int, data: bytes, *, times: int = 1) -> bytes:
    """What an agent answers to these bytes until it closes, at most a megabyte; empty after a reset."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection, suppress(OSError):
        for _ in range(times):
            connection.sendall(data)
        answer = b""
        while len(answer) < 1 << 20 and (piece := connection.recv(65536)):
            answer += piece
        return answer
    return b""


@pytest.mark.alone
def test_what_happens_to_a_process_is_told_within_half_a_second() -> None:
    """Stop, go on, death, burial, restart."""
    mark = f"worker-of-{os.getpid()}"
    with running("--match", mark) as port, worker(mark) as first:
        watching = Watching(port)
        epoch = watching.until("ok")["epoch"]
        assert get(port, "/healthz")[0] == 200
        after_s: dict[str, float] = {}
        # Stopped and continued three times, for on a busy machine one of them may come late.
        stop_and_go = ((signal.SIGSTOP, "stopped"), (signal.SIGCONT, "ok"))
        for number, state in (*stop_and_go, *stop_and_go, *stop_and_go, (signal.SIGKILL, "zombie")):
            began = time.monotonic()
            first.send_signal(number)
            said = watching.until(state)
            after_s[state] = min(after_s.get(state, math.inf), time.monotonic() - began)
            assert said["epoch"] == epoch
        assert after_s["stopped"] < 0.5
        assert after_s["ok"] < 0.5
        first.wait()
        assert f"process {first.pid} (" in watching.until("gone")["reason"]
        assert get(port, "/healthz")[0] == 503
        with worker(mark):
            assert watching.until("ok")["epoch"] != epoch
        watching.close()


def test_a_link_of_the_gate_hears_a_real_agent() -> None:
    mark = f"linked-to-{os.getpid()}"
    found: list[Evidence] = []

    class LoopPatient(FakePatient):
        def now(self) -> float:
            return asyncio.get_running_loop().time()

        @property
        def net(self) -> Net:
            loop = asyncio.get_running_loop()
            return UnitNet(loop, self.received, connect_timeout_s=3.0, tls=None)

    async def wait_for(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def main(port: int, process: subprocess.Popen[bytes]) -> None:
        context = LoopPatient(lambda _: reply(200))
        link = AgentLink(f"127.0.0.1:{port}", TOKEN)
        agenda = Timers(asyncio.get_running_loop())
        runner = Runner(link, context, cast("Any", found.append), random.Random(1), agenda)
        runner.start()
        await wait_for(lambda: any(evidence.sign is Sign.GOOD for evidence in found))
        process.kill()
        await wait_for(lambda: found[-1].strength is Strength.FATAL)
        runner.stop()

    with running("--match", mark, token=TOKEN) as port, worker(mark) as process:
        asyncio.run(main(port, process))
    *before, good, bad = [evidence.sign for evidence in found]
    assert set(before) == {Sign.NEUTRAL}
    assert (good, bad) == (Sign.GOOD, Sign.BAD)


@pytest.mark.alone
def test_beats_are_few_and_all_alike(port: int) -> None:
    """Four a second."""
    watching = Watching(port)
    assert b"Transfer-Encoding: chunked" in watching.head
    assert watching.line()["state"] == "absent"
    watching.line()
    began = time.monotonic()
    assert [watching.line() for _ in range(4)] == [{"cellgate_agent": 1}] * 4
    assert 0.8 < time.monotonic() - began < 3.0
    watching.close()


def test_many_may_watch_up_to_a_bound(port: int) -> None:
    """Who comes too late is told so, and those that watch go on."""
    watchers = [Watching(port) for _ in range(agent.CLIENTS_MAX)]
    assert [watching.line()["state"] for watching in watchers] == ["absent"] * agent.CLIENTS_MAX
    assert b"503 Service Unavailable" in send(port, b"")
    assert watchers[0].line() == watchers[-1].line() == {"cellgate_agent": 1}
    for watching in watchers:
        watching.close()


def test_strangers_who_say_nothing_leave_room_for_who_asks(port: int) -> None:
    """The oldest silent one goes; 140 of them kept out 42 of 45."""
    silent = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(140)]
    watchers = [Watching(port) for _ in range(45)]
    assert [watching.line()["state"] for watching in watchers] == ["absent"] * 45
    more = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(140)]
    assert get(port, "/healthz")[0] == 503
    assert [watching.line() for watching in watchers] == [{"cellgate_agent": 1}] * 45
    for stranger in (*silent, *more):
        stranger.close()
    for watching in watchers:
        watching.close()


def test_other_requests_are_told_what_there_is_and_what_is_no_http_is_refused(port: int) -> None:
    others = [
        ("/healthz", "GET", 503),
        ("/", "GET", 404),
        ("/watch", "POST", 405),
        ("/watch?x=1", "GET", 404),
    ]
    for path, method, expected in others:
        answered, said = get(port, path, method)
        assert answered == expected
        assert said.get("error") or said["reason"] == "no process matches 'no-process-has-this'"
    for data in (b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"GET /watch\r\n\r\n", b"a b c\r\n\r\n"):
        assert send(port, data).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    # Ten megabytes of what never ends are cut; the agent is there as before.
    for data in (b"x" * 65536, b"GET /watch HTTP/1.1\r\nX: " + b"x" * 65536, b"X: y\r\n" * 10000):
        send(port, data, times=10_000_000 // len(data))
        assert get(port, "/healthz")[0] == 503


@pytest.mark.alone
def test_a_watcher_that_goes_on_talking_is_dropped(port: int) -> None:
    began = time.monotonic()
    send(port, b"GET /watch HTTP/1.1\r\n\r\n" + b"x" * 20_000, times=10)
    assert time.monotonic() - began < 5.0


def test_a_token_is_wanted_of_watchers_and_of_nobody_else() -> None:
    """A kubelet that asks for health has none."""
    with running("--match", "no-process-has-this", token=TOKEN) as port:
        assert get(port, "/watch")[0] == 401
        assert get(port, "/watch", Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert get(port, "/healthz")[0] == 503
        request = f"GET /watch HTTP/1.1\r\nAUTHORIZATION:  Bearer {TOKEN}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            connection.sendall(request.encode())
            assert connection.recv(15) == b"HTTP/1.1 200 OK"


class NotedTransport(asyncio.Transport):
    """A transport that keeps what is written; `unread` bytes wait for its peer."""

    def __init__(self, unread: int = 0) -> None:
        super().__init__()
        self.unread = unread
        self.aborted = False
        self.written: list[bytes] = []

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: Any) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.aborted = True


def watched_by(transport: NotedTransport, *statuses: agent.Status) -> tuple[agent.Agent, agent.Client]:
    """An agent that sees these one after the other, and a client of it."""
    looks = iter(statuses)
    watched = agent.Agent(cast("agent.ProcessWatch", SimpleNamespace(look=lambda: next(looks))))
    client = agent.Client(watched)
    client.connection_made(transport)
    return watched, client


def test_a_watcher_that_does_not_read_is_dropped() -> None:
    transport = NotedTransport(unread=agent.AGENT_UNREAD_BYTES + 1)
    _, client = watched_by(transport, agent.Status("ok", "", ""))
    client.send(b"x")
    client.send(b"x")
    assert transport.aborted
    assert transport.written == []


def test_who_connects_and_asks_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NotedTransport()
    watched, _ = watched_by(transport, agent.Status("ok", "", ""))
    watched._beat()
    assert not transport.aborted
    monkeypatch.setattr(agent, "HEAD_S", -1.0)
    watched._beat()
    assert transport.aborted


def test_pressure_is_told_each_time_it_is_measured() -> None:
    """And once more when it is over; what has not changed otherwise is not told."""
    uses = [(0.1, 0), (0.1, 5), (0.95, 10), (0.95, 10), (0.95, 11), (0.2, 12), (0.2, 17)]
    statuses = [agent.Status("ok", "", "e", (), use, float(at)) for use, at in uses]
    transport = NotedTransport()
    watched, client = watched_by(transport, *statuses)
    client.data_received(b"GET /watch HTTP/1.1\r\n\r\n")
    transport.written.clear()
    for _ in uses[1:]:
        watched._look()
    told = [json.loads(line.split(b"\r\n")[1])["open_files"] for line in transport.written]
    assert told == [0.95, 0.95, 0.2]


# reports


def test_a_report_has_the_flags_of_a_real_process_and_no_secret() -> None:
    mark = f"reported-{os.getpid()}"
    shown = {"Authorization": f"Bearer {TOKEN}"}
    with running("--match", mark, token=TOKEN) as port, worker(mark, "--tp", "8", "--api-key", "sk-live"):
        assert get(port, "/report")[0] == 401
        assert eventually(lambda: "flag --tp" in get(port, "/report", **shown)[1]["stack"])
        answered, said = get(port, "/report", **shown)
        stack = cast("dict[str, str]", said["stack"])
        assert (answered, stack["flag --tp"], stack["flag --api-key"]) == (200, "8", agent.SECRET)
        assert mark not in json.dumps(said)
        assert "sk-live" not in json.dumps(said)


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
        async with asyncio.timeout(PATIENCE_S):
            while not all(transport.written for transport in transports):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert threading.active_count() <= before, "one thread for all"
        hangs.set()
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
        async with asyncio.timeout(PATIENCE_S):
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


# how it is started


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to watch: give --match, --pid-file or --port"),
        (
            ["--match", "x", "--listen", "0.0.0.0:0"],
            "0.0.0.0 can be reached from other machines, so gates must",
        ),
        (["--match", "x", "--token-file", "/nowhere"], "cannot read the token in /nowhere"),
        (["--match", "x", "--token-file", os.devnull], "there is no token in /dev/null: the file is empty"),
        (["--match", "("], "'(' is not a valid regular expression"),
        (["--port", "70000"], "expected a port from 1 to 65535"),
        (["--match", "x", "--listen", "9911"], "expected HOST:PORT, found '9911'"),
    ],
)
@pytest.mark.parametrize(
    "main", [agent.main, lambda flags: commands.main(["agent", *flags])], ids=["file", "cellgate"]
)
def test_a_wrong_command_is_a_sentence(
    main: Callable[[list[str]], int],
    flags: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(agent.TOKEN_VARIABLE, raising=False)
    try:
        code = main(flags)
    except SystemExit as exit:
        code = int(exit.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_port_in_use_is_a_sentence(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.main(["--match", "x", "--listen", f"127.0.0.1:{port}"]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
