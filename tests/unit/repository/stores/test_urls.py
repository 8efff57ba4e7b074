"""The forms of URLs, Triton's among them, and those that are refused without repeating a secret."""

from __future__ import annotations

import pytest

from conch.core.errors import Code, ConchError
from conch.repository.stores.urls import StoreUrl, is_url, parse_url


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://bucket", ("s3", "bucket", "", "", "", "")),
        ("s3://bucket/a//b/", ("s3", "bucket", "a/b", "", "", "")),
        ("s3://localhost:9000/bucket/a", ("s3", "bucket", "a", "http://localhost:9000", "", "")),
        ("s3://[::1]:9000/bucket", ("s3", "bucket", "", "http://[::1]:9000", "", "")),
        ("s3://https://host:443/bucket/a", ("s3", "bucket", "a", "https://host:443", "", "")),
        ("s3://http://host/bucket", ("s3", "bucket", "", "http://host", "", "")),
        ("gs://bucket/a/b", ("gs", "bucket", "a/b", "", "", "")),
        ("as://account/container/a", ("as", "container", "a", "", "account", "")),
        ("as://a.blob.core.windows.net/container", ("as", "container", "", "", "a.blob.core.windows.net", "")),
        ("hf://org/name", ("hf", "org/name", "", "", "", "")),
        ("hf://org/name/models/all", ("hf", "org/name", "models/all", "", "", "")),
        ("hf://org/name@v1/models", ("hf", "org/name", "models", "", "", "v1")),
        ("hf://org/name@refs/pr/1/models", ("hf", "org/name", "models", "", "", "refs/pr/1")),
        ("hf://org/name@feature%2Fnew", ("hf", "org/name", "", "", "", "feature/new")),
        ("S3://bucket", ("s3", "bucket", "", "", "", "")),
    ],
)
def test_url_is_taken_apart(text: str, parts: tuple[str, ...]) -> None:
    scheme, bucket, prefix, endpoint, account, revision = parts
    wanted = StoreUrl(text.rstrip("/"), scheme, bucket, prefix, endpoint, account, revision)
    assert parse_url(text) == wanted
    assert str(wanted) == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "s3://", "s3:///a", "s3://b", "s3://localhost:9000", "s3://localhost:9000/", "s3://bucket/../other",
        "s3://bucket/a\nb", "s3://-bucket/a", "gs://", "as://account", "as://account/", "hf://name", "hf://org/name@",
        "hf://org/a--b", "hf://../name", "ftp://host/models", "http://host/models", "file:///models",
        "s3://" + "a" * 3000,
    ],
)  # fmt: skip
def test_url_of_no_repository_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConchError) as refused:
        parse_url(text)
    assert refused.value.code is Code.INVALID_ARG
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    "text", ["s3://key:hidden@bucket/a", "as://account/container?sig=hidden", "gs://bucket#hidden"]
)
def test_secret_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConchError) as refused:
        parse_url(text)
    assert "hidden" not in refused.value.message
    assert "credentials" in refused.value.message


def test_url_without_a_bucket_is_repeated_as_it_is() -> None:
    with pytest.raises(ConchError, match="model repository 's3://' is not a valid URL of its kind"):
        parse_url("s3://")


def test_path_is_no_url() -> None:
    assert not any(map(is_url, ["models", "/models", "C:\\models", "s3:/bucket", "./s3", ""]))
    assert is_url("s3://bucket")
