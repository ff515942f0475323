"""Real engines that several files of tests use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real.llamacpp import SLOTS, LlamaServer
from tests.real.tiny_gguf import write_model
from tests.wire.process import GateProcess


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tiny model."""
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(file)
    return file


@pytest.fixture
def servers(model: Path, tmp_path: Path) -> Iterator[dict[str, LlamaServer]]:
    """Two llama.cpp servers, `a` and `b`."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(LlamaServer(model, tmp_path / f"{name}.log")) for name in ("a", "b")}


@pytest.fixture
def gate(servers: dict[str, LlamaServer], tmp_path: Path) -> Iterator[GateProcess]:
    """A gate before them that was told where they are, and how many requests each answers at once."""
    urls = {name: server.url for name, server in servers.items()}
    process = GateProcess(tmp_path, urls)
    process.configure(urls, max_in_flight=SLOTS)
    with process:
        process.until_up(*servers)
        yield process
