"""Stores that fsspec has a file system for: S3 and compatible servers, Google Cloud Storage, Azure Blob Storage."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from conch.core.errors import ConchError, invalid
from conch.machine import extras
from conch.repository.stores.store import Arrived, Redacted, RemoteFile, credential, explained, fields
from conch.repository.stores.urls import StoreUrl

#: Converts an error of a store's library into a readable error.
Explain = Callable[[Exception], ConchError]


class FilesystemStore:
    """Files below ``root`` in ``filesystem``, which must not cache listings.

    ``stamp`` and ``digest`` read an entry of a listing; ``credentials`` names the settings to check when access is
    denied. ``fetching`` are further arguments of ``get_file``.
    """

    def __init__(
        self,
        url: StoreUrl,
        filesystem: Any,
        *,
        stamp: Callable[[Mapping[str, Any]], str],
        digest: Callable[[Mapping[str, Any]], str],
        credentials: str,
        redacted: Redacted,
        fetching: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        self.filesystem = filesystem
        self._root = f"{url.bucket}/{url.prefix}" if url.prefix else url.bucket
        self._stamp = stamp
        self._digest = digest
        self._credentials = credentials
        self._redacted = redacted
        self._fetching = dict(fetching or {})

    def find(self, below: str = "") -> list[RemoteFile]:
        path = f"{self._root}/{below}" if below else self._root
        self.filesystem.invalidate_cache()
        entries = self.filesystem.find(path, detail=True)
        files = []
        for entry in entries.values():
            name = entry["name"].removeprefix("/")
            if not name.startswith(f"{self._root}/") or entry["type"] != "file":
                continue
            files.append(
                RemoteFile(
                    name.removeprefix(f"{self._root}/"),
                    int(entry["size"] or 0),
                    self._stamp(entry),
                    modification_time(entry),
                    self._digest(entry),
                )
            )
        return files

    def fetch(self, file: RemoteFile, target: Path, arrived: Arrived) -> None:
        path = f"{self._root}/{file.path}"
        self.filesystem.get_file(path, str(target), callback=_callback(arrived), **self._fetching)

    def key(self, file: RemoteFile) -> str:
        """Return the name of a file in its bucket."""
        return f"{self.url.prefix}/{file.path}" if self.url.prefix else file.path

    def digest_holds(self, file: RemoteFile) -> bool:
        return True

    def explain(self, error: Exception) -> ConchError:
        return explained(self.url, error, self._credentials, self._redacted)


def _callback(arrived: Arrived) -> Any:
    """Return an fsspec callback that reports received bytes to ``arrived``."""
    callback = extras.load("copying files", "fsspec.callbacks", extra="stores").Callback()
    callback.relative_update = lambda inc=1: arrived(inc)

    def absolute_update(value: int) -> None:
        arrived(max(value - callback.value, 0))
        callback.value = value

    callback.absolute_update = absolute_update
    return callback


def modification_time(entry: Mapping[str, Any]) -> float:
    """Return when a file was modified (seconds since 1970); 0 if the store does not report it."""
    for name in ("LastModified", "mtime", "last_modified", "updated", "created"):
        value = entry.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
            except ValueError:
                continue
    return 0.0


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


def open_gs(url: StoreUrl, environment: Mapping[str, str]) -> FilesystemStore:
    """Open the repository at ``url``. Raises UNSUPPORTED without the extra, and as ``credential`` does."""
    arguments = gs_arguments(url, environment)
    gcsfs = extras.load(f"model repository {url}", "gcsfs")
    # gcsfs warns at each call if it may not read the bucket's type, which is not needed here.
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    return FilesystemStore(
        url,
        gcsfs.GCSFileSystem(**arguments, skip_instance_cache=True, use_listings_cache=False),
        stamp=gs_stamp,
        digest=gs_digest,
        credentials="GOOGLE_APPLICATION_CREDENTIALS",
        redacted=Redacted(),
    )


def gs_arguments(url: StoreUrl, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``gcsfs.GCSFileSystem``.

    Without a credentials file, gcsfs uses the machine's service account, and then anonymous access.
    Raises INVALID_ARG for a missing file.
    """
    entry = credential(url, environment)
    named = entry if entry is not None else environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if not isinstance(named, str):
        raise invalid(f"TRITON_CLOUD_CREDENTIAL_PATH: the entry for {url} must be the path of a file")
    if named and not Path(named).is_file():
        raise invalid(f"the credentials for {url} should be in {named}, which does not exist")
    return {"token": named} if named else {}


