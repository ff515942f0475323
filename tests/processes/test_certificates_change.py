"""A gate whose certificates, tokens and configuration change while it is used."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from loadtests.simunit.process import SimUnit
from tests.extras import ONE_OR_TWO_WORKERS
from tests.real.certificates import Certificate, authority, signed_by
from tests.wire.process import ROOT, GateProcess, eventually, metrics

CHANGES = 4


@pytest.fixture(scope="module")
def unit() -> Iterator[SimUnit]:
    (started,) = SimUnit.start_all(["a"], followers=0)
    yield started
    started.stop()


class Volume:
    """A mounted secret, as Kubernetes swaps it: a link to a folder, and links through it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._versions = 0

    def put(self, made: Certificate, key: str) -> None:
        """The next version."""
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        shutil.copyfile(made.cert, version / "tls.crt")
        shutil.copyfile(key, version / "tls.key")
        (self._folder / "next").symlink_to(version.name)
        os.replace(self._folder / "next", self._folder / "..data")
        for name in ("tls.crt", "tls.key"):
            if not (self._folder / name).is_symlink():
                (self._folder / name).symlink_to(f"..data/{name}")

    def keys(self) -> dict[str, str]:
        """The section `tls` that names them."""
        return {"cert": f"{self._folder}/tls.crt", "key": f"{self._folder}/tls.key"}


class Knocking(threading.Thread):
    """Connects all the time, and notes whose certificate it saw."""

    def __init__(self, port: int, ca: Certificate) -> None:
        super().__init__()
        self._port, self._tls = port, ssl.create_default_context(cafile=ca.cert)
        self.seen: list[str] = []
        self.failed: list[str] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            client = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls, timeout=5)
            try:
                client.connect()
                self.seen.append(_name(client))
                client.request("GET", "/v1/models")
                assert client.getresponse().status == 200
            except (OSError, AssertionError) as error:
                self.failed.append(repr(error))
            finally:
                client.close()


def has_refused(gate: GateProcess, times: int) -> bool:
    return gate.log.count("certificates not reloaded") >= times


def all_saw(knocking: list[Knocking], name: str) -> bool:
    return all(each.seen[-4:] == [name] * 4 for each in knocking)


def _name(client: http.client.HTTPSConnection) -> str:
    found = re.search(r"'commonName', '(\w+)'", str(client.sock.getpeercert()))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
def test_no_handshake_fails_while_certificates_change(unit: SimUnit, tmp_path: Path, workers: int) -> None:
    ca = authority(tmp_path)
    made = [signed_by(ca, tmp_path, f"gate{number}") for number in range(CHANGES)]
    volume = Volume(tmp_path / "secret")
    volume.put(made[0], made[0].key)
    with GateProcess(tmp_path, {"a": unit.url}, workers=workers, tls=volume.keys()) as gate:
        gate.until_up("a")
        knocking = [Knocking(gate.port, ca) for _ in range(4)]
        for each in knocking:
            each.start()
        try:
            for number, certificate in enumerate(made):
                volume.put(certificate, made[number - 1].key)
                assert number == 0 or eventually(partial(has_refused, gate, number))
                volume.put(certificate, certificate.key)
                assert eventually(partial(all_saw, knocking, f"gate{number}"))
        finally:
            for each in knocking:
                each.over.set()
            for each in knocking:
                each.join()
        assert [each.failed for each in knocking] == [[]] * 4
        assert min(len(each.seen) for each in knocking) > 20
        assert re.search(r'reloads_total\{result="refused",what="certificates"\} [1-9]', metrics(gate))


def ask(gate: GateProcess, words: list[str], **environ: str) -> tuple[int, str]:
    """What a command prints, asked of the gate."""
    command = [sys.executable, "-m", "cellgate", *words, "--admin", f"127.0.0.1:{gate.admin_port}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environ}, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", ONE_OR_TWO_WORKERS)
def test_a_new_admin_token_counts_at_once_and_reload_says_what_changed_or_what_is_wrong(
    unit: SimUnit, tmp_path: Path, workers: int
) -> None:
    (token := tmp_path / "token").write_text("first")
    with GateProcess(tmp_path, {"a": unit.url}, workers=workers, admin_token_file=str(token)) as gate:
        gate.until_up("a")
        assert ask(gate, ["units"], CELLGATE_ADMIN_TOKEN="first")[0] == 0
        token.write_text("second")
        assert eventually(lambda: "a new file" in gate.log)
        code, said = ask(gate, ["units"], CELLGATE_ADMIN_TOKEN="first")
        assert (code, "not the gate's admin token" in said) == (1, True)
        gate.configure({"a": unit.url, "b": "http://127.0.0.1:9"})
        reload = partial(ask, gate, ["reload"], CELLGATE_ADMIN_TOKEN="second")
        assert reload() == (0, "configuration read again: +b\n")
        assert list(gate.units()) == ["a", "b"]
        gate.configure({"a": "nonsense"})
        code, said = reload()
        assert code == 2
        assert "cells[0].units[0].url of unit a: expected http://HOST:PORT" in said
        assert eventually(lambda: "configuration not reloaded" in gate.log)
        assert list(gate.units()) == ["a", "b"]
        assert 'reloads_total{result="refused",what="configuration"} 1.0' in metrics(gate)


def test_operators_show_a_certificate(unit: SimUnit, tmp_path: Path) -> None:
    ca = authority(tmp_path)
    gate_cert, operator = (signed_by(ca, tmp_path, name) for name in ("gate", "operator"))
    (both := tmp_path / "both.pem").write_text(
        Path(operator.cert).read_text() + Path(operator.key).read_text()
    )
    tls = {"admin_cert": gate_cert.cert, "admin_key": gate_cert.key, "admin_client_ca": ca.cert}
    with GateProcess(tmp_path, {"a": unit.url}, tls=tls) as gate:
        gate.until_up("a")
        by_certificate = {"CELLGATE_ADMIN_CA": ca.cert, "CELLGATE_ADMIN_CERT": str(both)}
        assert ask(gate, ["drain", "a"], **by_certificate)[0] == 0
        assert ask(gate, ["units"])[0] == 0
        code, said = ask(gate, ["units"], CELLGATE_ADMIN_CA=str(tmp_path / "none.pem"))
        assert (code, "CELLGATE_ADMIN_CA" in said) == (1, True)
