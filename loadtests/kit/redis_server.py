"""A real redis-server on a Unix socket of its own, which drills and tests start, kill, freeze and fill."""

import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

from loadtests.kit.processes import start, stop, tail

READY_S = 15.0


class RedisServer:
    """Runs within its context; `options` are its command line, `password` is what `do` has to show."""

    def __init__(self, folder: Path, *options: str, program: str = "redis-server") -> None:
        self._program = program
        self._folder = folder
        self._options = options
        self.socket = folder / "redis.sock"
        self.password: str | None = None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"unix://{self.socket}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.thaw()
            stop(self.process)

    def start(self) -> None:
        """Start it, empty, and wait until it answers. Raises RuntimeError when it does not."""
        command = [self._program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._folder)]
        self.process = start([*command, "--save", "", *self._options], self._folder / "redis.log")
        give_up_at = time.monotonic() + READY_S
        while not self._answers():
            if time.monotonic() > give_up_at:
                stop(self.process)
                raise RuntimeError(f"Redis did not start; it printed:\n{tail(self._folder / 'redis.log')}")
            time.sleep(0.005)

    def kill(self) -> None:
        """As a crash does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """It is there, connected, and silent."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """The end of a freeze."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def do(self, *words: Any) -> Any:
        """The answer to a command."""
        with Redis(unix_socket_path=str(self.socket), socket_timeout=5.0, password=self.password) as client:
            return client.execute_command(*words)

    def _answers(self) -> bool:
        try:
            return bool(self.do("PING"))
        except AuthenticationError:
            return True
        except RedisError:
            return False


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """One that runs in a folder of its own, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, RedisServer(Path(folder)) as server:
        yield server
