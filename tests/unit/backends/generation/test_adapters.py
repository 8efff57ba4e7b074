"""Adapters that clients load: memory within a bound, requests that keep theirs, and files that change."""

from __future__ import annotations

import os
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from safetensors.numpy import save_file

from conch.backends.generation.adapters import AdapterStore, LoadedAdapter
from conch.backends.generation.lora import LoraWeights
from conch.core.errors import Code, ConchError
from tests.unit.backends.generation.fake_engine import FakeEngine

#: The size of an adapter of :func:`write` (bytes).
SIZE = 2 * 4 * 8 * 4


class Engine(FakeEngine):
    """Remembers the keys of attached adapters; refuses those with a layer ``bad``."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[str] = []

    def attach_adapter(self, key: str, adapter: LoraWeights) -> None:
        if "bad" in adapter.layers:
            raise adapter.misfit("bad.lora_A.weight")
        self.attached.append(key)

    def detach_adapter(self, key: str) -> None:
        self.attached.remove(key)


class Adapters:
    """A store for the adapters of a folder, three of which fit the memory, and what it has told its callers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Engine()
        self._commands: Queue = Queue()
        self.store = AdapterStore(self.engine, [folder], self._commands.put, limit=3 * SIZE, max_rank=8)
        self.results: list[ConchError | None] = []
        self.held: dict[str, LoadedAdapter] = {}
        self.errors: list[ConchError] = []

    def load(self, name: str, path: str = "", *, in_place: bool = False) -> ConchError | None:
        count = len(self.results)
        folder = self.store.resolve(path or name)
        self.store.load(name, folder, self.results.append, in_place=in_place)
        while len(self.results) == count:
            self._commands.get(timeout=60)()
        return self.results[-1]

    def acquire(self, request: str, name: str, *, waits: bool = False) -> None:
        """Request an adapter; unless it ``waits``, until it has been read."""

        def ready(adapter: LoadedAdapter | None, error: ConchError | None) -> None:
            if error is not None:
                self.errors.append(error)
            else:
                assert adapter is not None
                self.held[request] = adapter

        count = len(self.errors)
        self.store.acquire(name, ready)
        if waits:
            while not self._commands.empty() or self.store.reading:
                self._commands.get(timeout=60)()
            return
        while request not in self.held and len(self.errors) == count:
            self._commands.get(timeout=60)()

    def release(self, request: str) -> None:
        self.store.release(self.held.pop(request))

    @property
    def names(self) -> list[str]:
        """The adapters in memory."""
        return sorted(key.partition("\0")[0] for key in self.engine.attached)


def write(folder: Path, *, layer: str = "layer", rank: int = 4) -> None:
    folder.mkdir(exist_ok=True)
    shapes = {"A": (rank, 8), "B": (8, rank)}
    tensors = {f"{layer}.lora_{side}.weight": np.ones(shape, np.float32) for side, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    for name in "abcde":
        write(tmp_path / name)
    return Adapters(tmp_path)


def test_the_least_recently_used_leave_the_memory_and_come_back(adapters: Adapters) -> None:
    for name in "abcd":
        assert adapters.load(name) is None
    assert adapters.engine.adapters == ("red", *"abcd")
    assert adapters.names == ["b", "c", "d"]
    adapters.acquire("1", "b")
    adapters.release("1")
    adapters.acquire("2", "a")
    assert adapters.names == ["a", "b", "d"]


def test_requests_in_flight_keep_their_adapters_and_others_wait_in_order(adapters: Adapters) -> None:
    for name in "abcde":
        assert adapters.load(name) is None
    for request, name in (("1", "a"), ("2", "b"), ("3", "c")):
        adapters.acquire(request, name)
    adapters.acquire("4", "d", waits=True)
    adapters.acquire("5", "a", waits=True)  # in memory, but another request has waited for longer
    assert adapters.names == ["a", "b", "c"]
    assert sorted(adapters.held) == ["1", "2", "3"]
    adapters.release("2")
    assert adapters.names == ["a", "c", "d"]
    assert sorted(adapters.held) == ["1", "3", "4", "5"]


def test_an_unloaded_adapter_leaves_with_its_last_request(adapters: Adapters) -> None:
    adapters.load("a")
    adapters.acquire("1", "a")
    adapters.store.unload("a")
    assert adapters.names == ["a"]
    assert adapters.engine.adapters == ("red",)
    adapters.acquire("2", "a")
    assert [error.code for error in adapters.errors] == [Code.NOT_FOUND]
    adapters.release("1")
    assert adapters.names == []
    for name in ("a", "red"):
        with pytest.raises(ConchError, match="cannot be unloaded"):
            adapters.store.unload(name)


def test_other_matrices_have_another_key(adapters: Adapters) -> None:
    adapters.load("a")
    adapters.acquire("1", "a")
    [key] = adapters.engine.attached
    adapters.release("1")
    for name in "bcd":
        adapters.load(name)
    adapters.acquire("2", "a")
    assert adapters.held["2"].key == key
    adapters.release("2")
    for name in "bcd":
        adapters.acquire(name, name)
        adapters.release(name)
    write(adapters.folder / "a", rank=2)
    os.utime(adapters.folder / "a/adapter_model.safetensors", (1, 1))
    adapters.acquire("3", "a")
    assert adapters.held["3"].key != key
    adapters.load("a", "b", in_place=True)
    adapters.acquire("4", "a")
    assert adapters.held["4"].key not in (key, adapters.held["3"].key)


def test_adapters_that_cannot_be_loaded_are_refused(adapters: Adapters, tmp_path: Path) -> None:
    adapters.load("a")
    write(adapters.folder / "bad", layer="bad")
    write(adapters.folder / "high", rank=9)
    adapters.store.register("gone", adapters.folder / "gone")
    for name, message in {
        "bad": "LoRA adapter 'bad' has weights 'bad.lora_A.weight' that cannot be added to the model",
        "high": "LoRA adapter 'high' has rank 9; the parameter 'max_lora_rank' allows 8",
    }.items():
        error = adapters.load("new", name)
        assert error is not None and (error.code, error.public) == (Code.INVALID_ARG, message)
    large = AdapterStore(adapters.engine, [tmp_path], lambda command: None, limit=SIZE - 1)
    with pytest.raises(ConchError, match=r"needs \d+ bytes; the parameter 'lora_cache_bytes' allows 255"):
        large.read(adapters.folder / "a")
    for name, message in {"a": "has already been loaded", "red": "'lora_modules'"}.items():
        error = adapters.load(name, "b")
        assert error is not None and message in error.message
    adapters.acquire("1", "gone")
    assert "has no adapter_model.safetensors" in adapters.errors[-1].message
    adapters.acquire("2", "a")
    assert adapters.names == ["a"]


def test_only_the_named_folders_have_adapters(adapters: Adapters, tmp_path: Path) -> None:
    outside = tmp_path.with_name("outside")
    outside.mkdir(exist_ok=True)
    (tmp_path / "linked").symlink_to(outside)
    (tmp_path / "file").mkdir()
    (tmp_path / "file/adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in ("..", "a/../../outside", str(outside), "linked", "file", "/", "a\0", "a" * 5000):
        with pytest.raises(ConchError, match="is in none of the folders") as refused:
            adapters.store.resolve(path)
        assert refused.value.param == "lora_path"
    assert adapters.store.resolve("a") == adapters.store.resolve(str(tmp_path / "a"))
    with pytest.raises(ConchError, match="its parameter 'lora_folders' must name") as refused:
        AdapterStore(adapters.engine, [], lambda command: None).resolve("a")
    assert refused.value.code is Code.UNSUPPORTED
