"""What is applied keeps the file as it was but for what changes; loading is a fake."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from conch.core.errors import ConchError, internal
from conch.measure.analyze import applying
from conch.measure.analyze.applying import BEFORE, apply, changes
from conch.repository.scan import ModelRepository

TEXT = 'backend: "python" # ours\nmax_batch_size: 4\n'


class FakeServer:
    """Loads anything, or nothing."""

    fails = False

    def __init__(self, *given: object) -> None: ...

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def load(self, overrides: object) -> None:
        if self.fails:
            raise internal("8 does not fit")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRepository:
    monkeypatch.setattr(applying, "LocalServer", FakeServer)
    file = tmp_path / "models" / "m" / "config.pbtxt"
    (file.parent / "1").mkdir(parents=True)
    file.write_text(TEXT)
    file.chmod(0o600)
    return ModelRepository([tmp_path / "models"])


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_a_file_and_its_backup_keep_their_permissions(repository: ModelRepository) -> None:
    [change] = changes(repository, {"m": {"max_batch_size": 8}})
    [old] = apply(repository, [change])

    assert change.file.read_text() == TEXT.replace("4", "8") and old.read_text() == TEXT
    assert mode(change.file) == mode(old) == 0o600


def test_a_link_stays_one_and_its_file_is_written(repository: ModelRepository, tmp_path: Path) -> None:
    link = tmp_path / "models" / "m" / "config.pbtxt"
    (tmp_path / "shared").mkdir()
    real = link.rename(tmp_path / "shared" / "config.pbtxt")
    link.symlink_to(real)

    [old] = apply(repository, changes(repository, {"m": {"max_batch_size": 8}}))

    assert link.is_symlink() and real.read_text() == TEXT.replace("4", "8")
    assert old == link.with_name(link.name + BEFORE) and not old.is_symlink()
    assert sorted(path.name for path in real.parent.iterdir()) == ["config.pbtxt"]


@pytest.mark.parametrize("linked", [False, True])
def test_what_does_not_load_leaves_text_permissions_and_links_as_they_were(
    linked: bool, repository: ModelRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "fails", True)
    file = tmp_path / "models" / "m" / "config.pbtxt"
    if linked:
        file.symlink_to(file.rename(tmp_path / "real.pbtxt"))

    with pytest.raises(ConchError, match="nothing is applied: 8 does not fit"):
        apply(repository, changes(repository, {"m": {"max_batch_size": 8}}))

    assert file.read_text() == TEXT and mode(file) == 0o600 and file.is_symlink() == linked
    assert sorted(path.name for path in file.parent.iterdir()) == ["1", "config.pbtxt"]
