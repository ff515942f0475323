"""nginx with the project's own configuration, before gates of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.real.programs import ROOT, find, free_port, running, tail

CONFIGURATION = ROOT / "deploy" / "ingress" / "nginx.conf"


@contextmanager
def nginx(folder: Path, gates: list[int]) -> Iterator[int]:
    """nginx before gates on these ports; gives its port."""
    program, port, log = find("nginx"), free_port(), folder / "nginx.log"
    text = CONFIGURATION.read_text()
    addresses = {f"10.0.0.{number}:8000": f"127.0.0.1:{gate}" for number, gate in enumerate(gates, 1)}
    places = "".join(
        f"    {kind}_temp_path {folder};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    replacements = {
        **addresses,
        "listen 8080": f"listen 127.0.0.1:{port}",
        "worker_processes auto;": f"worker_processes 1;\npid {folder}/nginx.pid;\nerror_log stderr;",
        "http {\n": f"http {{\n{places}",
    }
    for before, after in replacements.items():
        assert before in text, before
        text = text.replace(before, after)
    file = folder / "nginx.conf"
    file.write_text(text)
    command = [program, "-p", str(folder), "-e", "stderr", "-c", str(file), "-g", "daemon off;"]
    with running(command, log):
        try:
            yield port
        except BaseException:
            print(tail(log))
            raise
