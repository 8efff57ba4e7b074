"""What several tests of measurements need."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for ``localhost`` that is self-signed, with its key."""
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", file.with_name("key.pem"),
            "-out", file,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return file
