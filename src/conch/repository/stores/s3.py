"""Model repositories in Amazon S3 and S3-compatible servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from conch.machine import extras
from conch.repository.stores.filesystem import FilesystemStore
from conch.repository.stores.store import Redacted, RemoteFile, credential, fields
from conch.repository.stores.urls import StoreUrl

#: Timeouts of connecting to a server and of receiving data from it (s).
_CONNECT_SECONDS: Final = 10
_READ_SECONDS: Final = 20
#: The maximum number of attempts by botocore, including those after a busy response.
_ATTEMPTS: Final = 3
#: Larger files are read in concurrent parts of this size (bytes), which are all held in memory.
_PART: Final = 8 << 20
_PARTS: Final = 4
#: Matches an ETag that may be the MD5 of the content, as for a single upload without SSE-C or SSE-KMS encryption.
_MD5: Final = re.compile(r"[0-9a-f]{32}")


def open_s3(url: StoreUrl, environment: Mapping[str, str]) -> S3Store:
    """Open the repository at ``url``. Raises UNSUPPORTED without the extra, and as ``credential`` does."""
    arguments, secrets = s3_arguments(url, environment)
    s3fs = extras.load(f"model repository {url}", "s3fs")
    filesystem = s3fs.S3FileSystem(**arguments, skip_instance_cache=True, use_listings_cache=False)
    filesystem.retries = 1  # botocore has already retried
    return S3Store(
        url,
        filesystem,
        stamp=entity_tag,
        digest=md5_digest,
        credentials="AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_PROFILE",
        redacted=Redacted(secrets),
        fetching={"chunksize": _PART, "max_concurrency": _PARTS},
    )


def s3_arguments(url: StoreUrl, environment: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments of ``s3fs.S3FileSystem``, and the secrets among them and in the environment.

    Values missing from Triton's credentials file come from botocore: the environment, ``~/.aws`` and the machine, as in
    the AWS tools.
    """
    entry = credential(url, environment)
    values = (
        fields(entry, url, "key_id", "secret_key", "session_token", "region", "profile") if entry is not None else {}
    )
    arguments: dict[str, Any] = {
        "key": values.get("key_id"),
        "secret": values.get("secret_key"),
        "token": values.get("session_token"),
        "client_kwargs": {"region_name": values["region"]} if "region" in values else {},
        "config_kwargs": {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": {"max_attempts": _ATTEMPTS, "mode": "standard"},
        },
    }
    if url.endpoint:
        arguments["endpoint_url"] = url.endpoint
        # S3-compatible servers usually have no host name per bucket.
        arguments["config_kwargs"]["s3"] = {"addressing_style": "path"}
    if "profile" in values:
        arguments["profile"] = values["profile"]
    named = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    secrets = [values.get(name, "") for name in ("key_id", "secret_key", "session_token")]
    return arguments, (*secrets, *(environment.get(name, "") for name in named))


def entity_tag(entry: Mapping[str, Any]) -> str:
    """Return the ETag of an object in a listing, without quotes; empty if it has none."""
    return str(entry.get("ETag", "")).strip('"')


def md5_digest(entry: Mapping[str, Any]) -> str:
    """Return ``md5:`` and the MD5 if the ETag may be one; empty for other ETags, such as after a multipart upload."""
    etag = entity_tag(entry)
    return f"md5:{etag}" if _MD5.fullmatch(etag) else ""


class S3Store(FilesystemStore):
    """A bucket of an S3 server."""

    def digest_holds(self, file: RemoteFile) -> bool:
        """Return whether the ETag is an MD5: not with SSE-C or SSE-KMS, which listings do not show."""
        head = self.filesystem.call_s3("head_object", Bucket=self.url.bucket, Key=self.key(file))
        return not head.get("SSECustomerAlgorithm") and head.get("ServerSideEncryption", "AES256") == "AES256"
