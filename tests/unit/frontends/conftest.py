"""What the tests of all front ends share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import certificates as certificate_files


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``server.pem``, ``client.pem`` and their keys."""
    return certificate_files.make(tmp_path_factory.mktemp("certificates"), "server", "client")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counts free objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
