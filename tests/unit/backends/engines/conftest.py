"""What tests of engines have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small Llama."""
    from tests.unit.backends.engines.transformers_models import write

    return write(tmp_path_factory.mktemp("llama"), "llama")
