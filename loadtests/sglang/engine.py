"""One real SGLang engine, for as long as somebody needs it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtests.kit import processes
from loadtests.sglang.install import VENV
from loadtests.vllm.install import MODEL
from loadtests.vllm.processes import living
from loadtests.vllm.single import running
from loadtests.vllm.unit import HOST, MODEL_NAME

SERVER = str(Path(__file__).with_name("server.py"))
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
KV_TOKENS = 8192
# In float32 the batch that a prompt is computed in hardly ever decides between two tokens.
OPTIONS = f"""
    --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch
    --grammar-backend none --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled
    --disable-overlap-schedule --disable-custom-all-reduce --skip-server-warmup --sleep-on-idle
    --max-total-tokens {KV_TOKENS} --mem-fraction-static 0.3 --context-length 4096
    --enable-metrics --enable-cache-report
""".split()


@dataclass(frozen=True, slots=True)
class Engine:
    """Where it answers, and the process group of all its processes."""

    url: str
    group: int

    def schedulers(self) -> list[int]:
        """The pids of those that compute: one for each data parallel rank."""
        return [each.pid for each in living({self.group}) if each.title.startswith("sglang::scheduler")]


@asynccontextmanager
async def serving(options: Sequence[str], environ: Mapping[str, str] | None = None) -> AsyncIterator[Engine]:
    """An engine that answers at the URL. None of its processes is left afterwards."""
    port = processes.free_port()
    command = [str(VENV / "bin" / "python"), SERVER, "--model-path", str(MODEL)]
    command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), *OPTIONS, *options]
    async with running(command, ENVIRONMENT | dict(environ or {}), port, "/ready") as process:
        yield Engine(f"http://{HOST}:{port}", process.pid)
