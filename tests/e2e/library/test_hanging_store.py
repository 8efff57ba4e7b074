"""A store that accepts requests and never answers them leaves everything else alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import conch
from conch.core.errors import ConchError
from conch.repository import roots, scan
from conch.repository.stores.root import StoreRoot
from conch.repository.stores.urls import StoreUrl
from tests.events import TIMEOUT
from tests.models import write
from tests.unit.repository.stores.fake_store import FakeStore

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one)]) for one in inputs]
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
FILES = {"config.pbtxt": CONFIG, "1/model.py": MODEL}


class HangingStore(FakeStore):
    """The store of every root; it has the models ``stored`` and ``other``."""

    def __init__(self) -> None:
        super().__init__(
            {f"{name}/{path}": text.encode() for name in ("stored", "other") for path, text in FILES.items()}
        )
        self._roots: list[StoreRoot] = []

    def open(self, url: StoreUrl, cache: Path, *, whole: bool = False) -> StoreRoot:
        self._roots.append(StoreRoot(url, cache, whole=whole, opener=lambda url: self, pauses=()))
        return self._roots[-1]

    def hang(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer no more, which its users notice soon."""
        self.answers.clear()
        monkeypatch.setattr(scan, "LISTING_SECONDS", 0.1)
        for root in self._roots:
            root.timeout = 0.5

    def go_on(self) -> None:
        self.answers.set()
        for root in self._roots:
            root.timeout = TIMEOUT


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStore]:
    store = HangingStore()
    monkeypatch.setattr(roots, "StoreRoot", store.open)
    yield store
    store.answers.set()


@pytest.fixture
def options(tmp_path: Path, store: HangingStore) -> dict[str, object]:
    local = tmp_path / "models"
    write(local, "local", CONFIG, {"1/model.py": MODEL})
    return {
        "model_repository": [str(local), "s3://bucket/models"],
        "repository_cache_directory": str(tmp_path / "cache"),
    }


@pytest.mark.parametrize("mode", ["explicit", "on-demand"])
async def test_models_load_and_the_index_answers_while_a_store_hangs(
    options: dict[str, object], store: HangingStore, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    async with conch.AsyncServer(**options, model_control_mode=mode) as server:
        await server.load("stored")
        store.hang(monkeypatch)
        indexes = [asyncio.create_task(server.models()) for _ in range(10)]
        await server.load("local")
        assert (await server.infer("local", {"x": [1]}))["y"] == [1]
        assert (await server.infer("stored", {"x": [2]}))["y"] == [2]
        for index in await asyncio.gather(*indexes):
            assert [entry["name"] for entry in index] == ["local", "other", "stored"]
        with pytest.raises(ConchError, match="Poll failed for model directory 'other': "):
            await server.load("other")
        store.go_on()
        if mode == "explicit":
            await server.load("other")
            assert (await server.infer("other", {"x": [3]}))["y"] == [3]
