"""Certificates that change while the gate runs: who shows which, and what becomes of bad files."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from cellgate.proxy.config.settings import Tls
from cellgate.proxy.observe.counters import RELOADS, TALLIES
from cellgate.proxy.process.tls import LiveTls
from tests.real.certificates import Certificate, authority, signed_by
from tests.wire.stage import live


class Files:
    """The files that a gate has, and two authorities that can fill them."""

    def __init__(self, folder: Path) -> None:
        self.ours = Certificate(str(folder / "tls.crt"), str(folder / "tls.key"))
        self.authorities = [authority(folder, f"ca{number}") for number in (0, 1)]
        self.signed = [signed_by(ca, folder, f"gate{number}") for number, ca in enumerate(self.authorities)]
        self.put(0)

    def put(self, number: int) -> None:
        """Replace certificate and key."""
        for source, target in zip(self.signed[number], self.ours, strict=True):
            shutil.copyfile(source, target)

    def put_a_mismatch(self) -> None:
        """A certificate without its key."""
        shutil.copyfile(self.signed[1].cert, self.ours.cert)
        shutil.copyfile(self.signed[0].key, self.ours.key)

    def trusting(self, number: int) -> ssl.SSLContext:
        """A client that knows one authority."""
        return ssl.create_default_context(cafile=self.authorities[number].cert)


async def shown(port: int, tls: ssl.SSLContext) -> bool:
    """Whether who listens there has a certificate that `tls` accepts."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    except ssl.SSLError:
        return False
    writer.close()
    return True


def settle(tls: LiveTls) -> None:
    """Time passes."""
    tls.tick(0.0)
    tls.tick(0.0)


@live
async def test_a_new_certificate_is_shown_to_the_next_client(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = Files(tmp_path_factory.mktemp("tls"))
    tls = LiveTls(Tls(cert=files.ours.cert, key=files.ours.key))
    server = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, "127.0.0.1", 0, ssl=tls.clients()
    )
    port = server.sockets[0].getsockname()[1]
    old, new = files.trusting(0), files.trusting(1)
    assert (await shown(port, old), await shown(port, new)) == (True, False)
    files.put_a_mismatch()
    refused = TALLIES[RELOADS, "certificates", "refused"]
    settle(tls)
    assert TALLIES[RELOADS, "certificates", "refused"] == refused + 1
    assert (await shown(port, old), await shown(port, new)) == (True, False)
    files.put(1)
    settle(tls)
    assert (await shown(port, old), await shown(port, new)) == (False, True)
    server.close()


def test_an_authority_that_is_replaced_is_no_longer_trusted(tmp_path: Path) -> None:
    files = Files(tmp_path)
    ca = tmp_path / "ca.crt"
    shutil.copyfile(files.authorities[0].cert, ca)
    tls = LiveTls(Tls(ca=str(ca)))
    before = tls.units()
    assert tls.units() is before
    shutil.copyfile(files.authorities[1].cert, ca)
    settle(tls)
    assert tls.units() is not before
    (known,) = tls.units().get_ca_certs()
    assert "'ca1'" in str(known["subject"])


def test_other_files_are_taken_with_the_configuration_and_clients_keep_tls(tmp_path: Path) -> None:
    files = Files(tmp_path)
    tls = LiveTls(Tls(cert=files.ours.cert, key=files.ours.key))
    tls.take(Tls(ca=files.authorities[0].cert))
    assert tls.clients() is not None
    assert len(tls.units().get_ca_certs()) == 1


def test_a_quiet_process_reports_nothing(tmp_path: Path) -> None:
    files = Files(tmp_path)
    tls = LiveTls(Tls(cert=files.ours.cert, key=files.ours.key), is_quiet=True)
    before = dict(TALLIES)
    files.put_a_mismatch()
    settle(tls)
    assert before == TALLIES
