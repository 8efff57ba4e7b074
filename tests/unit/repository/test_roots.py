"""Where copies are kept, and repositories made of directories and stores."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest

from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError
from conch.repository import roots
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.model_files import ModelFiles
from conch.repository.roots import cache_directory, parse_location
from conch.repository.scan import ModelRepository
from conch.repository.stores.root import StoreRoot
from conch.repository.stores.urls import StoreUrl, parse_url
from conch.server.models.polling import Changes, Watch
from tests.unit.repository.stores.fake_store import CONFIG, URL, FakeStore, two_versions


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """What every URL is a repository in."""
    store = two_versions()

    def opened(url: StoreUrl, cache: Path, *, whole: bool = False) -> StoreRoot:
        return StoreRoot(url, cache, whole=whole, opener=lambda url: store, pauses=())

    monkeypatch.setattr(roots, "StoreRoot", opened)
    return store


def local(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_bytes(CONFIG)
    return folder


def test_place_is_a_path_or_a_url() -> None:
    assert parse_location("models/a") == Path("models/a")
    assert parse_location(Path("models")) == Path("models")
    assert parse_location("s3://bucket/models") == URL
    with pytest.raises(ConchError):
        parse_location("http://host/models")


def test_cache_is_what_was_chosen_or_what_triton_calls_it_or_the_users() -> None:
    mounts = {
        "TRITON_AWS_MOUNT_DIRECTORY": "/aws",
        "TRITON_GCS_MOUNT_DIRECTORY": "/gcs",
        "TRITON_AZURE_MOUNT_DIRECTORY": "/az",
    }
    assert cache_directory(URL, "/chosen", mounts) == Path("/chosen")
    urls = [URL, parse_url("gs://bucket"), parse_url("as://account/container")]
    assert [cache_directory(url, "", mounts) for url in urls] == [Path("/aws"), Path("/gcs"), Path("/az")]
    cache = {**mounts, "XDG_CACHE_HOME": "/cache"}
    assert cache_directory(parse_url("hf://org/name"), "", cache) == Path("/cache/conch/repositories")
    assert cache_directory(URL, "", {}) == Path.home() / ".cache" / "conch" / "repositories"


def test_directories_and_stores_are_one_repository(store: FakeStore, tmp_path: Path) -> None:
    repository = ModelRepository([local(tmp_path / "here", "l"), URL], cache=str(tmp_path / "cache"))
    assert repository.names() == ["l", "m"]
    assert repository.describe("l").versions == (1,)
    files = repository.describe("m")
    assert files.versions == (1, 2)
    assert files.fingerprint == repository.fingerprint("m")
    assert files.directory.is_relative_to(tmp_path / "cache")
    assert repository.shown(str(files.config_path)) == "s3://bucket/models/m/config.pbtxt"
    with pytest.raises(NotFoundError):
        repository.describe("x")


def test_model_of_a_directory_and_a_store_is_not_unique(store: FakeStore, tmp_path: Path) -> None:
    here = local(tmp_path / "here", "m")
    repository = ModelRepository([here, URL], cache=str(tmp_path / "cache"))
    with pytest.raises(NotUniqueError):
        repository.describe("m")
    assert repository.fingerprints() == {"m": None}
    named = ModelRepository([here, URL], namespacing=True, cache=str(tmp_path / "cache"))
    assert named.names() == [f"{here}::m", "s3://bucket/models::m"]
    assert named.describe("s3://bucket/models::m").namespace == "s3://bucket/models"
    assert named.keys("m") == named.names()


def test_models_of_a_directory_load_while_a_store_is_away(store: FakeStore, tmp_path: Path) -> None:
    repository = ModelRepository([local(tmp_path / "here", "l"), URL], cache=str(tmp_path / "cache"))
    repository.open()
    store.failing = ConnectionRefusedError("refused")
    assert repository.describe("l").name == "l"
    assert "'l', 'm'" not in repository.no_such_model("x")
    assert "its models are l, m" in repository.no_such_model("x")
    with pytest.raises(PollError) as refused:
        repository.describe("m")
    assert "s3://bucket/models cannot be read: refused" in refused.value.message
    assert "refused" not in refused.value.public


def test_store_that_cannot_be_read_at_first_is_an_error(store: FakeStore, tmp_path: Path) -> None:
    store.failing = ConnectionRefusedError("refused")
    with pytest.raises(ConchError) as refused:
        ModelRepository([URL], cache=str(tmp_path)).open()
    assert refused.value.code is Code.UNAVAILABLE


def test_changes_are_seen_without_a_download(store: FakeStore, tmp_path: Path) -> None:
    watch = Watch(ModelRepository([URL], cache=str(tmp_path / "cache")))
    assert watch.poll() == Changes(added=("m",))
    assert watch.poll() == Changes()
    store.files["m/2/model.py"] = b"new"
    store.files["n/1/model.py"] = b"n"
    assert watch.poll() == Changes(added=("n",), modified=("m",))
    store.failing = TimeoutError("slow")
    assert watch.poll() == Changes()
    store.failing = None
    del store.files["n/1/model.py"]
    assert watch.poll() == Changes(removed=("n",))
    assert store.fetched == []
    assert not (tmp_path / "cache").exists()


def test_directory_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = local(tmp_path / "here", "l")
    watch = Watch(ModelRepository([here]))
    watch.poll()
    here.rename(tmp_path / "away")
    assert [watch.poll(), watch.poll()] == [Changes(), Changes()]
    assert len(caplog.messages) == 1
    (tmp_path / "away").rename(here)
    assert watch.poll() == Changes()


async def test_closing_lets_go_who_waits_for_a_download(store: FakeStore, tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    def hang(*arguments: object) -> None:
        begun.set()
        end.wait(60)

    store.fetch = hang  # type: ignore[method-assign]
    repository = ModelRepository([URL], cache=str(tmp_path / "cache"))
    described = asyncio.ensure_future(repository.described("m"))
    await asyncio.to_thread(begun.wait, 10)
    repository.close()
    with pytest.raises(ConchError, match="stopping"):
        await asyncio.wait_for(described, 60)
    end.set()


async def test_descriptions_of_a_model_that_hang_and_are_cancelled_leave_threads_to_others(tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    class Hanging(ModelRepository):
        def describe(self, name: str, override: ModelConfig | None = None) -> ModelFiles:
            if name == "hangs":
                begun.set()
                end.wait(60)
            return super().describe(name, override)

    repository = Hanging([local(tmp_path, "hangs", "other")])
    for _ in range(10):
        described = asyncio.ensure_future(repository.described("hangs"))
        await asyncio.to_thread(begun.wait, 10)
        described.cancel()
    last = asyncio.ensure_future(repository.described("hangs"))
    assert (await asyncio.wait_for(repository.described("other"), 60)).name == "other"
    end.set()
    assert (await asyncio.wait_for(last, 60)).name == "hangs"
    repository.close()


async def test_error_of_a_download_that_no_caller_awaits_is_not_logged(
    store: FakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, end = threading.Event(), threading.Event()

    def fail(*arguments: object) -> None:
        begun.set()
        end.wait(60)
        raise OSError("unplugged")

    store.fetch = fail  # type: ignore[method-assign]
    repository = ModelRepository([URL], cache=str(tmp_path / "cache"))
    first = asyncio.ensure_future(repository.described("m"))
    await asyncio.to_thread(begun.wait, 10)
    first.cancel()
    second = asyncio.ensure_future(repository.described("m"))  # begins when the first has failed
    await asyncio.wait([first])
    end.set()
    with pytest.raises(PollError):
        await asyncio.wait_for(second, 60)
    gc.collect()
    assert "never retrieved" not in caplog.text
    repository.close()
