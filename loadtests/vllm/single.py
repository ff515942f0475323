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
async def serving(options: Sequence[str], environ: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """`vllm serve` that answers at the URL. None of its processes is left afterwards."""
    port = processes.free_port()
    command = [str(VENV / "bin" / "vllm"), "serve", str(MODEL), "--served-model-name", MODEL_NAME]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", "4096", "--enforce-eager", *options]
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        log = Path(folder) / "vllm.log"
        process = _start(command, os.environ | ENVIRONMENT | dict(environ or {}), log)
        try:
            await _until_healthy(process, port, log)
            yield f"http://{HOST}:{port}"
        finally:
            await asyncio.to_thread(_end, process)


def _start(command: list[str], environ: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)


async def _until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await asyncio.to_thread(
            answers, f"http://{HOST}:{port}/health", silence_s=HEALTH_TIMEOUT_S
        ):
            if process.poll() is not None:
                raise RuntimeError(
                    f"vllm ended with {process.returncode}; it printed:\n{processes.tail(log)}"
                )
            await asyncio.sleep(1.0)


def _end(process: "subprocess.Popen[bytes]") -> None:
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
