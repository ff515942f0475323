"""A real llama.cpp server on 127.0.0.1: `llamacpp_server.py MODEL PORT SLOTS`, in the venv .venv-llamacpp.

It ends with its process. One thread computes, SLOTS requests at once, which share the model's context.
"""

from __future__ import annotations

import os
import signal
import sys

import xllamacpp  # type: ignore[import-not-found]


def main(model: str, port: int, slots: int) -> None:
    """Serve until the process is ended."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {"tiny"}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # In 16 bits, or by flash attention, a prompt gets another answer alone than it gets beside others.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.endpoint_metrics = True
    # The usual six are all taken by the requests of a crowd, and then nobody can look at its numbers.
    params.n_threads_http = 8 * slots
    server = xllamacpp.Server(params)
    # At once: the server has a thread that writes its log to the same file.
    os.write(sys.stdout.fileno(), f"listening on {server.listening_address}\n".encode())
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
