"""What fsspec's file systems list and give, over the one that it has in memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest

from conch.core.errors import Code
from conch.repository.stores.filesystem import FilesystemStore, modification_time
from conch.repository.stores.store import Redacted
from conch.repository.stores.urls import parse_url


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
    filesystem.pipe(
        {"/bucket/models/m/1/model.py": b"code", "/bucket/models/m/config.pbtxt": b"", "/bucket/models2/x": b"x"}
    )
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


@pytest.fixture
def store(memory: Any) -> FilesystemStore:
    return FilesystemStore(
        parse_url("gs://bucket/models"),
        memory,
        stamp=lambda entry: f"stamp of {entry['size']}",
        digest=lambda entry: "",
        credentials="A_VARIABLE",
        redacted=Redacted(("hidden",)),
    )


def test_files_are_listed_below_the_prefix_alone(store: FilesystemStore) -> None:
    files = {file.path: file for file in store.find()}
    assert sorted(files) == ["m/1/model.py", "m/config.pbtxt"]
    assert (files["m/1/model.py"].size, files["m/1/model.py"].stamp) == (4, "stamp of 4")
    assert [file.path for file in store.find("m/1")] == ["m/1/model.py"]
    assert store.find("other") == []


def test_new_files_are_listed_at_once(store: FilesystemStore, memory: Any) -> None:
    store.find()
    memory.pipe("/bucket/models/n/1/a", b"a")
    assert "n/1/a" in {file.path for file in store.find()}


def test_file_arrives_and_its_bytes_are_reported(store: FilesystemStore, tmp_path: Path) -> None:
    told: list[int] = []
    file = next(file for file in store.find("m/1"))
    store.fetch(file, tmp_path / "model.py", told.append)
    assert (tmp_path / "model.py").read_bytes() == b"code"
    assert sum(told) == 4


def test_errors_have_no_secrets(store: FilesystemStore) -> None:
    error = store.explain(OSError("signature of hidden is wrong"))
    assert (error.code, "hidden" in error.message, "***" in error.message) == (Code.UNAVAILABLE, False, True)


def test_error_caused_by_missing_credentials_names_them(store: FilesystemStore) -> None:
    class NoCredentialsError(Exception):
        """As botocore's is called."""

    error = RuntimeError("failed")
    error.__cause__ = NoCredentialsError("Unable to locate credentials")
    assert store.explain(error).code is Code.INVALID_ARG
    assert "A_VARIABLE" in store.explain(error).message


@pytest.mark.parametrize("value", [datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00Z", 1767225600])
def test_times_are_read_in_every_form(value: object) -> None:
    assert modification_time({"LastModified": value}) == 1767225600.0
    assert modification_time({"mtime": "some day"}) == 0.0
