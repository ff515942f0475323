"""A real vLLM engine whose processes are killed or stopped, all at once, and that is started again."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from loadtests.kit import processes
from loadtests.vllm.single import end, serve_command, start, until_ready
from loadtests.vllm.unit import ENVIRONMENT, HOST

_TOLD_LINES = 80


class KillableEngine:
    """`vllm serve` at `url`, always on the same port. A context manager: inside it runs."""

    def __init__(
        self, name: str, options: Sequence[str], model: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._environ = {**os.environ, **ENVIRONMENT, **(environ or {})}
        self._port = processes.free_port()
        self._command = serve_command(options, self._port, model)
        self._folder = tempfile.TemporaryDirectory(prefix="engine-")
        self._log = Path(self._folder.name) / "engine.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{HOST}:{self._port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self.freeze(frozen=False)
            end(self._process)
        self._folder.cleanup()

    async def start(self) -> None:
        """Start it; returns once it is ready."""
        self._process = start(self._command, self._environ, self._log)
        await until_ready(self._process, f"{self.url}/health", self._log)

    def kill(self) -> None:
        """SIGKILL for all of its processes."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def freeze(self, *, frozen: bool) -> None:
        """SIGSTOP for all of its processes, or SIGCONT."""
        self._signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def printed(self) -> str:
        """What it printed of errors of its core, which ends all requests when it fails."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(
            [line for line in lines if line.startswith("(EngineCore") and "ERROR" in line][-_TOLD_LINES:]
        )

    def _signal(self, number: int) -> None:
        assert self._process is not None
        try:
            # They are one session of their own.
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
