"""What ``conch init`` refuses; that its templates run is shown in ``tests/e2e/test_init.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.cli import init, main


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["../outside"], "'../outside' is not a valid model name"),
        ([".hidden"], "'.hidden' is not a valid model name"),
        (["größe"], "'größe' is not a valid model name"),
        (["m", "--template", "classifier", "--model", "./nothing"], "'./nothing' does not exist"),
        (["m", "--model-repository", "/dev/null"], "/dev/null/m/1 cannot be written: Not a directory"),
        (["m", "--model", "gpt2"], "--model is for the templates embedding and classifier, not for 'python'"),
    ],
)
def test_what_cannot_be_written_is_refused(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 1
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the model nor one that comes with it."""
    (tmp_path / "m_count").mkdir()
    assert main(["init", "m", "--template", "ensemble", "--model-repository", str(tmp_path)]) == 1
    assert f"{tmp_path / 'm_count'} already exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m_count"]


@pytest.mark.parametrize(("spec", "installed"), [(None, False), (object(), True)])
def test_pytest_is_to_be_installed_where_it_is_missing(
    spec: object, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: spec)
    commands = init.next_commands("m", init.TEMPLATES["python"], tmp_path)
    test = commands.index(f"pytest {tmp_path}/m")
    assert commands[test - 1].endswith(" install pytest") is not installed


def test_names_stand_where_they_belong(tmp_path: Path) -> None:
    written = init.write("my.model-1", "bls", tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in written) == [
        "my.model-1/1/model.py",
        "my.model-1/config.pbtxt",
        "my.model-1/test_my_model_1.py",
        "my.model-1_length/1/model.py",
        "my.model-1_length/config.pbtxt",
    ]
    assert 'model_name="my.model-1_length"' in written[0].read_text()
    assert not any("NAME" in path.read_text() or "${" in path.read_text() for path in written)


def test_a_folder_is_written_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'odd "name"').mkdir()
    (tmp_path / 'odd "name"' / "config.json").touch()
    init.write("m", "embedding", tmp_path / "models", 'odd "name"')
    assert f'{tmp_path}/odd \\"name\\"' in (tmp_path / "models" / "m" / "1" / "model.json").read_text()
