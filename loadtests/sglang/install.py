"""The venv that SGLang runs in: small, because it shares the packages of vLLM's.

SGLang asks for other versions of some packages, and for CUDA's; on a CPU it starts without them (server.py).
"""

import sys
from pathlib import Path

from loadtests.vllm import install as vllm

VENV = vllm.ROOT / ".venv-sglang"
LOCK = Path(__file__).parent / "requirements.lock"


def set_up() -> None:
    """Make what is missing. Raises VllmUnitError naming the step that failed and its log."""
    vllm.set_up()
    made_from = vllm.digest(LOCK.read_bytes(), vllm.stamp(vllm.VENV).encode())
    if vllm.stamp(VENV) == made_from:
        return
    print(f"Setting up SGLang in {VENV.name}, once. The log is {vllm.LOG}", flush=True)
    python = str(VENV / "bin" / "python")
    vllm.step("make the venv", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    (shared,) = (vllm.VENV / "lib").glob("python3.*/site-packages")
    (own,) = (VENV / "lib").glob("python3.*/site-packages")
    (own / "vllm.pth").write_text(f"{shared}\n")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    vllm.step("install SGLang", [*pip, "--require-hashes", "--no-deps", "-r", str(LOCK)])
    vllm.write_stamp(VENV, made_from)
