"""Repositories of models on the Hub, through its cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from conch.core.errors import Code, ConchError
from conch.repository.stores.root import StoreRoot
from conch.repository.stores.urls import parse_url
from tests.unit.checkpoints.fake_hub import FakeHub
from tests.unit.repository.stores.fake_store import CONFIG

FILES = {
    "README.md": b"# Models",
    "models/m/config.pbtxt": CONFIG,
    "models/m/1/model.py": b"one",
    "models/m/2/model.py": b"two",
    "models/m/2/weights.bin": b"w" * 1000,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "PRIVATE_REPO_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    files = {"org/name": dict(FILES), "org/secret": dict(FILES), "org/bert": {"config.json": b"{}"}}
    with FakeHub(files, private={"org/secret": "hidden-token"}).listening() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub


def root(tmp_path: Path, url: str = "hf://org/name/models") -> StoreRoot:
    return StoreRoot(parse_url(url), tmp_path / "cache", pauses=())


def refusal(tmp_path: Path, url: str) -> ConchError:
    with pytest.raises(ConchError) as refused:
        root(tmp_path, url).names()
    assert "\n" not in refused.value.message
    assert "hidden" not in refused.value.message
    return refused.value


def test_model_is_copied_through_the_cache_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    repository = root(tmp_path)
    assert repository.names() == ["m"]
    directory = repository.locate("m", None, None).directory
    assert (directory / "2" / "weights.bin").read_bytes() == b"w" * 1000
    assert sorted(set(hub.fetched)) == ["models/m/2/model.py", "models/m/2/weights.bin", "models/m/config.pbtxt"]
    blobs = {path.stat().st_ino for path in (tmp_path / "hub").glob("*/blobs/*")}
    assert (directory / "2" / "weights.bin").stat().st_ino in blobs


def test_without_the_hub_its_cache_is_read(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = root(tmp_path).locate("m", None, None)
    hub.fetched.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = root(tmp_path)
    assert offline.names() == ["m"]
    located = offline.locate("m", None, None)
    assert (located.directory / "2" / "weights.bin").read_bytes() == b"w" * 1000
    assert hub.fetched == []
    assert online.directory.exists()
    assert "offline mode is on" in refusal(tmp_path, "hf://org/other").message


def test_changed_file_is_another_fingerprint(hub: FakeHub, tmp_path: Path) -> None:
    repository = root(tmp_path)
    before = repository.fingerprints(None)
    hub.files["org/name"]["models/m/2/model.py"] = b"new"
    assert repository.fingerprints(None) != before


def test_checkpoint_is_reported_with_the_command_that_serves_it(hub: FakeHub, tmp_path: Path) -> None:
    assert "conch serve org/bert" in refusal(tmp_path, "hf://org/bert").message
    assert "use hf://org/name/models" in refusal(tmp_path, "hf://org/name").message


def test_missing_or_private_repository_is_reported(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(tmp_path, "hf://org/secret/models").code is Code.INVALID_ARG
    assert refusal(tmp_path, "hf://org/name@v9").code is Code.INVALID_ARG
    monkeypatch.setenv("HF_TOKEN", "hidden-token")
    assert root(tmp_path, "hf://org/secret/models").names() == ["m"]


def test_hub_that_cannot_be_reached_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert refusal(tmp_path, "hf://org/name").code is Code.UNAVAILABLE
