"""One real vLLM engine without followers, for as long as somebody needs it."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from loadtests.kit import processes
from loadtests.vllm.install import MODEL, VENV
from loadtests.vllm.unit import ENVIRONMENT, HEALTH_TIMEOUT_S, HOST, MODEL_NAME
from loadtests.wire.blocking import answers

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


@asynccontextmanager
async def serving(
    options: Sequence[str], environ: Mapping[str, str] | None = None, model: Path = MODEL
) -> AsyncIterator[str]:
    """`vllm serve` that answers at the URL. None of its processes is left afterwards."""
    port = processes.free_port()
    async with running(serve_command(options, port, model), environ or {}, port, "/health"):
        yield f"http://{HOST}:{port}"


def serve_command(options: Sequence[str], port: int, model: Path) -> list[str]:
    """What starts an engine with this model."""
    command = [str(VENV / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL_NAME]
    return [
        *command,
        *("--host", HOST, "--port", str(port), "--max-model-len", "4096", "--enforce-eager"),
        *options,
    ]


@asynccontextmanager
async def running(
    command: list[str], environ: Mapping[str, str], port: int, ready: str
) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """An engine, from when its path `ready` answers 200. None of its processes is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        log = Path(folder) / "engine.log"
        process = start(command, {**os.environ, **ENVIRONMENT, **environ}, log)
        try:
            await until_ready(process, f"http://{HOST}:{port}{ready}", log)
            yield process
        finally:
            await asyncio.to_thread(end, process)


def start(command: list[str], environ: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start an engine, with a session of its own, that writes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)


async def until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Wait until `url` answers 200. Raises RuntimeError when the engine has ended, and TimeoutError."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await asyncio.to_thread(answers, url, silence_s=HEALTH_TIMEOUT_S):
            if process.poll() is not None:
                raise RuntimeError(
                    f"the engine ended with {process.returncode}; it printed:\n{processes.tail(log)}"
                )
            await asyncio.sleep(1.0)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End the engine and all that it started: they are one session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
