"""A repository in a store: what is copied, what is not, and what happens when the store is away."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from conch.config import pbtxt
from conch.core.errors import Code, ConchError
from conch.repository.errors import NotFoundError
from conch.repository.stores.root import StoreRoot
from tests.events import TIMEOUT
from tests.unit.repository.stores.fake_store import CONFIG, URL, FakeStore, root_over, two_versions

ENSEMBLE = b'platform: "ensemble" ensemble_scheduling { step { model_name: "m" model_version: -1 } }'


def files_in(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_only_the_versions_that_serve_are_copied(tmp_path: Path) -> None:
    store = two_versions()
    located = root_over(store, tmp_path).locate("m", None, None)
    assert located.directory.name == "m"
    assert files_in(located.directory) == ["2/model.py", "2/weights", "config.pbtxt"]
    assert located.inventory is not None
    assert located.inventory.directories == ("1", "2")
    assert located.inventory.artefacts == {"model.py"}


def test_versions_are_those_of_a_configuration_that_a_client_brings(tmp_path: Path) -> None:
    override = pbtxt.parse("version_policy { specific { versions: [ 1 ] } }", "")
    located = root_over(two_versions(), tmp_path).locate("m", None, override)
    assert files_in(located.directory) == ["1/model.py", "config.pbtxt"]


def test_named_configuration_decides(tmp_path: Path) -> None:
    store = two_versions()
    store.files["m/configs/all.pbtxt"] = CONFIG + b" version_policy { all { } }"
    assert "1/model.py" in files_in(root_over(store, tmp_path).locate("m", "all", None).directory)


def test_all_versions_are_there_to_be_checked(tmp_path: Path) -> None:
    located = root_over(two_versions(), tmp_path, whole=True).locate("m", None, None)
    assert len(files_in(located.directory)) == 4


def test_next_start_downloads_nothing(tmp_path: Path) -> None:
    first = root_over(two_versions(), tmp_path).locate("m", None, None)
    store = two_versions()
    again = root_over(store, tmp_path).locate("m", None, None)
    assert again.directory == first.directory
    assert store.fetched == []


def test_file_that_has_changed_alone_is_downloaded(tmp_path: Path) -> None:
    store = two_versions()
    root = root_over(store, tmp_path)
    before = root.locate("m", None, None)
    store.files["m/2/model.py"] = b"new"
    store.fetched.clear()
    after = root.locate("m", None, None)
    assert store.fetched == ["m/2/model.py"]
    assert (before.directory / "2" / "model.py").read_bytes() == b"two"
    assert (after.directory / "2" / "model.py").read_bytes() == b"new"
    assert (after.directory / "2" / "weights").samefile(before.directory / "2" / "weights")


def test_configuration_that_cannot_be_read_is_copied_for_the_reporter(tmp_path: Path) -> None:
    store = two_versions()
    store.files["m/config.pbtxt"] = b"{"
    assert files_in(root_over(store, tmp_path).locate("m", None, None).directory) == ["config.pbtxt"]


def test_ensemble_without_a_version_has_version_1(tmp_path: Path) -> None:
    located = root_over(FakeStore({"e/config.pbtxt": ENSEMBLE}), tmp_path).locate("e", None, None)
    assert located.inventory is not None
    assert located.inventory.directories == ("1",)
    assert (located.directory / "1").is_dir()


def test_marked_directory_is_made(tmp_path: Path) -> None:
    store = FakeStore({"e/config.pbtxt": ENSEMBLE, "e/3/": b""})
    assert (root_over(store, tmp_path).locate("e", None, None).directory / "3").is_dir()


def test_model_that_changes_while_it_is_copied_is_copied_again(tmp_path: Path) -> None:
    class Changing(FakeStore):
        """Has another weight after the first copy."""

        def find(self, below: str = "") -> list:  # type: ignore[type-arg]
            if "m/2/weights" in self.fetched:
                self.files["m/2/weights"] = b"later"
            return super().find(below)

    store = Changing(two_versions().files)
    located = root_over(store, tmp_path).locate("m", None, None)
    assert (located.directory / "2" / "weights").read_bytes() == b"later"


def test_model_that_never_stalls_is_an_error(tmp_path: Path) -> None:
    class Restless(FakeStore):
        """Has another weight whenever somebody looks."""

        def find(self, below: str = "") -> list:  # type: ignore[type-arg]
            self.files["m/2/weights"] += b"x"
            return super().find(below)

    root = root_over(Restless(two_versions().files), tmp_path)
    with pytest.raises(ConchError, match="3 times in a row") as refused:
        root.locate("m", None, None)
    assert refused.value.code is Code.UNAVAILABLE
    assert [path.name for path in (root.folder / "m").iterdir()] == ["lock"]


def test_names_that_lead_elsewhere_never_become_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = two_versions()
    store.files |= {"m/2/../../../evil": b"x", "../evil": b"x", "m//x": b"x", "/evil": b"x", "m/2/a\\b": b"x"}
    cache = tmp_path / "cache"
    root = root_over(store, cache)
    assert root.names() == ["m"]
    assert files_in(root.locate("m", None, None).directory) == ["2/model.py", "2/weights", "config.pbtxt"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    told = warnings(caplog)
    assert len(told) == len(set(told))
    assert sum("evil" in line for line in told) >= 3


def test_model_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    root = root_over(two_versions(), tmp_path)
    assert root.has("m")
    assert not root.has("other")
    with pytest.raises(NotFoundError):
        root.locate("other", None, None)
    assert not (tmp_path / root.folder.name / "other").exists()


def test_store_that_is_away_has_the_models_of_the_last_listing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conch")
    store = two_versions()
    root = root_over(store, tmp_path)
    before = root.fingerprints(None)
    store.failing = ConnectionRefusedError("refused, said hidden-key")
    for _ in range(3):
        assert root.fingerprints(None) == before
        assert root.names() == root.known() == ["m"]
        assert root.fingerprints(None) == before
        assert root.has("m")
    [line] = warnings(caplog)
    assert "s3://bucket/models cannot be read" in line
    assert "hidden-key" not in line
    with pytest.raises(ConchError) as refused:
        root.fingerprint("m", None)
    assert refused.value.code is Code.UNAVAILABLE
    store.failing = None
    assert root.fingerprints(None) == before
    assert "can be read again" in caplog.messages[-1]


def test_names_are_asked_of_a_store_that_does_not_answer_only_now_and_then(tmp_path: Path) -> None:
    store, now = two_versions(), [0.0]
    root = StoreRoot(URL, tmp_path, opener=lambda url: store, clock=lambda: now[0])
    root.names()
    store.failing = TimeoutError("slow")
    counts = []
    for now[0] in (0.0, 1.0, 14.0, 16.0, 17.0):
        root.names()
        counts.append(store.listings)
    assert counts == [2, 2, 2, 3, 3]


def test_store_that_hangs_has_the_models_of_the_last_listing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, now = two_versions(), [0.0]
    root = StoreRoot(URL, tmp_path, opener=lambda url: store, clock=lambda: now[0])
    root.names()
    store.answers.clear()
    root.timeout = 0.01
    assert root.names() == ["m"] and root.has("m") and not root.has("other")
    assert store.listings <= 2, "it is not asked again at once"
    with pytest.raises(ConchError, match="it has not responded within") as refused:
        root.locate("m", None, None)
    assert refused.value.code is Code.UNAVAILABLE
    assert len(warnings(caplog)) == 1
    now[0] = 20.0
    store.answers.set()
    root.timeout = TIMEOUT
    assert root.locate("m", None, None).directory.name == "m"


def test_listings_that_hang_take_one_thread_together(tmp_path: Path) -> None:
    store = two_versions()
    root = StoreRoot(URL, tmp_path, opener=lambda url: store)
    root.timeout = 0.01
    store.answers.clear()
    for _ in range(6):
        with pytest.raises(ConchError, match="it has not responded"):
            root.names()
    assert store.listings <= 1
    store.answers.set()


def test_repository_that_is_emptied_is_not_taken_for_one_without_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = two_versions()
    root = root_over(store, tmp_path)
    before = root.fingerprints(None)
    store.files.clear()
    assert root.fingerprints(None) == before
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (PermissionError("Access Denied"), Code.INVALID_ARG, "may not be read: Access Denied; check AWS_ACCESS_KEY_ID"),
        (FileNotFoundError("The bucket does not exist"), Code.INVALID_ARG, "does not exist"),
        (TimeoutError("timed out"), Code.UNAVAILABLE, "cannot be read: timed out"),
        (TimeoutError(), Code.UNAVAILABLE, "cannot be read: it sent no data before the timeout"),
        (OSError("Forbidden: hidden-key"), Code.INVALID_ARG, "may not be read: Forbidden: ***"),
    ],
)
def test_failure_of_the_first_read_is_raised_with_its_reason(
    tmp_path: Path, fault: Exception, code: Code, words: str
) -> None:
    store = two_versions()
    store.failing = fault
    with pytest.raises(ConchError) as refused:
        root_over(store, tmp_path).names()
    assert refused.value.code is code
    assert words in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConchError) as refused:
        root_over(two_versions(), tmp_path / "cache").locate("m", None, None)
    assert refused.value.code is Code.INTERNAL
    assert "no copy of s3://bucket/models/m can be made" in refused.value.message


def test_model_that_does_not_fit_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    store = two_versions()
    with pytest.raises(ConchError, match="10 bytes are free"):
        root_over(store, tmp_path).locate("m", None, None)
    assert store.fetched == ["m/config.pbtxt"]


def test_copies_of_a_model_that_is_gone_are_removed_at_the_next_start(tmp_path: Path) -> None:
    store = two_versions()
    store.files["n/1/model.py"] = b"n"
    root = root_over(store, tmp_path)
    for name in ("m", "n"):
        root.locate(name, None, None)
    del store.files["n/1/model.py"]
    again = root_over(store, tmp_path)
    again.names()
    assert [path.parent.name for path in again.folder.glob("*/1")] == ["m"]


def test_paths_of_copies_are_shown_as_urls(tmp_path: Path) -> None:
    root = root_over(two_versions(), tmp_path)
    directory = root.locate("m", None, None).directory
    assert root.shown(f"{directory}/config.pbtxt:3: bad") == "s3://bucket/models/m/config.pbtxt:3: bad"
    assert root.shown("/elsewhere/m/1/m") == "/elsewhere/m/1/m"


def test_closing_ends_what_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = root_over(two_versions(), tmp_path)
    listed.names()
    listed.close()
    assert listed.names() == ["m"]
    assert not warnings(caplog)
    root = root_over(two_versions(), tmp_path)
    root.close()
    with pytest.raises(ConchError, match="stopping"):
        root.names()
