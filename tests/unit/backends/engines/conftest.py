"""What tests of engines have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small Llama."""
    from tests.unit.backends.engines.transformers.models import write

    return write(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def module() -> Any:
    """A small Llama in PyTorch."""
    from tests.unit.backends.engines.openvino.models import llama

    return llama()


@pytest.fixture(scope="module")
def directory(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as an OpenVINO export."""
    from tests.unit.backends.engines.openvino.models import export

    folder: Path = tmp_path_factory.mktemp("export")
    export(module, folder)
    return folder
