"""Which ETags are digests, and what is said where the packages for S3 are missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.repository.stores.filesystem import S3Store, entity_tag, md5_digest, open_s3
from conch.repository.stores.store import Redacted, RemoteFile
from conch.repository.stores.urls import parse_url

MD5 = "5d41402abc4b2a76b9719d911017c592"


class Heads:
    """A file system that answers what is asked of one object."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self.asked: dict[str, str] = {}

    def call_s3(self, method: str, **of: str) -> dict[str, Any]:
        self.asked = {"method": method, **of}
        return self.head


@pytest.mark.parametrize(
    ("head", "holds"),
    [
        ({}, True),
        ({"ServerSideEncryption": "AES256"}, True),
        ({"ServerSideEncryption": "aws:kms"}, False),
        ({"SSECustomerAlgorithm": "AES256"}, False),
    ],
)
def test_object_encrypted_with_a_key_of_its_own_has_no_digest(head: dict[str, Any], holds: bool) -> None:
    heads = Heads(head)
    url = parse_url("s3://bucket/models")
    store = S3Store(url, heads, stamp=entity_tag, digest=md5_digest, credentials="", redacted=Redacted())
    assert store.digest_holds(RemoteFile("m/1/w", 5, MD5)) is holds
    assert heads.asked == {"method": "head_object", "Bucket": "bucket", "Key": "models/m/1/w"}


def test_etag_of_an_object_in_parts_is_no_digest() -> None:
    assert md5_digest({"ETag": f'"{MD5}"'}) == f"md5:{MD5}"
    assert md5_digest({"ETag": f'"{MD5}-12"'}) == ""
    assert md5_digest({}) == ""


def test_missing_extra_is_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConchError) as refused:
        open_s3(parse_url("s3://bucket/models"), {})
    assert refused.value.code is Code.UNSUPPORTED
    assert "s3://bucket/models needs s3fs: " in refused.value.message
    assert "[stores]" in refused.value.message
