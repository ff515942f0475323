"""A real vLLM engine that passes KV blocks to others by NIXL, on this machine's CPU."""

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson

from loadtests.kit.processes import free_port
from loadtests.vllm.install import MODEL, ROOT, VENV, stamp, step, write_stamp
from loadtests.vllm.single import running
from loadtests.vllm.unit import HOST, MODEL_NAME

PACKAGES = ROOT / ".run" / "nixl"
"""Beside the venv of vLLM: other tools use that one without it."""
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def set_up() -> None:
    """Install NIXL, once. Raises VllmUnitError."""
    wanted = " ".join(NIXL)
    if stamp(PACKAGES) != wanted:
        pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
        step("install NIXL", [*pip, "--target", str(PACKAGES), *NIXL])
        write_stamp(PACKAGES, wanted)


@asynccontextmanager
async def serving(port: int) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """The engine, whose API is on `port`. None of its processes is left afterwards."""
    # Each engine has some fifty threads that spin: without this the gate beside them gets no processor.
    command = ["nice", "-n", "19", str(VENV / "bin" / "vllm"), "serve", str(MODEL)]
    command += ["--served-model-name", MODEL_NAME]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", "4096", "--enforce-eager"]
    command += ["--block-size", "32", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", orjson.dumps(_TRANSFER).decode()]
    environ = {
        "PYTHONPATH": str(PACKAGES),
        "PYTHONPYCACHEPREFIX": str(ROOT / ".run" / "pycache"),
        "UCX_TLS": "tcp,self,sm",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    async with running(command, environ, port, "/health") as process:
        yield process