def gs_stamp(entry: Mapping[str, Any]) -> str:
    """Return the generation of an object, which changes with each write."""
    return str(entry.get("generation") or entry.get("etag", ""))


def gs_digest(entry: Mapping[str, Any]) -> str:
    """Return the MD5 of an object's content; empty for composite objects, which have none."""
    value = entry.get("md5Hash")
    return f"md5:{base64.b64decode(value).hex()}" if isinstance(value, str) else ""


#: Environment variables that replace the fields of an entry in Triton's credentials file.
_VARIABLES: Final = {
    "account_str": "AZURE_STORAGE_ACCOUNT",
    "account_key": "AZURE_STORAGE_KEY",
    "auth_type": "AZURE_STORAGE_AUTH_TYPE",
    "client_id": "AZURE_STORAGE_CLIENT_ID",
}
_KINDS: Final = ("managed_identity", "default")


def open_azure(url: StoreUrl, environment: Mapping[str, str]) -> FilesystemStore:
    """Open the repository at ``url``. Raises UNSUPPORTED without the extra, and as ``credential`` does."""
    arguments, secrets = azure_arguments(url, environment)
    adlfs = extras.load(f"model repository {url}", "adlfs")
    if arguments.pop("managed", False):
        identity = extras.load(f"model repository {url}", "azure.identity.aio", extra="stores")
        arguments["credential"] = identity.ManagedIdentityCredential(client_id=arguments.pop("client_id", None))
    return FilesystemStore(
        url,
        adlfs.AzureBlobFileSystem(**arguments, skip_instance_cache=True, use_listings_cache=False),
        stamp=azure_stamp,
        digest=azure_digest,
        credentials="AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
        redacted=Redacted(secrets),
    )


def azure_arguments(url: StoreUrl, environment: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments of ``adlfs.AzureBlobFileSystem``, and the secrets among them.

    ``managed`` requests a managed identity, with ``client_id`` for a user-assigned one. Raises INVALID_ARG for a kind
    of authentication that Triton does not have.
    """
    entry = credential(url, environment)
    values = {name: value for name, variable in _VARIABLES.items() if (value := environment.get(variable))}
    if entry is not None:
        values = fields(entry, url, *_VARIABLES)
    account, _, domain = url.account.partition(".")
    arguments: dict[str, Any] = {"account_name": account}
    if domain:
        arguments["account_host"] = url.account
    kind = values.get("auth_type", "")
    if kind and kind not in (*_KINDS, "shared_key"):
        raise invalid(f"the authentication for {url} must be one of {', '.join(_KINDS)}; got '{kind[:40]}'")
    if kind == "managed_identity":
        arguments["managed"] = True
        if "client_id" in values:
            arguments["client_id"] = values["client_id"]
    elif kind == "default":
        arguments["anon"] = False
    elif "account_key" in values:
        arguments["account_key"] = values["account_key"]
    return arguments, (values.get("account_key", ""),)


def azure_stamp(entry: Mapping[str, Any]) -> str:
    """Return the ETag of a blob."""
    return str(entry.get("etag", "")).strip('"')


def azure_digest(entry: Mapping[str, Any]) -> str:
    """Return the MD5 of a blob's content; empty if the writer of the blob did not set it."""
    settings = entry.get("content_settings") or {}
    value = settings.get("content_md5")
    return f"md5:{bytes(value).hex()}" if isinstance(value, bytes | bytearray) and value else ""
