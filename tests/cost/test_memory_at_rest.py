"""What a gate at rest has imported: modules are most of its memory before the first stream.

What is named here takes 1 to 20 MB, and is for few gates or for a moment: it is imported where it is needed.
"""

from __future__ import annotations

import subprocess
import sys

FOR_FEW = {
    "boto3",
    "h2",
    "importlib.metadata",
    "kubernetes_asyncio",
    "opentelemetry",
    "cellgate.extras.workers",
    "pydantic",
    "redis",
    "rich",
    "yaml",
}

_REST = """
import os, sys, asyncio
from cellgate.proxy import app
from cellgate.proxy.cli import main

def end():
    print(*sys.modules)
    sys.stdout.flush()
    os._exit(0)

app.calm_the_collector = lambda: asyncio.get_running_loop().call_soon(end)
main.main(["serve", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--unit=http://127.0.0.1:1"])
"""


def test_a_gate_at_rest_has_imported_nothing_that_most_gates_do_not_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REST], capture_output=True, text=True, check=True, timeout=60
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert "cellgate.proxy.app" in imported
    assert imported & FOR_FEW == set()
