"""Certificates for tests of TLS: each self-signed, for this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make(folder: Path, *names: str) -> Path:
    """Write ``<name>.pem`` and ``<name>.key`` for each name into ``folder``."""
    for name in names:
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem",
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
    return folder
