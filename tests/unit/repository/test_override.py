"""Loads with their own configuration and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import Code, ConchError
from conch.repository.errors import PollError
from conch.repository.override import Override, UploadedModel, describe_override, read_parameters

CONFIG = '{"backend": "python", "maxBatchSize": 2}'


def test_load_without_parameters_overrides_nothing() -> None:
    assert not read_parameters("m", {})


def test_files_and_configuration_are_read() -> None:
    override = read_parameters("m", {"config": CONFIG, "file:1/model.py": b"x", "file:a/../labels.txt": b"y"})

    assert override == Override(CONFIG, {"1/model.py": b"x", "labels.txt": b"y"})


def test_leading_slash_means_the_model_directory() -> None:
    assert read_parameters("m", {"config": CONFIG, "file:/1/model.py": b"x"}).files == {"1/model.py": b"x"}


@pytest.mark.parametrize("path", ["", ".", "..", "../model.py", "1/../../x", "/../x", "a\\..\\..\\b", "1/\0"])
def test_path_that_leaves_the_model_directory_fails_the_poll(path: str) -> None:
    with pytest.raises(PollError) as caught:
        read_parameters("m", {"config": CONFIG, f"file:{path}": b"x"})
    assert caught.value.public == "failed to load 'm', failed to poll from model repository"
    assert "must stay within model directory." in caught.value.message


def test_files_without_configuration_fail_the_poll() -> None:
    with pytest.raises(PollError) as caught:
        read_parameters("m", {"file:1/model.py": b"x"})
    assert caught.value.message == (
        "Poll failed for model directory 'm': Load parameter 'config' must be specified for model file override"
    )


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("foo", "x", "STRING"),
        ("foo", True, "BOOL"),
        ("foo", 1, "INT"),
        ("config", b"x", "BYTES"),
        ("file:x", "y", "STRING"),
    ],
)
def test_unknown_parameter_is_refused(key: str, value: object, kind: str) -> None:
    with pytest.raises(ConchError) as caught:
        read_parameters("m", {key: value})
    assert caught.value.message == f"Unrecognized load parameter '{key}' with type '{kind}'"
    assert caught.value.code is Code.INVALID_ARG


def test_uploaded_files_make_a_model_directory_until_it_is_closed() -> None:
    uploaded = UploadedModel("m", {"1/model.py": b"code", "labels.txt": b"a\n"})
    files = describe_override("m", uploaded.directory, CONFIG)

    assert (files.versions, files.artefacts, files.config.max_batch_size) == ((1,), {"model.py"}, 2)
    assert (files.version_directory(1) / "model.py").read_bytes() == b"code"
    assert files.config_path is None

    uploaded.close()
    assert not uploaded.directory.exists()


@pytest.mark.parametrize("path", [f"1/{'x' * 300}/model.py", f"1/{'x/' * 3000}model.py", f"1/{'ü' * 200}"])
def test_path_that_the_file_system_rejects_fails_the_poll(path: str) -> None:
    with pytest.raises(PollError) as caught:
        UploadedModel("m", {"1/model.py": b"x", path: b"x"})
    assert "File name too long" in caught.value.message


def test_file_in_the_place_of_a_directory_fails_the_poll() -> None:
    with pytest.raises(PollError):
        UploadedModel("m", {"1": b"x", "1/model.py": b"x"})


def test_invalid_configuration_fails_the_poll(tmp_path: Path) -> None:
    with pytest.raises(PollError) as caught:
        describe_override("m", tmp_path, '{"nam": 1}')
    assert caught.value.message.startswith("Poll failed for model directory 'm': Invalid config override: ")


def test_overriding_configuration_replaces_the_one_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text("max_batch_size: 9 dynamic_batching {}")

    config = describe_override("m", tmp_path, CONFIG).config

    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (2, False)
