"""Certificates for a test: an authority, and who it vouches for. Good for nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_NEW = ("openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec", "-pkeyopt")
_CURVE = "ec_paramgen_curve:prime256v1"


class Certificate(NamedTuple):
    """The files of a certificate and of its key, PEM."""

    cert: str
    key: str


def authority(folder: Path, name: str = "ca") -> Certificate:
    """One that signs others."""
    return _make(folder, name, "-subj", f"/CN={name}")


def signed_by(ca: Certificate, folder: Path, name: str) -> Certificate:
    """One for 127.0.0.1, for servers and clients."""
    signing = ("-CA", ca.cert, "-CAkey", ca.key, "-addext", "subjectAltName=IP:127.0.0.1")
    return _make(folder, name, "-subj", f"/CN={name}", *signing)


def _make(folder: Path, name: str, *words: str) -> Certificate:
    made = Certificate(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    command = [*_NEW, _CURVE, *words, "-keyout", made.key, "-out", made.cert]
    subprocess.run(command, check=True, capture_output=True)
    return made
