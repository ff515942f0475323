"""Commands that are run, webhooks that are called, and the log of both: with real processes and sockets."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cellgate.proxy.config.action_settings import CallWebhook, RunCommand
from cellgate.proxy.config.settings import Tls
from cellgate.proxy.extras.operator import actions, plan
from cellgate.proxy.extras.operator.actions import FLOOD_BYTES, OUTPUT_KEPT
from cellgate.proxy.extras.operator.plan import RecoveryReport, RecoveryResult
from cellgate.proxy.process.tls import LiveTls
from tests.wire.process import eventually
from tests.wire.stage import live

PEM = Path(__file__).parents[1] / "wire" / "localhost.pem"
ABOUT = {
    "id": "a1-0123",
    "unit": "a1",
    "cell": "a",
    "url": "http://10.0.0.1:8000",
    "nodes": [
        {"name": "a1-0", "role": "leader", "agent": ""},
        {"name": "a1-1", "role": "follower", "agent": ""},
    ],
    "reason": "gone\nfor good",
    "node": "a1-1",
    "source": "agent",
    "epoch": {"agent a1-1": "b:7:1", "engine_metrics": "5"},
    "since": "2026-01-01T00:00:00.000Z",
    "attempt": 2,
    "fence": 0,
}


async def shell(script: str, timeout_s: float = 10.0) -> RecoveryReport:
    return await run(("sh", "-c", script), timeout_s)


async def run(words: tuple[str, ...], timeout_s: float = 10.0) -> RecoveryReport:
    return await actions.run_command(RunCommand(words), ABOUT, timeout_s)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_gone(pid: int) -> bool:
    return eventually(lambda: not is_alive(pid))


@live
async def test_a_command_gets_its_evidence_and_none_of_the_gates_secrets() -> None:
    os.environ["CELLGATE_ADMIN_TOKEN"] = "secret"
    try:
        report = await shell("env | grep ^CELLGATE | sort; cat; pwd >&2")
    finally:
        del os.environ["CELLGATE_ADMIN_TOKEN"]
    *variables, told_and_pwd = report.output.splitlines()
    assert report.result is RecoveryResult.OK
    assert variables == [
        "CELLGATE_ATTEMPT=2",
        "CELLGATE_CELL=a",
        "CELLGATE_EPOCH=agent a1-1=b:7:1,engine_metrics=5",
        "CELLGATE_FENCE=0",
        "CELLGATE_ID=a1-0123",
        "CELLGATE_NODE=a1-1",
        "CELLGATE_NODES=a1-0,a1-1",
        "CELLGATE_REASON=gone\\x0afor good",
        "CELLGATE_SINCE=2026-01-01T00:00:00.000Z",
        "CELLGATE_UNIT=a1",
        "CELLGATE_URL=http://10.0.0.1:8000",
    ]
    told, end = json.JSONDecoder().raw_decode(told_and_pwd)
    assert (told, told_and_pwd[end:]) == (ABOUT, os.getcwd())


@live
async def test_what_is_no_shell_is_not_read_as_one() -> None:
    report = await run(("echo", "$HOME; exit 1", "`id`"))
    assert (report.result, report.output) == (RecoveryResult.OK, "$HOME; exit 1 `id`\n")


@pytest.mark.parametrize(
    ("script", "detail"),
    [("echo why >&2; exit 7", "it exited with 7"), ("echo why; kill -TERM $$", "it was killed by signal 15")],
)
def test_a_command_that_fails_says_how(script: str, detail: str) -> None:
    @live
    async def test() -> None:
        assert await shell(script) == RecoveryReport(RecoveryResult.FAILED, detail, "why\n")

    test()


@live
async def test_a_command_that_is_not_there_any_more_is_a_failure() -> None:
    report = await run(("/no/such/program",))
    assert report.result is RecoveryResult.FAILED
    assert "/no/such/program could not be started" in report.detail


@live
async def test_a_command_that_hangs_is_killed_with_all_that_it_started() -> None:
    report = await shell("trap '' TERM; sleep 60 & echo $!; echo $$; wait", timeout_s=0.3)
    assert (report.result, report.detail) == (RecoveryResult.TIMEOUT, "killed: it did not end within 0.3 s")
    assert [is_gone(int(pid)) for pid in report.output.split()] == [True, True]


@live
async def test_a_command_that_floods_is_killed_and_only_its_end_is_kept() -> None:
    report = await shell("yes")
    assert report.result is RecoveryResult.FLOODED
    assert report.output == "y\n" * (OUTPUT_KEPT // 2)


@live
async def test_a_command_may_be_wordy() -> None:
    size = FLOOD_BYTES // 2
    report = await shell(f"head -c {size} /dev/zero | tr '\\0' x; echo end")
    assert report.result is RecoveryResult.OK
    assert report.output.endswith("xxend\n")
    assert len(report.output) == OUTPUT_KEPT


@live
async def test_a_child_in_the_background_that_holds_the_output_is_not_waited_for() -> None:
    report = await shell("sleep 60 & echo done $!")
    assert (report.result, report.output[:5]) == (RecoveryResult.OK, "done ")
    os.kill(int(report.output.split()[1]), 9)


@live
async def test_a_command_ends_with_its_gate(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = f"echo $$ > {mark}.new; mv {mark}.new {mark}; sleep 60"
    running = asyncio.create_task(shell(script))
    assert await asyncio.to_thread(eventually, mark.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_gone(int(mark.read_text()))


@live
async def test_commands_leave_no_descriptor_behind() -> None:
    await shell("true")
    before = len(os.listdir("/proc/self/fd"))
    for script in ("true", "exit 3", "yes", "exec 0<&- 1>&- 2>&-"):
        await shell(script)
    await run(("/no/such",))
    assert len(os.listdir("/proc/self/fd")) == before


# Webhooks.

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def hook(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/hook", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http{'s' if tls else ''}://{host}:{port}/hook"
    finally:
        await runner.cleanup()


async def post(url: str, timeout_s: float = 5.0, call: actions.WebhookCall | None = None) -> RecoveryReport:
    return await (call or CALL)(CallWebhook(url, "s3cret"), ABOUT, timeout_s)


CALL = actions.caller(ssl.create_default_context(), wall=lambda: 1_700_000_000.9)


@live
async def test_a_webhook_is_signed_over_its_time_and_body() -> None:
    got: list[tuple[Any, bytes]] = []

    async def answer(request: web.Request) -> web.Response:
        got.append((request.headers, await request.read()))
        return web.Response(status=202, text="on it")

    async with hook(answer) as url:
        assert await post(url) == RecoveryReport(RecoveryResult.OK, "it answered 202", "on it")
    ((headers, body),) = got
    assert json.loads(body) == ABOUT
    assert headers["X-Cellgate-Timestamp"] == "1700000000"
    expected = hmac.new(b"s3cret", b"1700000000." + body, hashlib.sha256).hexdigest()
    assert headers["X-Cellgate-Signature"] == f"sha256={expected}"


@live
async def test_a_webhook_over_https_is_verified() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(PEM)
    trusting = actions.caller(LiveTls(Tls(ca=str(PEM))).webhooks())
    async with hook(answer, context) as url:
        assert (await post(url.replace("127.0.0.1", "localhost"), call=trusting)).result is RecoveryResult.OK
        refused = await post(url)
    assert refused.result is RecoveryResult.FAILED
    assert "certificate" in refused.detail.lower()


@live
async def test_a_webhook_that_never_answers_is_bounded() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(60.0)
        raise AssertionError

    async with hook(answer) as url:
        assert await post(url, 0.3) == RecoveryReport(RecoveryResult.TIMEOUT, "no answer within 0.3 s")


@live
async def test_a_webhook_that_never_ends_its_answer_is_read_no_further_than_needed() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(status=500)
        await reply.prepare(request)
        for _ in range(10_000):
            await reply.write(b"x" * 65536)
        return reply

    async with hook(answer) as url:
        report = await post(url)
    assert (report.result, len(report.output)) == (RecoveryResult.FAILED, actions.ANSWER_KEPT)


@live
async def test_a_webhook_is_called_where_it_was_configured_and_nowhere_else() -> None:
    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/elsewhere")

    async with hook(answer) as url:
        report = await post(url)
    assert (report.result, report.detail) == (RecoveryResult.FAILED, "it answered 307")


@live
async def test_a_webhook_that_nobody_serves_is_a_failure() -> None:
    report = await post("http://127.0.0.1:1/hook")
    assert report.result is RecoveryResult.FAILED
    assert "could not be called" in report.detail


# The log.


@live
async def test_the_log_has_a_line_for_each_entry_and_is_only_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("what was there\n")
    await asyncio.gather(*(plan.record(str(path), {"n": n, "text": "x" * 5000}) for n in range(20)))
    first, *lines = path.read_text().splitlines()
    assert first == "what was there"
    assert sorted(json.loads(line)["n"] for line in lines) == list(range(20))


@live
async def test_a_line_is_on_the_disk_before_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr("cellgate.proxy.extras.operator.plan.os.fsync", note)
    path = tmp_path / "audit.jsonl"
    await plan.record(str(path), {"n": 1})
    assert path.stat().st_size == synced[0]
    assert len(synced) == 2, "the folder as well, for a new file"


@live
async def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await plan.record(str(tmp_path / "no" / "audit"), {})
    with pytest.raises(OSError, match="No space"):
        await plan.record("/dev/full", {})


@live
async def test_a_disk_that_takes_for_ever_does_not_hold_up_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("cellgate.proxy.extras.operator.plan.WRITE_S", 0.1)
    with pytest.raises(OSError, match=r"not written within 0\.1 s"):
        await plan.record(str(pipe), {})
    # Lets the thread go.
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
