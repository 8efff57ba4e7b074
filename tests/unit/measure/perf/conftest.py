"""What several tests of measurements need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def senders_import_no_test_runner() -> Iterator[None]:
    """Keep sending processes from importing pytest as the main module of their parent: half of their start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "__spec__", None)
        patch.delattr(sys.modules["__main__"], "__file__")
        yield


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
