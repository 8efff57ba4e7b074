"""What a listing tells: models, fingerprints, and that something else is there than a repository of models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conch.core.errors import ConchError
from conch.repository.stores.root import check_repository, models_in
from conch.repository.stores.store import RemoteFile
from conch.repository.stores.urls import parse_url

FILES = [
    RemoteFile("README.md", 1, "a"),
    RemoteFile(".git/config", 1, "b"),
    RemoteFile("m/config.pbtxt", 1, "c"),
    RemoteFile("m/1/model.py", 2, "d"),
    RemoteFile("m/2/model.py", 3, "e"),
    RemoteFile("m/labels.txt", 4, "f"),
    RemoteFile("m/.cache/x", 5, "g"),
    RemoteFile("m/1/__pycache__/x", 6, "h"),
    RemoteFile("empty/1/", 0, "i"),
]


def changed(path: str) -> list[RemoteFile]:
    return [replace(file, stamp="other") if file.path == path else file for file in FILES]


def test_models_are_the_directories() -> None:
    models = models_in(FILES)
    assert list(models) == ["empty", "m"]
    assert models["empty"].directories == ["1"]
    assert models["empty"].files == []
    assert models["m"].directories == ["1", "2"]
    assert models["m"].names_in("1") == {"model.py", "__pycache__"}


def test_fingerprint_tells_which_version_has_changed() -> None:
    before = models_in(FILES)["m"].fingerprint(None)
    assert set(before.versions) == {1, 2}
    assert models_in(list(reversed(FILES)))["m"].fingerprint(None) == before
    after = models_in(changed("m/2/model.py"))["m"].fingerprint(None)
    assert after.same_version(before, 1)
    assert not after.same_version(before, 2)
    assert models_in(changed("m/config.pbtxt"))["m"].fingerprint(None).config != before.config
    for path in ("m/.cache/x", "m/1/__pycache__/x"):
        assert models_in(changed(path))["m"].fingerprint(None) == before


def test_same_content_at_another_time_is_the_same() -> None:
    later = [replace(file, modified=file.modified + 1) for file in FILES]
    assert models_in(later)["m"].fingerprint(None) == models_in(FILES)["m"].fingerprint(None)


@pytest.mark.parametrize(
    ("url", "paths", "words"),
    [
        ("s3://bucket/a", [], "s3://bucket/a does not exist"),
        (
            "s3://bucket/a/m",
            ["config.pbtxt", "1/model.py"],
            "is a model, not a repository of models: use s3://bucket/a",
        ),
        ("s3://bucket/a/m", ["1/model.py"], "is a model"),
        ("s3://bucket/a", ["config.json", "model.safetensors"], "is a checkpoint"),
        ("hf://org/name", ["config.json", "1_Pooling/config.json"], "serve it with 'conch serve org/name'"),
        ("hf://org/name@v1", ["config.json"], "serve it with 'conch serve org/name --revision=v1'"),
        ("gs://bucket", ["team/m/config.pbtxt"], "use gs://bucket/team"),
    ],
)
def test_what_is_no_repository_is_reported_with_what_to_give(url: str, paths: list[str], words: str) -> None:
    files = [RemoteFile(path, 1) for path in paths]
    with pytest.raises(ConchError) as refused:
        check_repository(parse_url(url), files, models_in(files))
    assert words in refused.value.message


@pytest.mark.parametrize("paths", [["m/1/model.py"], ["m/config.pbtxt", "config.json"], ["README.md"], ["m/readme"]])
def test_repository_may_have_other_files_or_no_model_yet(paths: list[str]) -> None:
    files = [RemoteFile(path, 1) for path in paths]
    check_repository(parse_url("s3://bucket"), files, models_in(files))
