"""Other routers before the same units, each as an operator would set it up who wants failures found quickly.

What must stay true: their health checks run once a second, far oftener than their defaults, and retries are
on; nothing else is tuned for or against them.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadtests.drill.dynamo import frontend
from loadtests.kit import processes

ROOT = Path(__file__).resolve().parents[2]
_HAPROXY = """\
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  option http-no-delay
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  retries 2
  option redispatch 1
  retry-on conn-failure empty-response
frontend clients
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  balance leastconn
  option httpchk GET {health}
  default-server check inter {period} fall 2 rise 1{marked_down}
{servers}
"""


def haproxy(urls: Sequence[str], folder: Path) -> list[str]:
    """The port and command of an HAProxy before units. What it takes out, it also cuts off."""
    servers = [f"server s{n} {url.removeprefix('http://')}" for n, url in enumerate(urls)]
    return _haproxy(
        servers, folder, health="/health", period="1s", marked_down=" on-marked-down shutdown-sessions"
    )


def ingress(ports: Sequence[tuple[int, int]], folder: Path) -> list[str]:
    """The same before gates: the port of each, and its admin port."""
    servers = [f"server g{n} 127.0.0.1:{port} port {admin}" for n, (port, admin) in enumerate(ports)]
    return _haproxy(servers, folder, health="/readyz", period="100ms", marked_down="")


def _haproxy(servers: Sequence[str], folder: Path, **settings: str) -> list[str]:
    if shutil.which("haproxy") is None:
        raise RuntimeError("HAProxy is not installed. Type:  apt-get install haproxy")
    port, file = processes.free_port(), folder / "haproxy.cfg"
    file.write_text(
        _HAPROXY.format(port=port, servers="\n".join(f"  {line}" for line in servers), **settings)
    )
    return [str(port), "haproxy", "-db", "-f", str(file)]


def _sglang_router(urls: Sequence[str], _: Path) -> list[str]:
    command = [_python_of("sglang-router"), "-m", "sglang_router.launch_router"]
    return _rust_router(command, urls)


def _smg(urls: Sequence[str], _: Path) -> list[str]:
    return _rust_router([_python_of("smg"), "-m", "smg.launch_router"], urls)


def _vllm_router(urls: Sequence[str], _: Path) -> list[str]:
    program = Path(_python_of("vllm-router")).with_name("vllm-router")
    return _rust_router([str(program)], urls)


def _rust_router(command: Sequence[str], urls: Sequence[str]) -> list[str]:
    """All have the same flags. SMG finds wedged workers by itself, as it does by default."""
    port = str(processes.free_port())
    flags = ["--host", "127.0.0.1", "--port", port, "--policy", "cache_aware"]
    flags += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(processes.free_port())]
    flags += ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"]
    flags += ["--health-failure-threshold", "2", "--health-success-threshold", "1"]
    flags += ["--worker-startup-check-interval", "1", "--request-timeout-secs", "120"]
    return [port, *command, "--worker-urls", *urls, *flags]


def _python_of(name: str) -> str:
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"{name} is not installed. Type:  make .venv-{name}/made")
    return str(python)


Starter = Callable[[Sequence[str], Path], list[str]]
ROUTERS: dict[str, Starter | None] = {
    "cellgate": None,
    "haproxy": haproxy,
    "sglang-router": _sglang_router,
    "smg": _smg,
    "vllm-router": _vllm_router,
    "dynamo": frontend,
}
"""The command of each, behind its port; None: the gates, which `fleet.py` starts."""


@contextmanager
def running(command: Sequence[str], log: Path, ready: str = "/health") -> Iterator[str]:
    """The URL of what one of the functions above has described, while it runs."""
    port, *arguments = command
    with processes.serving(arguments, int(port), ready, log):
        yield f"http://127.0.0.1:{port}"
