"""Credentials of each kind of store: Triton's file by the longest name, the environment, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.repository.stores.filesystem import (
    azure_arguments,
    azure_digest,
    azure_stamp,
    gs_arguments,
    gs_digest,
    gs_stamp,
    s3_arguments,
)
from conch.repository.stores.urls import parse_url


def file(folder: Path, content: Any) -> dict[str, str]:
    """The environment that names a file of credentials."""
    path = folder / "credentials.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)}


def refusal(call: Any, url: str, environment: dict[str, str]) -> str:
    with pytest.raises(ConchError) as refused:
        call(parse_url(url), environment)
    assert refused.value.code is Code.INVALID_ARG
    assert "hidden" not in refused.value.message
    return refused.value.message


def test_s3_without_a_file_leaves_credentials_to_the_library_of_aws() -> None:
    arguments, secrets = s3_arguments(parse_url("s3://bucket/a"), {"AWS_SECRET_ACCESS_KEY": "hidden"})
    assert (arguments["key"], arguments["secret"], arguments["token"]) == (None, None, None)
    assert "endpoint_url" not in arguments
    assert "hidden" in secrets


def test_s3_of_an_own_server_is_asked_by_path() -> None:
    arguments, _ = s3_arguments(parse_url("s3://https://host:9000/bucket"), {})
    assert arguments["endpoint_url"] == "https://host:9000"
    assert arguments["config_kwargs"]["s3"] == {"addressing_style": "path"}


def test_entry_with_the_longest_name_counts(tmp_path: Path) -> None:
    entry = {"key_id": "two", "secret_key": "hidden", "region": "eu", "session_token": "token", "profile": "me"}
    environment = file(tmp_path, {"s3": {"": {"key_id": "one"}, "s3://bucket": {}, "s3://bucket-002": entry}})
    arguments, secrets = s3_arguments(parse_url("s3://bucket-002/models"), environment)
    assert (arguments["key"], arguments["secret"], arguments["token"]) == ("two", "hidden", "token")
    assert (arguments["client_kwargs"], arguments["profile"]) == ({"region_name": "eu"}, "me")
    assert {"two", "hidden", "token"} <= set(secrets)
    other, _ = s3_arguments(parse_url("s3://another/models"), environment)
    assert (other["key"], other["secret"]) == ("one", None)


def test_google_gets_the_file_of_its_credentials(tmp_path: Path) -> None:
    url, own = parse_url("gs://bucket/a"), tmp_path / "google.json"
    own.write_text("{}")
    assert gs_arguments(url, {}) == {}
    assert gs_arguments(url, {"GOOGLE_APPLICATION_CREDENTIALS": str(own)}) == {"token": str(own)}
    assert gs_arguments(url, file(tmp_path, {"gs": {"gs://bucket": str(own)}})) == {"token": str(own)}


def test_azure_gets_the_account_of_the_url_and_its_key(tmp_path: Path) -> None:
    url = parse_url("as://account/container/a")
    environment = {"AZURE_STORAGE_ACCOUNT": "account", "AZURE_STORAGE_KEY": "hidden"}
    assert azure_arguments(url, environment) == ({"account_name": "account", "account_key": "hidden"}, ("hidden",))
    entry = {"account_str": "account", "account_key": "other"}
    named = {**environment, **file(tmp_path, {"as": {"as://account/container": entry}})}
    assert azure_arguments(url, named)[0]["account_key"] == "other"
    assert azure_arguments(parse_url("as://account.example.com/container"), {})[0] == {
        "account_name": "account",
        "account_host": "account.example.com",
    }


def test_azure_takes_identities_as_triton_does() -> None:
    url = parse_url("as://account/container")
    managed = {"AZURE_STORAGE_AUTH_TYPE": "managed_identity", "AZURE_STORAGE_CLIENT_ID": "id"}
    assert azure_arguments(url, managed)[0] == {"account_name": "account", "managed": True, "client_id": "id"}
    chain, _ = azure_arguments(url, {"AZURE_STORAGE_AUTH_TYPE": "default", "AZURE_STORAGE_KEY": "hidden"})
    assert chain == {"account_name": "account", "anon": False}
    assert "managed_identity" in refusal(azure_arguments, str(url), {"AZURE_STORAGE_AUTH_TYPE": "magic"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{hidden", "not JSON"),
        ("[]", "must hold an object"),
        ({"s3": "hidden"}, "must hold an object"),
        ({"s3": {"s3://other": {}}}, "no entry for s3://bucket"),
        ({"s3": {"": "hidden"}}, "must be an object"),
        ({"s3": {"": {"secret_key": ["hidden"]}}}, "must be an object"),
    ],
)
def test_unusable_file_is_refused_without_what_is_in_it(tmp_path: Path, content: Any, words: str) -> None:
    assert words in refusal(s3_arguments, "s3://bucket", file(tmp_path, content))


def test_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.json")
    assert gone in refusal(s3_arguments, "s3://bucket", {"TRITON_CLOUD_CREDENTIAL_PATH": gone})
    assert gone in refusal(gs_arguments, "gs://bucket", {"GOOGLE_APPLICATION_CREDENTIALS": gone})


def test_listings_of_google_and_azure_tell_what_changes_and_the_digest() -> None:
    assert gs_stamp({"generation": "17", "etag": "x"}) == "17"
    assert gs_digest({"md5Hash": "XUFAKrxLKna5cZ2REBfFkg=="}) == "md5:5d41402abc4b2a76b9719d911017c592"
    assert gs_digest({"crc32c": "x"}) == ""
    entry = {
        "etag": '"0x8D"',
        "content_settings": {"content_md5": bytearray.fromhex("5d41402abc4b2a76b9719d911017c592")},
    }
    assert (azure_stamp(entry), azure_digest(entry)) == ("0x8D", "md5:5d41402abc4b2a76b9719d911017c592")
    assert azure_digest({"etag": "x", "content_settings": {"content_md5": None}}) == ""
