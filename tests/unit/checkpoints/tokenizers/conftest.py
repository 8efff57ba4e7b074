from __future__ import annotations

from pathlib import Path

import pytest

from tests.text_checkpoints import write


@pytest.fixture(scope="module", params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of an encoder that takes 64 tokens."""
    return write(tmp_path_factory.mktemp(request.param), "AutoModel", family=request.param)
